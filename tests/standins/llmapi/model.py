"""A stand-in for NVIDIA's LLM-API model (triton_backend/all_models/llmapi of TensorRT-LLM 1.2.1), as model.py.

It reads `model.yaml` as NVIDIA's does, refuses what NVIDIA's would, and has its traps: cumulative text, the prompt
echoed unless told otherwise, numbers as strings, an error for every stop, the transaction policy from model.yaml alone.
The scripted engine answers, from the folder that `model` names.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

from orchestrator.engines import Chunk, EngineRequest
from orchestrator.engines.process import ProcessEngine
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.triton.sender import Sender

CONTRACT = "contract.json"  # beside this file: NVIDIA's inputs, outputs and keys of model.yaml


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"], args["model_version"])
        listed = json.loads((folder / CONTRACT).read_text(encoding="utf-8"))
        settings = yaml.safe_load((folder / "model.yaml").read_text(encoding="utf-8"))
        triton = settings.pop("triton_config")
        config = json.loads(args["model_config"])
        if fault := _find_fault(config, settings, triton, listed):
            raise pb_utils.TritonModelException(f"[LLM API] {fault}")
        self._is_decoupled: bool = triton["decoupled"]
        checkpoint = Path(settings["model"])  # relative to where the server was started
        parameters = json.loads((checkpoint / "standin.json").read_text(encoding="utf-8"))
        tokens = checkpoint / "tokenizer"
        self._tokenizer = ChatTokenizer.load(tokens)
        config = json.loads((tokens / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._end_id = self._tokenizer.encode(str(config["eos_token"]))[0]
        self._engine = ProcessEngine({**parameters, "max_batch_size": str(settings["max_batch_size"])}, checkpoint)
        self._max_input_len: int = settings["max_input_len"]
        self._live: dict[str, Sender] = {}
        self._lock = threading.Lock()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = Sender(request)
            try:
                self._start(request, sender)
            except ValueError as error:
                sender.send(_error(str(error)), final=True)

    def finalize(self) -> None:
        self._engine.close()

    def _start(self, request: Any, sender: Sender) -> None:
        given = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
        request_id = request.request_id()
        if "stop" in given and given["stop"][0]:
            if not request_id:
                raise ValueError("Cannot cancel a request without a request_id")
            self._cancel(request_id)
            sender.send(_error("Request cancelled", "CANCELLED"), final=True)
            return
        is_streaming = bool(given.get("streaming", [False])[0])
        if is_streaming and not self._is_decoupled:
            raise ValueError("Streaming is only supported in decoupled mode.")
        prompt = given["text_input"][0].decode()
        ids = self._tokenizer.encode_whole(prompt)
        if len(ids) > self._max_input_len:
            raise ValueError(f"prompt length ({len(ids)}) exceeds max_input_len ({self._max_input_len})")
        wanted = EngineRequest(
            request_id=request_id or f"{id(request)}",
            input_ids=ids,
            max_new_tokens=int(given.get("sampling_param_max_tokens", [32])[0]),
            end_id=self._end_id,
        )
        echo = "" if given.get("sampling_param_exclude_input_from_output", [False])[0] else prompt
        answer = _Answer(sender, given, echo, is_streaming, self._tokenizer, wanted)
        with self._lock:
            self._live[wanted.request_id] = sender

        def deliver(chunk: Chunk) -> None:
            with self._lock:
                if wanted.request_id not in self._live:
                    return  # cancelled, and told so
                if chunk.finished:
                    del self._live[wanted.request_id]
                answer.add(chunk)  # or it could be cancelled, and told so, meanwhile

        self._engine.add(wanted, deliver)

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            sender = self._live.pop(request_id, None)
        self._engine.stop(request_id)
        if sender is not None:
            sender.send(_error("Request cancelled", "CANCELLED"), final=True)


class _Answer:
    """One request's responses: all the text so far, each time."""

    def __init__(
        self,
        sender: Sender,
        given: dict[str, Any],
        text: str,
        is_streaming: bool,
        tokenizer: ChatTokenizer,
        request: EngineRequest,
    ) -> None:
        self._sender, self._given, self._echo, self._is_streaming = sender, given, text, is_streaming
        self._tokenizer, self._request, self._ids = tokenizer, request, list[int]()

    def add(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            self._sender.send(_error(chunk.error), final=True)
            return
        self._ids += chunk.token_ids
        if self._is_streaming or chunk.finished:
            self._sender.send(pb_utils.InferenceResponse(self._tensors(chunk.finished)), final=chunk.finished)

    def _tensors(self, is_finished: bool) -> list[Any]:
        # Plain decoding: an unfinished character is a replacement character.
        text = self._tokenizer._tokenizer.decode(self._ids, skip_special_tokens=True)
        tensors = [_text("text_output", self._echo + text)]
        if self._given.get("return_finish_reason", [False])[0]:
            is_cut = len(self._ids) >= self._request.max_new_tokens and self._ids[-1] != self._request.end_id
            tensors.append(_text("finish_reason", ("length" if is_cut else "stop") if is_finished else "None"))
        if self._given.get("return_stop_reason", [False])[0]:
            tensors.append(_text("stop_reason", "None"))
        if self._given.get("sampling_param_return_perf_metrics", [False])[0]:
            tensors += [_text("kv_cache_reused_block", "0"), _text("acceptance_rate", "0.0")]
        return tensors


def _text(name: str, value: str) -> Any:
    return pb_utils.Tensor(name, np.array([value.encode()], dtype=np.object_))


def _error(message: str, code: str = "INTERNAL") -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))


def _find_fault(
    config: dict[str, Any], settings: dict[str, Any], triton: dict[str, Any], listed: dict[str, Any]
) -> str | None:
    for kind in ("input", "output"):
        names = [each["name"] for each in config[kind]]
        if names != [each["name"] for each in listed[f"llmapi {kind}s"]]:
            return f"{kind}s differ from NVIDIA's: {names}"
    if triton["max_batch_size"] != 0 or config["max_batch_size"] != 0:
        return "max_batch_size: only 0 works"
    if unknown := set(triton) - set(listed["triton_config"]):
        return f"triton_config: unknown keys {unknown}"
    if unknown := set(settings) - set(listed["LLM"]):
        return f"LLM.__init__() got unexpected keyword arguments {sorted(unknown)}"
    if not Path(settings["model"]).is_dir():
        return f"model: {settings['model']} is no folder"
    return None
