from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = {
    *("model", "tokenizer", "load_format", "dtype", "quantization", "kv_cache_dtype", "tensor_parallel_size"),
    *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"),
    *("enable_chunked_prefill", "structured_outputs_config", "generation_config", "enable_log_requests"),
    *("disable_log_stats", "cudagraph_capture_sizes", "speculative_config"),
}


class AsyncEngineArgs:
    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - NAMES:
            raise TypeError(f"unexpected keyword arguments {unknown}")
        if not (Path(values["model"]) / "config.json").is_file():
            raise ValueError(f"{values['model']}: no config.json")
        self.values = values
