from __future__ import annotations

from typing import Any


class PrometheusStatLogger:
    """As a base class alone: vLLM's own asks vLLM's configuration for much."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        raise NotImplementedError

    def log(self) -> None:
        pass
