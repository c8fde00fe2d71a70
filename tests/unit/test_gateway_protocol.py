"""What one connection may cost: sizes and times of requests and of readers, against a real uvicorn on a thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.gateway.__main__ import SEND_BUFFER_BYTES
from orchestrator.gateway.protocol import Limits, Protocol
from orchestrator.gateway.web_socket import WebSocketProtocol

LIMITS = Limits(
    head_bytes=2000, num_headers=20, read_s=0.4, write_s=0.4, idle_s=0.6, discarded_bytes=1 << 20, raw_bytes=100_000
)


class SmallProtocol(Protocol):
    limits = LIMITS


class App:
    """Reads a request's body and answers its length. /early answers before the body, /endless until the client left,
    /large with 2 MiB, /gate when the test lets it."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_running = 0
        self.num_floods = 0
        self.gate = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket" and scope["path"] == "/flood":
            await receive()
            await send({"type": "websocket.accept", "headers": []})
            await send({"type": "websocket.send", "bytes": bytes(1 << 20)})
            self.num_floods += 1
            while (await receive())["type"] != "websocket.disconnect":
                pass
        if scope["type"] == "websocket":
            while scope["path"] == "/hang" and (await receive())["type"] != "websocket.disconnect":
                pass
        if scope["type"] != "http":
            return
        self.num_running += 1
        try:
            await self._answer(scope["path"], receive, send)
        finally:
            self.num_running -= 1

    async def _answer(self, path: str, receive: Any, send: Any) -> None:
        num_bytes = 0
        while path != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message["body"])
            if not message["more_body"]:
                break
        while path == "/gate" and not self.gate.is_set():
            await asyncio.sleep(0.01)
        if path != "/endless":
            body = bytes(2 << 20) if path == "/large" else str(num_bytes).encode()
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
            self.num_sent += 10_000
            await asyncio.sleep(0)  # `send` alone need not let others run, and `receive` is one of them


