"""triton-realtime: cache, routing and streaming in front of LLM engines on NVIDIA Triton."""

__version__ = "0.1.0"
