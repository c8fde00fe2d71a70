"""A worker: OpenVINO GenAI alone, in a tight loop. `python -m perf.bare_engine MODEL_FOLDER`

{"prompts": [[token id, ...], ...], "max_tokens": n} → {"tokens": n, "seconds": s}
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from orchestrator.engines.openvino import OpenVINOStepper
from perf.worker import answer_requests


def read_parameters(model_folder: Path) -> dict[str, str]:
    """The engine's settings in config.pbtxt."""
    config = text_format.Parse((model_folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    for name in ("exclude_input_in_output", "stream_interval"):  # of the way out of the engine
        parameters.pop(name, None)
    parameters["max_batch_size"] = str(config.max_batch_size)
    return parameters


def load_pipeline(model_folder: Path) -> genai.ContinuousBatchingPipeline:
    """The library's pipeline with the settings of config.pbtxt, loaded as the engine model loads it."""
    return OpenVINOStepper.load(model_folder / "1", read_parameters(model_folder))._pipeline


def generate(pipeline: genai.ContinuousBatchingPipeline, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Run all prompts together, greedy, to `max_tokens` tokens each; they are read after the last step."""
    tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, apply_chat_template=False)
    started_s = time.monotonic()
    handles = [pipeline.add_request(index, tensor, config) for index, tensor in enumerate(tensors)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    seconds = time.monotonic() - started_s
    num_tokens = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
    return {"tokens": num_tokens, "seconds": seconds}


def main() -> None:
    pipeline = load_pipeline(Path(sys.argv[1]))
    answer_requests(lambda request: generate(pipeline, request["prompts"], request["max_tokens"]))


if __name__ == "__main__":
    main()
