"""A client of an engine model by gRPC, past gateway and orchestrator."""

from __future__ import annotations

import queue
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from orchestrator import contracts
from orchestrator.engines import EngineRequest
from orchestrator.inference_key import unlock
from orchestrator.triton.engine_client import build_request
from orchestrator.wire import find_output
from perf.errors import PerfError


class EngineClient:
    """One `ModelStreamInfer` stream for all requests, one request at a time. A context manager.

    One stream, because opening one costs 1 to 2 ms: that is the client's cost, and it would make the engine
    look slower and what we add to it smaller.
    """

    def __init__(self, url: str, model: str, key: str) -> None:
        self._model = model
        self._channel = grpc.insecure_channel(url)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = unlock(service_pb2_grpc.GRPCInferenceServiceStub(self._channel), key)
        self._responses = stub.ModelStreamInfer(iter(self._requests.get, None))

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._channel.close()

    def first_token_ms(self, token_ids: Sequence[int], max_tokens: int) -> float:
        """Milliseconds to the first token of a greedy answer of `max_tokens` tokens; all are awaited.

        Raises `PerfError` when the engine or the server fails.
        """
        request = self._request(token_ids, max_tokens)
        first_s, num_tokens = None, 0
        started_s = time.monotonic()
        self._requests.put(request)
        while num_tokens < max_tokens:
            num_tokens += self._receive()
            first_s = first_s or time.monotonic()
        assert first_s is not None
        return (first_s - started_s) * 1000

    def _receive(self) -> int:
        """The number of tokens in the next response."""
        try:
            response = next(self._responses)
        except grpc.RpcError as error:
            raise PerfError(f"{self._model}: {error}") from error
        if response.error_message:
            raise PerfError(f"{self._model}: {response.error_message}")
        raw = find_output(response, contracts.SEQUENCE_LENGTH)
        return struct.unpack("<i", raw)[0] if raw else 0

    def _request(self, token_ids: Sequence[int], max_tokens: int) -> Any:
        """What the orchestrator sends for `temperature` 0 and `ignore_eos`."""
        return build_request(self._model, EngineRequest(uuid.uuid4().hex, list(token_ids), max_tokens))