class Server:
    def __init__(self, protocol: type[Protocol] = SmallProtocol) -> None:
        self.app = App()
        config = uvicorn.Config(
            self.app,
            http=protocol,
            ws=WebSocketProtocol,
            loop="uvloop",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=1,
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        wait_for(lambda: self._server.started)

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(5)
        connection.connect(self._listener.getsockname())
        return connection

    def ask(self, raw: bytes) -> bytes:
        """What comes until the server closes."""
        with self.connect() as connection:
            connection.sendall(raw)
            return read_all(connection)

    def keep_little_in_the_kernel(self) -> None:
        """As the gateway does."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def begin_to_stop(self) -> None:
        self._server.should_exit = True

    def stop(self) -> None:
        self.app.gate.set()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


def error_of(raw: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object of the only answer in `raw`."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith("http/1.1 ") and raw.count(b"HTTP/1.1 ") == 1, raw
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["connection"] == "close" and headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body) and len(headers["x-request-id"]) > 0
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(lines[0].split()[1]), error


def head(path: str = "/", *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: test", *lines, "", ""]).encode()


GET = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        head("/", f"A: {'x' * 2000}"),
        head("/?" + "x" * 2000),
        head("/", *(f"A{number}: x" for number in range(20))),
        head("/", f"A: {'x' * 100_000}")[:-4],
    ],
    ids=["value", "target", "number", "unfinished"],
)
def test_a_head_is_bounded(server: Server, raw: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(raw[:1000])
        time.sleep(0.02)
        connection.sendall(raw[1000:])
        status, error = error_of(read_all(connection))
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "at most 2000 bytes of request target and headers, in at most 20 headers" in error["message"]


def test_a_head_within_bounds_is_answered(server: Server) -> None:
    raw = head("/", f"A: {'x' * 1900}", "Content-Length: 0", "Connection: close")
    assert server.ask(raw).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "part",
    [b"POST / HT", head("/", "A: b")[:-2], head("/", "Content-Length: 9") + b"1234"],
    ids=["line", "head", "body"],
)
def test_a_request_that_dribbles_is_ended(server: Server, part: bytes) -> None:
    with server.connect() as connection:
        started_s = time.monotonic()
        for byte in part:
            connection.sendall(bytes([byte]))
        raw = read_all(connection)
    assert 0.3 < time.monotonic() - started_s < 3
    status, error = error_of(raw)
    assert (status, error["code"], error["message"]) == (
        408,
        "request_timeout",
        "the request took longer than 0.4 s to arrive",
    )
    wait_for(lambda: server.app.num_running == 0)


def test_the_request_id_of_a_late_body_is_kept(server: Server) -> None:
    raw = server.ask(head("/", "X-Request-Id: mine", "Content-Length: 9"))
    assert b"x-request-id: mine\r\n" in raw


@pytest.mark.parametrize("sent", [b"", GET, b"\r\n", GET + b"\r\n"], ids=["new", "used", "lines", "used, lines"])
def test_an_idle_connection_is_closed(server: Server, sent: bytes) -> None:
    started_s = time.monotonic()
    raw = server.ask(sent)
    assert raw.count(b"HTTP/1.1 200 OK") == sent.count(b"GET")
    assert 0.5 < time.monotonic() - started_s < 4


@pytest.mark.parametrize("sent", [b"", GET], ids=["new", "used"])
def test_line_ends_do_not_keep_a_connection_open(server: Server, sent: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        started_s = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - started_s < 4:
                connection.sendall(b"\r\n")
                connection.settimeout(0.1)
                with suppress(TimeoutError):
                    if not connection.recv(1 << 16):
                        break
        assert 0.4 < time.monotonic() - started_s < 3


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        head("/", "Content-Length: x"),
        head("/", "A b"),
        head("/", "Content-Length: 5", "Transfer-Encoding: chunked"),
        head("/", "Transfer-Encoding: chunked") + b"zz\r\n",
    ],
)
def test_what_is_no_http(server: Server, raw: bytes) -> None:
    status, error = error_of(server.ask(raw))
    assert (status, error["message"]) == (400, "the request is not valid HTTP/1.1")


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=50, deadline=None)
def test_any_bytes(server: Server, raw: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection)[:9] in (b"", b"HTTP/1.1 ")
    assert server.ask(head("/", "Connection: close", "Content-Length: 0")).startswith(b"HTTP/1.1 200 OK")


# --- offers of another protocol ----------------------------------------------------------------------------

H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
BODIES = {
    "length": head("/", *H2C, "Content-Length: 5") + b"hello",
    "chunks": head("/", *H2C, "Transfer-Encoding: chunked") + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "two headers": head(
        "/", "Upgrade: h2c", "Upgrade: websocket", "Connection: upgrade", "Connection: x", "Content-Length: 5"
    )
    + b"hello",
}


@pytest.mark.parametrize("by_bytes", [False, True], ids=["whole", "by bytes"])
@pytest.mark.parametrize("body", BODIES)
def test_an_offer_of_another_protocol_is_ignored(server: Server, body: str, by_bytes: bool) -> None:
    """As by `curl --http2` or Java's client: answered over HTTP/1.1, and so is what comes after it."""
    with server.connect() as connection:
        for raw in (BODIES[body], BODIES[body], head("/", "Content-Length: 3", "Connection: close") + b"abc"):
            for part in (bytes([byte]) for byte in raw) if by_bytes else (raw,):
                connection.sendall(part)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert (response.status, response.read()) == (200, b"3" if raw.endswith(b"abc") else b"5")


@pytest.mark.parametrize(
    "offer",
    [
        head("/", "Upgrade: h2c", "Connection: close, Upgrade", "Content-Length: 5"),
        head("/", "Upgrade: h2c", "Connection: Upgrade", "Content-Length: 5").replace(b"HTTP/1.1", b"HTTP/1.0"),
        head("/", "Upgrade: websocket", "Connection: Upgrade", "Content-Length: 5").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
)
def test_an_offer_on_a_connection_that_closes_is_ignored_too(server: Server, offer: bytes) -> None:
    raw = server.ask(offer + b"hello")
    assert raw.startswith(b"HTTP/1.1 200 OK") and raw.endswith(b"\r\n\r\n5") and b"connection: close" in raw


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "DELETE"])
def test_a_websocket_is_opened_by_get_alone(server: Server, method: str) -> None:
    """Other requests that offer one are requests."""
    offer = head("/", "Upgrade: websocket", "Connection: Upgrade", *KEY, "Content-Length: 5")
    raw = server.ask(offer.replace(b"POST", method.encode()) + b"hello" + head("/", "Connection: close"))
    assert raw.startswith(b"HTTP/1.1 200 OK")


KEY = ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")
HANDSHAKE = ("Upgrade: websocket", "Connection: Upgrade", "x-request-id: mine")
NO_BODY = "a request that opens a WebSocket has no body; remove content-length and transfer-encoding"


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        ((*KEY, "Content-Length: 5000000000"), 400, NO_BODY),
        ((*KEY, "Transfer-Encoding: chunked"), 400, NO_BODY),
        (KEY[1:], 400, "Failed to open a WebSocket connection: missing Sec-WebSocket-Key header."),
        ((KEY[0], "Sec-WebSocket-Version: 12"), 400, "Failed to open a WebSocket connection: invalid Sec-WebSocket-V"),
        ((*KEY, "Upgrade: websocket"), 426, "Failed to open a WebSocket connection: invalid Upgrade header: websock"),
    ],
)
def test_a_handshake_that_is_none_is_refused_at_once(
    server: Server, lines: tuple[str, ...], status: int, message: str
) -> None:
    raw = server.ask(head("/", *HANDSHAKE, *lines).replace(b"POST", b"GET"))
    assert b"\r\nx-request-id: mine\r\n" in raw
    got, error = error_of(raw)
    assert got == status and error["message"].startswith(message)


