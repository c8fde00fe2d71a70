"""The short way to the orchestrator, for who runs on the same machine: Triton's stream messages on a Unix socket.

By Triton's gRPC a request passes four more threads on its way in and each event as many on its way out, which is a
millisecond before the first token and a third of what a token costs. The gateway and the gRPC front come this way where
`serve` has named one; for everybody else there is Triton.

A message is its length (4 bytes, little-endian) and a `ModelInferRequest`, or back a `ModelStreamInferResponse` as
Triton would send it. A connection that closes ends what runs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator.call import Call
from orchestrator.contracts import EVENT, HEADERS, ORCHESTRATOR_MODEL
from orchestrator.errors import ApiError, InternalError, SlowReaderError
from orchestrator.wire import add_output, error_response, mark_end

log = logging.getLogger("orchestrator.requests")

# The environment variable with what the sockets' paths begin with: no more than this user may open them.
SOCKETS_VARIABLE = "TRITON_REALTIME_SOCKETS"
# A request is 1 MiB at most (`gateway.guard`, `grpc_front.checks`) beside its parameters. What comes back has no limit
# here: how long an answer may be the orchestrator has decided, and a whole one of many tokens is one message.
MAX_REQUEST_MESSAGE_BYTES = 4 << 20
# What a reader may be behind, and for how long it may be more: an answer that another caller has had, or that was kept,
# comes at once. So what stalled readers cost is this each, and of what all engines make in that time.
MAX_BEHIND_BYTES, BEHIND_TIMEOUT_S = 1 << 20, 2.0
# Connections that wait to be accepted: more than the requests that the orchestrator takes (`limits.max_live_requests`).
# Linux refuses one more at once (EAGAIN) where TCP would have it try again, so that is done here.
_BACKLOG = 1024
_CONNECT_TIMEOUT_S, _CONNECT_PAUSE_S = 2.0, 0.005
_LENGTH_BYTES = 4


def socket_of(prefix: str, grpc_url: str, model: str, instance_name: str = "*") -> str:
    """Where a model of the Triton at `grpc_url` listens: an instance of it, or with "*" a pattern for all of them."""
    return f"{prefix}{grpc_url.rpartition(':')[2]}-{model}.{instance_name.removeprefix(f'{model}_')}.sock"


@contextlib.contextmanager
def making_socket(path: str) -> Iterator[None]:
    """What binds a socket to `path` meanwhile makes one that only this user may open, in the place of what is there."""
    Path(path).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


class LocalCall:
    """To `InferStream` what gRPC's `ModelStreamInfer` is; it connects with the first message."""

    def __init__(self, pattern: str) -> None:
        """Of the sockets that `pattern` finds it takes one at random: they are the orchestrator's instances."""
        self._pattern = pattern
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def write(self, request: Any) -> None:
        """Raises `OSError` when nobody listens."""
        if self._connection is None:
            if not (paths := glob.glob(self._pattern)):
                raise FileNotFoundError(f"no orchestrator listens at {self._pattern}")
            self._connection = await _connect(random.choice(paths))
        writer = self._connection[1]
        writer.write(_frame(request))
        await writer.drain()

    async def read(self) -> Any:
        """The next `ModelStreamInferResponse`; `grpc.aio.EOF` at the end."""
        assert self._connection is not None
        try:
            return service_pb2.ModelStreamInferResponse.FromString(await _read(self._connection[0]))
        except (asyncio.IncompleteReadError, OSError):
            return aio.EOF

    def done(self) -> bool:
        """Whether it has ended, by whomever."""
        return self._connection is not None and (self._connection[0].at_eof() or self._connection[1].is_closing())

    async def done_writing(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        if self._connection is not None:
            self._connection[1].close()


async def _connect(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    ends_s = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise
        await asyncio.sleep(_CONNECT_PAUSE_S)


class LocalSink:
    """Sends a call's events as responses to one request."""

    def __init__(self, writer: asyncio.StreamWriter, request_id: str) -> None:
        self.is_over = False
        self._writer = writer
        self._request_id = request_id
        self._headers: dict[str, str] = {}  # for the first event to take along
        self._behind_since_s: float | None = None

    def announce(self, headers: Mapping[str, str]) -> None:
        self._headers = dict(headers)

    def send(self, event: str | None, *, final: bool) -> None:
        """With None and `final` just the end. Raises `SlowReaderError` in the place of an event that nobody reads."""
        if not final:
            self._check_reader()
        response = service_pb2.ModelStreamInferResponse()
        inferred = response.infer_response
        inferred.model_name, inferred.model_version, inferred.id = ORCHESTRATOR_MODEL, "1", self._request_id
        mark_end(response, final)
        if event is not None:
            add_output(inferred, EVENT, event.encode())
        if self._headers:
            add_output(inferred, HEADERS, json.dumps(self._headers).encode())
            self._headers = {}
        self._write(response, final)

    def fail(self, error: ApiError) -> None:
        self._write(error_response(self._request_id, error.to_message()), final=True)

    def _check_reader(self) -> None:
        if self._writer.transport.get_write_buffer_size() <= MAX_BEHIND_BYTES:
            self._behind_since_s = None
            return
        now_s = time.monotonic()
        self._behind_since_s = self._behind_since_s or now_s
        if now_s > self._behind_since_s + BEHIND_TIMEOUT_S:
            raise SlowReaderError(
                f"more than {MAX_BEHIND_BYTES} bytes of the stream were not read for {BEHIND_TIMEOUT_S:g} s; read it "
                "as it comes, or ask for less of it (n, logprobs, max_tokens)"
            )

    def _write(self, response: Any, final: bool) -> None:
        self.is_over = final
        if not self._writer.is_closing():  # else the caller has left, which `listen` tells the call
            self._writer.write(_frame(response))


async def listen(path: str, receive: Callable[[Any, LocalSink], Call | None]) -> asyncio.AbstractServer:
    """Take requests at `path`: `receive` gets each `ModelInferRequest` and returns the call that it begins, if any.

    When a connection closes, its calls are cancelled. Only this user may connect.
    """

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun: list[tuple[Call, LocalSink]] = []
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    request = service_pb2.ModelInferRequest.FromString(await _read(reader, MAX_REQUEST_MESSAGE_BYTES))
                    sink = LocalSink(writer, request.id)
                    try:
                        call = receive(request, sink)
                    except Exception as error:  # a fault of ours, which the next request need not have
                        log.exception("a request failed before it began")
                        sink.fail(InternalError(f"the orchestrator failed: {type(error).__name__}"))
                        continue
                    if call is not None:
                        begun = [(call, sink), *(each for each in begun if not each[1].is_over)]
        except (ValueError, DecodeError) as error:
            log.warning("a connection to the orchestrator was closed: %s", error)
        finally:
            writer.close()
            for call, sink in begun:
                if not sink.is_over:
                    await call.cancel()

    with making_socket(path):
        return await asyncio.start_unix_server(converse, path, backlog=_BACKLOG)


def _frame(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


async def _read(reader: asyncio.StreamReader, max_bytes: int | None = None) -> bytes:
    """One message. Raises `IncompleteReadError` at the end, `ValueError` for one of more than `max_bytes`."""
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a message of {size} bytes; at most {max_bytes} are allowed")
    return await reader.readexactly(size)
