"""The short way for tokens from our own engine models to the orchestrator: a line a step on a Unix socket.

By Triton and gRPC every chunk of every request is a response of its own: 170 µs on four threads, a third of what a
token costs beside the engine. An engine step makes all its chunks at once, so they leave as one line. Requests,
refusals, stops and ends still go through Triton, which schedules, counts and limits them; engines of NVIDIA's backends,
and callers on other machines, have Triton alone.

    in    once:          the subscriber's id
    out   once:          {}
          after a step:  {"request id": [four fields of Chunk], ...}
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pydantic_core

from orchestrator.engines import Chunk
from orchestrator.errors import EngineError
from orchestrator.local_socket import making_socket

log = logging.getLogger("orchestrator.engine")

# What comes of a request: its chunks, or that no more can come, though it goes on in the engine.
Received = asyncio.Queue[Chunk | EngineError]

# A line has some tokens of each live request; 512 requests of 64 KiB each would fill it.
MAX_LINE_BYTES = 32 << 20
_MAX_ID_BYTES = 64
# How long either side may keep the other waiting while they get to know each other; the orchestrator may be busy.
TIMEOUT_S = 10.0
# Of lines that a subscriber has not read, beside what the kernel holds: a minute of 200 streams. An orchestrator that
# is held up for some seconds must not lose all that runs, and one that hangs costs no more than this.
MAX_UNREAD_BYTES = 64 << 20
_PART_BYTES = 1 << 20  # that are sent at a time
_BACKLOG = 64


class Subscribers:
    """In an engine model: who gets lines. `put` and `flush` are for one thread; `find` is for any."""

    def __init__(self, path: str) -> None:
        """Listens at `path`, where only this user may connect. Raises `OSError`."""
        self._path = Path(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with making_socket(path):
            self._listener.bind(path)
        self._listener.listen(_BACKLOG)
        self._subscribers: dict[str, Subscriber] = {}
        self._thread = threading.Thread(target=self._accept, name="subscribers", daemon=True)
        self._thread.start()

    def find(self, subscriber_id: str) -> Subscriber | None:
        return self._subscribers.get(subscriber_id)

    def flush(self) -> None:
        """Send what was put, waiting for nobody; a subscriber that takes too little is dropped, and sees its
        connection end."""
        for subscriber_id, subscriber in list(self._subscribers.items()):
            try:
                subscriber.flush()
            except OSError as error:
                del self._subscribers[subscriber_id]
                subscriber.close()
                if not isinstance(error, BrokenPipeError):  # it has not just left
                    log.warning(json.dumps({"event": "subscriber_dropped", "error": str(error)}))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for subscriber in self._subscribers.values():
            subscriber.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            connection.settimeout(TIMEOUT_S)
            try:
                with connection.makefile("rb") as lines:
                    subscriber_id = lines.readline(_MAX_ID_BYTES).strip().decode()
                connection.settimeout(None)
                # Known before it is told so: its first request may be right behind.
                self._subscribers[subscriber_id] = Subscriber(connection)
                connection.sendall(b"{}\n")
            except (OSError, UnicodeError):
                connection.close()


class Subscriber:
    """One connection, and what waits for the end of the step.

    What the connection does not take at once, a thread sends that lives until it is taken: the engine's serves all.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._chunks: dict[str, Chunk] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # of what follows
        self._unread = bytearray()  # while there is some, the thread runs
        self._sender: threading.Thread | None = None
        self._failure: OSError | None = None

    def put(self, request_id: str, chunk: Chunk) -> None:
        """Of a request one chunk between two flushes."""
        if not self._is_closed:
            assert request_id not in self._chunks, request_id
            self._chunks[request_id] = chunk

    def flush(self) -> None:
        """Raises `OSError` when it is gone, or has `MAX_UNREAD_BYTES` to read."""
        if not self._chunks:
            return
        line = pydantic_core.to_json({key: chunk[:4] for key, chunk in self._chunks.items()}) + b"\n"
        self._chunks.clear()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if len(self._unread) > MAX_UNREAD_BYTES:
                raise OSError(f"{len(self._unread)} bytes were not read")
            if self._unread:
                self._unread += line
                return
            num_sent = 0
            with contextlib.suppress(BlockingIOError):
                num_sent = self._connection.send(line, socket.MSG_DONTWAIT)
            if num_sent < len(line):
                self._unread += line[num_sent:]
                self._sender = threading.Thread(target=self._send_unread, name="unread lines", daemon=True)
                self._sender.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # it has gone by itself
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the thread's send
        if self._sender is not None:
            self._sender.join()
        self._connection.close()

    def _send_unread(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._unread:
                        return
                    part = bytes(self._unread[:_PART_BYTES])
                num_sent = self._connection.send(part)
                with self._lock:
                    del self._unread[:num_sent]
        except OSError as error:
            self._failure = error


@dataclass(frozen=True)
class _Joined:
    """The connections to all instances of a model, under one subscriber's id."""

    subscriber_id: str
    readers: set[asyncio.Task[None]]


class TokenLines:
    """In the orchestrator, for one event loop: the lines of the engine models that have them."""

    def __init__(self, pattern: str) -> None:
        """`pattern` has `{model}` where a model's name goes, and finds the sockets of all its instances."""
        self._pattern = pattern
        self._joined: dict[str, _Joined] = {}  # by model
        self._joining: dict[str, asyncio.Lock] = {}
        self._open: dict[str, tuple[str, Received]] = {}  # by request id: its model, what came

    async def join(self, model: str) -> str | None:
        """The id by which requests to `model` ask for lines; None where it has none.

        Raises `EngineError` when it has, but cannot be reached.
        """
        if joined := self._joined.get(model):
            return joined.subscriber_id
        async with self._joining.setdefault(model, asyncio.Lock()):
            if joined := self._joined.get(model):
                return joined.subscriber_id
            if not (paths := glob.glob(self._pattern.format(model=model))):
                return None
            subscriber_id = uuid.uuid4().hex
            connections = []
            try:
                for path in paths:
                    connections.append(await asyncio.wait_for(_connect(path, subscriber_id), TIMEOUT_S))
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                for _, writer in connections:
                    writer.close()
                raise EngineError(f"{model} cannot be reached: {type(error).__name__}: {error}") from error
            readers = set()
            for reader, writer in connections:
                reading = asyncio.ensure_future(self._read(model, reader))
                reading.add_done_callback(partial(_hang_up, writer))  # also when it never began
                readers.add(reading)
            self._joined[model] = _Joined(subscriber_id, readers)
            return subscriber_id

    @contextlib.contextmanager
    def receive(self, model: str, request_id: str) -> Iterator[Received]:
        """What comes of a request of `model`, which was joined, to its finished chunk or an error."""
        queue: Received = asyncio.Queue()
        self._open[request_id] = (model, queue)
        try:
            yield queue
        finally:
            del self._open[request_id]

    async def close(self) -> None:
        readers = [reader for joined in self._joined.values() for reader in joined.readers]
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)

    async def _read(self, model: str, reader: asyncio.StreamReader) -> None:
        failure = f"the engine model hung up: it ended, or more than {MAX_UNREAD_BYTES} bytes of it were not read"
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                for request_id, fields in pydantic_core.from_json(line).items():
                    if request_id in self._open:  # else it was given up
                        self._open[request_id][1].put_nowait(Chunk(*fields))
        except (OSError, ValueError) as error:  # the second: a line that is too long
            failure = f"the engine model's lines broke: {type(error).__name__}: {error}"
        finally:
            self._leave(model, failure)

    def _leave(self, model: str, failure: str) -> None:
        """Once for all instances of `model`: they are joined anew with the next request."""
        this = asyncio.current_task()
        if model not in self._joined or this not in self._joined[model].readers:
            return
        for reader in self._joined.pop(model).readers - {this}:
            reader.cancel()
        for of_model, queue in self._open.values():
            if of_model == model:
                queue.put_nowait(EngineError(failure))


def _hang_up(writer: asyncio.StreamWriter, _: object) -> None:
    writer.close()


async def _connect(path: str, subscriber_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises `OSError`, or `EOFError` when it hangs up."""
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
    try:
        writer.write(subscriber_id.encode() + b"\n")
        if await reader.readline() != b"{}\n":
            raise EOFError("it hung up")
    except BaseException:
        writer.close()
        raise
    return reader, writer