def test_a_handshake_that_its_parser_does_not_take_is_refused_at_once() -> None:
    """As one with a longer line than it has room for: it hears no more then, and says nothing."""
    server = Server(Protocol)
    try:
        raw = server.ask(head("/", *HANDSHAKE, *KEY, f"A: {'x' * 10_000}").replace(b"POST", b"GET"))
        status, error = error_of(raw)
        assert (status, error["message"]) == (400, "the handshake cannot be read: line too long")
    finally:
        server.stop()


def test_no_websocket_keeps_a_stop_from_letting_answers_end() -> None:
    """Not one whose client has closed it and reads no more, nor one whose handshake is none."""
    server = Server(Protocol)
    with ExitStack() as stack:
        asking = stack.enter_context(server.connect())
        asking.sendall(head("/gate", "Content-Length: 0"))
        wait_for(lambda: server.app.num_running == 1)
        closed = stack.enter_context(server.connect(receive_buffer=4096))
        closed.sendall(head("/flood", *HANDSHAKE, *KEY).replace(b"POST", b"GET"))
        closed.recv(1)
        wait_for(lambda: server.app.num_floods == 1)
        closed.sendall(b"\x88\x82" + bytes(4) + (1000).to_bytes(2, "big"))  # masked with zeros
        for _ in range(2):
            wrong = stack.enter_context(server.connect())
            wrong.sendall(head("/", *HANDSHAKE, *KEY, "Content-Length: 5").replace(b"POST", b"GET"))
        wait_for(lambda: server.num_connections <= 2)
        server.begin_to_stop()
        time.sleep(0.3)
        server.app.gate.set()
        assert read_all(asking).startswith(b"HTTP/1.1 200 OK")
    server.stop()


def test_a_websocket_that_is_not_answered_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an application that hangs, or when what reads the request gives it up."""
    monkeypatch.setattr(WebSocketProtocol, "handshake_s", 0.3)
    offer = head("/hang", "Upgrade: websocket", "Connection: Upgrade", *KEY).replace(b"POST", b"GET")
    with suppress(ConnectionResetError):
        assert server.ask(offer) == b""
    wait_for(lambda: server.num_connections == 0)


def test_an_offer_is_bounded_like_any_request(server: Server) -> None:
    status, error = error_of(server.ask(head("/", *H2C, f"A: {'x' * 2000}")))
    assert (status, error["code"]) == (431, "headers_too_large")
    status, error = error_of(server.ask(head("/", *H2C, "Content-Length: 9") + b"123"))
    assert (status, error["code"]) == (408, "request_timeout")
    status, error = error_of(
        server.ask(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n")
    )
    assert (status, error["message"]) == (400, "the request is not valid HTTP/1.1")


def test_an_offer_behind_a_request_is_not_heard(server: Server) -> None:
    server.app.gate.clear()
    with server.connect() as connection:
        connection.sendall(head("/gate", "Content-Length: 0") + BODIES["length"])
        wait_for(lambda: server.app.num_running == 1)
        server.app.gate.set()
        raw = read_all(connection)
    assert raw.count(b"HTTP/1.1 200 OK") == 1 and b"connection: close" in raw


# --- slow and leaving readers ------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_is_left(server: Server) -> None:
    """The application stops producing when the buffers are full, and learns after `write_s` that nobody reads."""
    server.app.num_sent = 0
    with server.connect(receive_buffer=4096) as connection:
        connection.sendall(head("/endless", "Content-Length: 0"))
        wait_for(lambda: server.app.num_running == 1)
        wait_for(lambda: server.app.num_running == 0)
        # 64 KiB in the transport; the rest is the kernel's, which gives a loopback socket up to 4 MiB and some.
        assert server.app.num_sent < 10 << 20
        wait_for(lambda: server.num_connections == 0)


def test_whole_answers_that_nobody_reads_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is cut; who reads gets his."""
    monkeypatch.setattr("orchestrator.unread.MAX_UNREAD_BYTES", 5 << 20)
    server = Server(Protocol)
    server.keep_little_in_the_kernel()
    try:
        with ExitStack() as stack:
            readers = [stack.enter_context(server.connect(receive_buffer=4096)) for _ in range(3)]
            for reader in readers:
                reader.sendall(head("/large", "Content-Length: 0", "Connection: close"))
                assert reader.recv(9) == b"HTTP/1.1 "
            wait_for(lambda: server.num_connections == 2)
            assert len(read_all(readers[0])) < 2 << 20
            assert all(len(read_all(reader)) > 2 << 20 for reader in readers[1:])
            assert server.ask(head("/large", "Content-Length: 0", "Connection: close")).endswith(bytes(1000))
    finally:
        server.stop()


