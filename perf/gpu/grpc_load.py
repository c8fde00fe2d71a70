"""Many streamed answers at once from the model `orchestrator`, by `ModelStreamInfer`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.grpc_front.relay import MAX_LIVE_PER_STREAM
from orchestrator.wire import add_string, find_output, new_request, read_strings
from perf.errors import PerfError
from perf.sse import TIMEOUT_S, Answer, read_answer

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class Stream:
    """One connection with one call for as many requests as the front takes on it. A context manager.

    What comes is only recorded, with its time: the client runs on the cores it measures.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        grpc.channel_ready_future(self._channel).result(TIMEOUT_S)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self._channel.stream_stream(_METHOD)(iter(self._requests.get, None))  # bytes in, bytes out
        self._came: list[tuple[bytes, float]] = []
        self._failure: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._channel.close()

    def send(self, message: bytes) -> None:
        self._requests.put(message)

    def take(self) -> list[tuple[bytes, float]]:
        """All responses, with when they came, after the last request ended."""
        self._requests.put(None)
        self._thread.join(TIMEOUT_S)
        if self._failure is not None or self._thread.is_alive():
            raise PerfError(f"ModelStreamInfer: {self._failure or 'no end'}")
        return self._came

    def _receive(self) -> None:
        try:
            for response in self._call:
                self._came.append((response, time.monotonic()))
        except grpc.RpcError as error:
            self._failure = error


def ask_together(address: str, bodies: Sequence[bytes]) -> tuple[float, list[Answer]]:
    """Ask all `bodies` at once. Returns the time before the first was sent, and the answers in their order.

    Raises `PerfError` for an answer that failed.
    """
    messages = [_message(str(number), body) for number, body in enumerate(bodies)]
    with ExitStack() as opened:
        groups = [messages[at : at + MAX_LIVE_PER_STREAM] for at in range(0, len(messages), MAX_LIVE_PER_STREAM)]
        streams = [opened.enter_context(Stream(address)) for _ in groups]
        started_s, sent_s = time.monotonic(), []
        for stream, group in zip(streams, groups):
            for message in group:
                sent_s.append(time.monotonic())
                stream.send(message)
        events: list[list[tuple[bytes, float]]] = [[] for _ in bodies]
        for stream in streams:
            for raw, came_s in stream.take():
                response = service_pb2.ModelStreamInferResponse.FromString(raw)
                if response.error_message:
                    raise PerfError(f"grpc://{address}: {response.error_message}")
                if event := find_output(response, contracts.EVENT):
                    events[int(response.infer_response.id)] += [(each, came_s) for each in read_strings(event)]
    return started_s, [read_answer(f"grpc://{address}", *each) for each in zip(sent_s, events)]


def _message(request_id: str, body: bytes) -> bytes:
    request: Any = new_request(contracts.ORCHESTRATOR_MODEL, request_id)
    add_string(request, contracts.REQUEST, body)
    return bytes(request.SerializeToString())
