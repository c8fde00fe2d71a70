"""A client of an engine model by gRPC, past gateway and orchestrator."""

from __future__ import annotations

import queue
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from perf.errors import PerfError


class EngineClient:
    """One `ModelStreamInfer` stream for all requests, one request at a time. A context manager.

    One stream, because opening one costs 1 to 2 ms: that is the client's cost, and it would make the engine
    look slower and what we add to it smaller.
    """

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._channel = grpc.insecure_channel(url)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
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
        outputs = zip(response.infer_response.outputs, response.infer_response.raw_output_contents)
        lengths = [raw for output, raw in outputs if output.name == contracts.SEQUENCE_LENGTH.name]
        return struct.unpack("<i", lengths[0])[0] if lengths else 0

    def _request(self, token_ids: Sequence[int], max_tokens: int) -> Any:
        """What the orchestrator sends for `temperature` 0 and `ignore_eos`."""
        request = service_pb2.ModelInferRequest(model_name=self._model, id=uuid.uuid4().hex)

        def add(spec: contracts.TensorSpec, datatype: str, raw: bytes, length: int = 1) -> None:
            request.inputs.add(name=spec.name, datatype=datatype, shape=[1, length])
            request.raw_input_contents.append(raw)

        add(contracts.INPUT_IDS, "INT32", struct.pack(f"<{len(token_ids)}i", *token_ids), len(token_ids))
        add(contracts.INPUT_LENGTHS, "INT32", struct.pack("<i", len(token_ids)))
        add(contracts.REQUEST_OUTPUT_LEN, "INT32", struct.pack("<i", max_tokens))
        add(contracts.RUNTIME_TOP_K, "INT32", struct.pack("<i", 1))
        add(contracts.STREAMING, "BOOL", b"\x01")
        return request
