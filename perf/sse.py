"""A lean client of `/v1/chat/completions` and `/v1/completions`: while an answer comes it only records bytes and times.

The client runs on the cores it measures, so nothing is parsed before the answer is over.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from perf.errors import PerfError

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 60.0
MODEL = "simple"  # what choosing a tier adds is measured by itself
_RECEIVE_BYTES = 1 << 16
_OK = b"HTTP/1.1 200"
# How the server writes a delta's text. Text cannot imitate it: inside a JSON string the quotes are escaped.
_TEXT_MARK = b'"content":"'
# Where tokens come: what a model thinks aloud has two names in the field.
_CHANNELS = ("content", "text", "reasoning_content", "reasoning", "tool_calls", "refusal")
# The last chunk of a chunked body (RFC 9112, section 7.1). A chunk of events ends in "\n\n\r\n" instead.
_END_MARK = b"0\r\n\r\n"


class Answer(NamedTuple):
    """One streamed answer. Times are `time.monotonic()`: `sent_s` is when the request's last byte had been handed to
    the kernel, `times_s` when each event with tokens of any channel had arrived, `texts` what they said. `rt` is the
    server's own account.
    """

    sent_s: float
    times_s: list[float]
    num_tokens: int
    rt: dict[str, Any]
    texts: Sequence[str] = ()

    @property
    def first_token_s(self) -> float:
        return self.times_s[0]

    @property
    def last_token_s(self) -> float:
        return self.times_s[-1]

    @property
    def tpot_ms(self) -> float:
        """Milliseconds for each token but the first, however many came in one event; 0 where there is but one."""
        return (self.last_token_s - self.first_token_s) * 1000 / max(1, self.num_tokens - 1)

    @property
    def num_events(self) -> int:
        return len(self.times_s)

    @property
    def ttft_ms(self) -> float:
        return (self.first_token_s - self.sent_s) * 1000


def chat_body(prompt: str, max_tokens: int, *, may_end: bool = False) -> bytes:
    """A request for exactly `max_tokens` tokens of the cheapest tier, greedy, streamed, with usage.

    One that `may_end` before is one that a cache serves.
    """
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": max_tokens,
        **({} if may_end else {"ignore_eos": True}),
    }
    return json.dumps(request).encode()


class SseConnection:
    """One keep-alive connection, one request at a time. A context manager."""

    def __init__(self, url: str, path: str = CHAT_PATH) -> None:
        address = urlsplit(url)
        self._path = path
        self._host = address.netloc
        self._socket = socket.create_connection((address.hostname, address.port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._raw = bytearray()
        self._arrivals: list[tuple[int, float]] = []  # bytes received up to a time
        self._sent_s = 0.0

    def __enter__(self) -> SseConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, body: bytes) -> None:
        """Start a request; the answer before it must be complete."""
        self._raw.clear()
        self._arrivals.clear()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        self._sent_s = time.monotonic()

    def receive(self) -> bool:
        """Wait for bytes, record them; True when the answer is complete. Raises `PerfError` on failure."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            raise PerfError(f"http://{self._host}: nothing came for {TIMEOUT_S:.0f} s inside an answer") from None
        now = time.monotonic()
        if not data:
            raise PerfError(f"http://{self._host}: closed the connection inside an answer")
        self._raw += data
        self._arrivals.append((len(self._raw), now))
        if self._raw[: len(_OK)] != _OK[: len(self._raw)]:
            data += self._socket.recv(_RECEIVE_BYTES)  # uvicorn sends head and body apart
            raise PerfError(f"http://{self._host}: {data.decode(errors='replace')}")
        return self._raw.endswith(_END_MARK)

    def ask(self, body: bytes) -> Answer:
        """Send, and receive the whole answer."""
        self.send(body)
        while not self.receive():
            pass
        return self.answer()

    def num_text_events(self) -> int:
        """Events with text so far."""
        return self._raw.count(_TEXT_MARK)

    def answer(self) -> Answer:
        """The complete answer, parsed. Raises `PerfError` for an error event or without tokens or usage."""
        arrivals = [
            (event, self._arrivals[bisect_left(self._arrivals, (num_bytes,))][1])
            for event, num_bytes in _events(self._raw)
            if event != b"[DONE]"
        ]
        return read_answer(f"http://{self._host}", self._sent_s, arrivals)


def read_answer(url: str, sent_s: float, events: Sequence[tuple[bytes, float]]) -> Answer:
    """The answer in `events`, each with when it came. Raises `PerfError` for an error, or without tokens or usage."""
    times_s: list[float] = []
    texts: list[str] = []
    num_tokens = None
    rt: dict[str, Any] = {}
    for event, came_s in events:
        chunk = json.loads(event)
        if "error" in chunk:
            raise PerfError(f"{url}: {chunk['error']['message']}")
        parts = [choice.get("delta", choice) for choice in chunk["choices"]]
        if any(part.get(channel) for part in parts for channel in _CHANNELS):
            times_s.append(came_s)
            texts.append("".join(part.get("content") or part.get("text") or "" for part in parts))
        if chunk.get("usage"):
            num_tokens = chunk["usage"]["completion_tokens"]
        rt = chunk.get("rt", rt)
    if not times_s or num_tokens is None:
        raise PerfError(f"{url}: the stream ended without {'usage' if times_s else 'any text'}")
    return Answer(sent_s, times_s, num_tokens, rt, texts)


def ask_together(url: str, bodies: Sequence[bytes], path: str = CHAT_PATH) -> tuple[float, list[Answer]]:
    """Ask all `bodies` at once, from one thread, each over a connection of its own, opened before.

    Returns the time before the first was sent, and the answers in their order. Raises `PerfError` as `answer` does.
    """
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        connections = [opened.enter_context(SseConnection(url, path)) for _ in bodies]
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        started_s = time.monotonic()
        for connection, body in zip(connections, bodies):
            connection.send(body)
        num_open = len(connections)
        while num_open:
            for key, _ in selector.select():
                if key.fileobj.receive():  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)
                    num_open -= 1
        return started_s, [connection.answer() for connection in connections]


def _events(raw: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
    """The events of a chunked response, each with the number of raw bytes up to the end of it."""
    position = raw.index(b"\r\n\r\n") + 4
    pending = b""
    while True:
        line_end = raw.index(b"\r\n", position)
        start, size = line_end + 2, int(raw[position:line_end], 16)
        if size == 0:
            return
        end = start + size
        *events, pending = (pending + raw[start:end]).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: "), end
        position = end + 2
