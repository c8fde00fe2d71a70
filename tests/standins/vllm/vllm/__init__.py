"""Stands in for vLLM where none is: what `orchestrator.engines.vllm` uses of it, and an engine that echoes.

An answer is the prompt's own tokens, control tokens aside, in a circle, at FAKE_VLLM_ITL_MS milliseconds a token. With
an end token it ends after one round. The first id of a prompt may ask for trouble: see `v1.engine.async_llm`.
"""

from vllm.sampling_params import SamplingParams

__version__ = "stand-in"
__all__ = ["SamplingParams"]
