"""The whole stack with engine `vllm`, beside vLLM alone. `perf/gpu/run` sets up and starts it."""
