"""Many clients on one thread: closed loop or Poisson arrivals, each request over a connection of its own.

What comes is judged when a connection is over, between two others: the load of the client is part of the machine's, and
the same in the measurement of the capacity and in the soak.
"""

from __future__ import annotations

import heapq
import http.client
import io
import itertools
import random
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from perf.soak.traffic import Ask, Heard

TIMEOUT_S = 60.0  # of a request; what takes longer is lost
_RECEIVE_BYTES = 1 << 16
# How the server writes a delta's text; see `perf.sse`.
_TEXT_MARK = b'"content":"'


class Load:
    """`hear` is told of every request that is over, in the thread that runs the load."""

    def __init__(self, url: str, asks: Iterator[Ask], hear: Callable[[Heard], None]) -> None:
        self._address = urlsplit(url)
        self._asks = asks
        self._hear = hear
        self._selector = selectors.DefaultSelector()
        self._alarms: list[tuple[float, int, _Exchange]] = []  # when a client leaves, or has waited for too long
        self._count = itertools.count()

    def run_closed(self, num_clients: int, seconds: float) -> float:
        """Each client asks anew when its answer is over. Returns the requests a second, those left at the end aside."""
        began_s = time.monotonic()
        num_ended = self._run(lambda num_open: 0.0 if num_open < num_clients else None, began_s + seconds)
        rate = num_ended / (time.monotonic() - began_s)
        self.finish()
        return rate

    def run_poisson(self, rate: float, seconds: float, seed: int) -> None:
        """On average `rate` requests a second come, whether earlier ones are answered or not."""
        gaps = random.Random(seed)
        ends_s = time.monotonic() + seconds
        next_s = time.monotonic() + gaps.expovariate(rate)

        def due(_: int) -> float:
            nonlocal next_s
            due_s = next_s
            if due_s <= time.monotonic():
                next_s += gaps.expovariate(rate)
            return due_s

        self._run(due, ends_s)

    def finish(self) -> None:
        """Until what was asked is over."""
        self._run(lambda _: None, time.monotonic() + TIMEOUT_S + 1, is_last=True)

    def close(self) -> None:
        """Drop what is open."""
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _run(self, due: Callable[[int], float | None], ends_s: float, *, is_last: bool = False) -> int:
        """Until `ends_s`; returns how many requests ended.

        `due` says when the next one is to be sent, for a number of open ones; None: not before one of them is over.
        """
        num_ended = 0
        while (now_s := time.monotonic()) < ends_s and (self._selector.get_map() or not is_last):
            next_s = due(len(self._selector.get_map()))
            if next_s is not None and next_s <= now_s:
                num_ended += not self._begin(next(self._asks))
                continue
            wake_s = min(ends_s, *(s for s in (next_s, self._alarms[0][0] if self._alarms else None) if s is not None))
            for key, _ in self._selector.select(max(0.0, wake_s - now_s)):
                num_ended += key.data.receive() and self._end(key.data)
            while self._alarms and self._alarms[0][0] <= time.monotonic():
                _, _, exchange = heapq.heappop(self._alarms)
                if not exchange.is_over:
                    exchange.leave()
                    num_ended += self._end(exchange)
        return num_ended

    def _begin(self, ask: Ask) -> bool:
        """Whether it could be sent."""
        exchange = _Exchange(ask)
        try:
            exchange.send(str(self._address.hostname), int(self._address.port or 80))
        except OSError as error:
            exchange.fault = f"cannot be sent: {error}"
            return not self._end(exchange)
        self._selector.register(exchange, selectors.EVENT_READ, exchange)
        alarm_s = exchange.sent_s + (TIMEOUT_S if ask.leave_s is None else ask.leave_s)
        heapq.heappush(self._alarms, (alarm_s, next(self._count), exchange))
        return True

    def _end(self, exchange: _Exchange) -> bool:
        if exchange.fileno() in self._selector.get_map():
            self._selector.unregister(exchange)
        exchange.close()
        self._hear(exchange.heard())
        return True


class _Exchange:
    """One request and its answer, over a connection that the server closes behind it."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.fault: str | None = None
        self.is_over = False
        self.sent_s = time.monotonic()
        self._raw = bytearray()
        self._has_left = False
        self._socket = socket.socket()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, host: str, port: int) -> None:
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect((host, port))
        headers = {
            "host": f"{host}:{port}",
            "connection": "close",
            "content-length": str(len(self.ask.body)),
            **self.ask.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._socket.sendall(f"POST {self.ask.path} HTTP/1.1\r\n{head}\r\n".encode() + self.ask.body)
        self.sent_s = time.monotonic()

    def receive(self) -> bool:
        """Take what has come; True when it is over."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            self.fault = f"broke: {error}"
            return True
        self._raw += data
        if self.ask.leave_events is not None and self._raw.count(_TEXT_MARK) >= self.ask.leave_events:
            self._has_left = True
        return not data or self._has_left

    def leave(self) -> None:
        """Its time has come: the client goes, or has waited for too long."""
        if self.ask.leave_s is not None:
            self._has_left = True
        else:
            self.fault = f"not over after {TIMEOUT_S:.0f} s"

    def close(self) -> None:
        self.is_over = True
        self._socket.close()

    def heard(self) -> Heard:
        status, body = 0, b""
        if self._raw:
            response = http.client.HTTPResponse(_Received(bytes(self._raw)))  # type: ignore[arg-type]
            try:
                response.begin()
                status = response.status
                body = response.read()
            except http.client.IncompleteRead as error:
                body = error.partial
                if not self._has_left:
                    self.fault = self.fault or f"cut after {len(self._raw)} bytes"
            except (http.client.HTTPException, ValueError) as error:
                if not self._has_left:
                    self.fault = self.fault or f"no HTTP: {error!r}"
        return Heard(self.ask, self.sent_s, time.monotonic(), status, body, self._has_left, self.fault)


class _Received:
    """Bytes that have come, as `http.client` reads them off a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)