def test_a_slow_reader_that_reads_is_served(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(head("/endless", "Content-Length: 0"))
        deadline_s = time.monotonic() + 3 * LIMITS.write_s
        while time.monotonic() < deadline_s:
            assert connection.recv(1 << 20)
            time.sleep(0.01)
        assert server.app.num_running == 1
    wait_for(lambda: server.app.num_running == 0)


# --- more than was asked for -------------------------------------------------------------------------------


def test_the_rest_of_an_answered_request_is_thrown_away(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(
            head("/early", "Content-Length: 500000") + bytes(500_000) + head("/", "Content-Length: 3") + b"abc"
        )
        raw = read_all(connection)
    assert raw.count(b"HTTP/1.1 200 OK") == 2 and raw.endswith(b"\r\n\r\n3")


@pytest.mark.parametrize(
    "frame", [b"1;" + b"x" * 900_000 + b"\r\na\r\n", b"0\r\n" + b"A: x\r\n" * 150_000], ids=["extension", "trailers"]
)
def test_what_frames_a_body_is_bounded(server: Server, frame: bytes) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(head("/", "Transfer-Encoding: chunked") + frame)
            raw = read_all(connection)
        except (BrokenPipeError, ConnectionResetError):
            raw = b""
    assert not raw or b" 413 " in raw.split(b"\r\n")[0] or b" 400 " in raw.split(b"\r\n")[0]
    wait_for(lambda: server.num_connections == 0)


def test_but_not_without_end(server: Server) -> None:
    num_sent = 0
    with server.connect() as connection:
        connection.sendall(head("/early", "Content-Length: 1000000000"))
        try:
            while num_sent < 1000 << 20:
                num_sent += connection.send(bytes(1 << 20))
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert num_sent < LIMITS.discarded_bytes + (10 << 20)  # and what the kernel took


def test_and_not_forever(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(head("/early", "Content-Length: 50") + b"123")
        assert read_all(connection).count(b"HTTP/1.1 ") == 1
    wait_for(lambda: server.num_connections == 0)


@pytest.mark.parametrize("later", [True, False])
def test_a_pipelined_request_is_not_heard(server: Server, later: bool) -> None:
    """The first one is answered whole, then the connection ends; and a client that leaves is still seen."""
    server.app.gate.clear()
    with server.connect() as connection:
        first = head("/gate", "Content-Length: 0")
        connection.sendall(first if later else first + GET)
        wait_for(lambda: server.app.num_running == 1)
        if later:
            connection.sendall(GET)
            time.sleep(0.05)
        server.app.gate.set()
        raw = read_all(connection)
    assert raw.count(b"HTTP/1.1 200 OK") == 1 and b"connection: close" in raw


def test_a_client_that_pipelines_and_leaves_is_seen(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(head("/endless", "Content-Length: 0") + GET)
        connection.recv(1000)
    wait_for(lambda: server.app.num_running == 0)


@pytest.mark.parametrize(
    "raw", [head("/gate", "Content-Length: 0"), head("/", "Content-Length: 9"), b"POST / HTTP/1.1\r\nHo"]
)
def test_one_that_half_closes_has_left_and_is_told(server: Server, raw: bytes) -> None:
    """Whether it waits for its answer, or its request is not whole: nothing else tells it from one that is gone."""
    server.app.gate.clear()
    with server.connect() as connection:
        connection.sendall(raw)
        wait_for(lambda: server.num_connections == 1)
        time.sleep(0.05)
        connection.shutdown(socket.SHUT_WR)
        status, error = error_of(read_all(connection))
    assert status == 400 and error["message"].startswith("the sending side of the connection was closed before")
    server.app.gate.set()
    wait_for(lambda: server.app.num_running == 0)


def test_one_that_half_closes_while_it_is_answered_has_left(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(head("/endless", "Content-Length: 0"))
        connection.recv(1000)
        connection.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 400" not in read_all(connection)
    wait_for(lambda: server.app.num_running == 0)


def test_one_that_half_closes_after_its_answer_is_not_told_anything(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(head("/", "Content-Length: 0"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
        connection.shutdown(socket.SHUT_WR)
        assert b"400" not in read_all(connection)
