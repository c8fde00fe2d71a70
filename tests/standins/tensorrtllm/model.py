"""A Python-based Triton backend under the name of NVIDIA's `tensorrtllm`, for machines without a GPU.

It refuses every configuration, engine and request that NVIDIA's would refuse (`standins/nvidia.py`), and answers the
rest with an engine of ours. Which one is in the stand-in engine's file, `rank0.engine`: parameters of
`orchestrator.engines`, with the files of that engine in the model's version folder. An engine's log probabilities
come as NVIDIA's do: those of earlier tokens again in every response.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton_python_backend_utils as pb_utils
from standins import nvidia

from orchestrator.engines import Chunk, EngineRefusal
from orchestrator.triton.cancellation import CancellationWatcher
from orchestrator.triton.engine_model import ChunkSender, EngineModel
from orchestrator.triton.sender import Sender

# Parameters of Triton's own and of `orchestrator.engines` that the real configuration does not have.
_OURS = ("exclude_input_in_output",)


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        told = {key: value["string_value"] for key, value in config["parameters"].items()}
        instance = int(args["model_instance_name"].rpartition("_")[2])
        # Relative to where the server was started, as for NVIDIA's.
        folder = Path(told.get("gpt_model_path", ""))
        fault = nvidia.find_config_fault(config) or nvidia.find_engine_fault(folder, told, instance, os.environ)
        if fault is not None:
            raise pb_utils.TritonModelException(f"[TensorRT-LLM] {fault}")
        self._told = told
        self._build_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["build_config"]
        engine = json.loads((folder / "rank0.engine").read_text(encoding="utf-8"))
        parameters = {**engine, **{key: told[key] for key in _OURS}}
        config["parameters"] = {key: {"string_value": str(value)} for key, value in parameters.items()}
        self._engine = _Engine({**args, "model_config": json.dumps(config)}, has_lines=False)
        self._adapters = nvidia.LoraCache()
        self._engine.poll_every(int(told["cancellation_check_period_ms"]) / 1000)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            outputs = request.requested_output_names()
            fault = nvidia.find_request_fault(tensors, outputs, self._told, self._build_config)
            if fault is None and "lora_task_id" in tensors:
                fault = self._adapters.find_fault(tensors)
            if fault is None:
                self._engine.execute([_WithoutLora(request)])
            else:
                Sender(request).send(pb_utils.InferenceResponse(error=pb_utils.TritonError(fault)), final=True)

    def finalize(self) -> None:
        self._engine.finalize()


class _WithoutLora:
    """A request as our engines take it, which have no adapters: the answer is the base model's."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def inputs(self) -> list[Any]:
        return [tensor for tensor in self._request.inputs() if not tensor.name().startswith("lora_")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Engine(EngineModel):
    """Our engine model with NVIDIA's log probabilities."""

    def poll_every(self, period_s: float) -> None:
        self._watcher.close()
        self._watcher = CancellationWatcher(period_s, self._report)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = _RepeatingSender(Sender(request))
            try:
                self._start(request, sender)
            except EngineRefusal as refusal:
                sender.send(Chunk([], finished=True, error=str(refusal)))


class _RepeatingSender(ChunkSender):
    """As `LlmRequest::createResult` does it: `output_ids` are new ones, `output_log_probs` all so far."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(sender)
        self._so_far: list[float] = []

    def log_probs_of(self, chunk: Chunk) -> list[float]:
        self._so_far += chunk.log_probs or []
        return self._so_far
