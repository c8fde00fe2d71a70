"""`/v1/realtime`'s socket, by the official client and by hand, against a real uvicorn on a thread; models are fakes."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn
from fake_voice import ABILITIES, TEXT_ONLY, FakeEngines
from serving import wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from orchestrator.errors import UnauthorizedError
from orchestrator.gateway.app import _no_such_web_socket
from orchestrator.gateway.guard import Guard
from orchestrator.gateway.protocol import Limits, Protocol
from orchestrator.gateway.realtime import MAX_WAITING, REALTIME_PATH, Outbox, Realtime
from orchestrator.gateway.web_socket import WebSocketProtocol
from orchestrator.voice.client_events import MAX_EVENT_BYTES
from orchestrator.voice.engines import Engines
from orchestrator.voice.session import Abilities

KEY = "Bearer rt-good"


class FakeTriton:
    def __init__(self, *, with_keys: bool) -> None:
        self.with_keys = with_keys

    async def check(self, right: str, headers: list[tuple[str, str]]) -> None:
        if self.with_keys and dict(headers).get("authorization") != KEY:
            raise UnauthorizedError("no valid key")


class FakeRealtime(Realtime):
    def __init__(self, abilities: Abilities, *, with_keys: bool = False, **options: Any) -> None:
        super().__init__(FakeTriton(with_keys=with_keys), abilities, ["auto", "simple"], **options)  # type: ignore[arg-type]
        self.engines: list[FakeEngines] = []

    def _make_engines(self, headers: list[tuple[str, str]]) -> Engines:
        self.engines.append(FakeEngines())
        self.engines[-1].answer_deltas = ANSWER
        self.engines[-1].token_s = TOKEN_S
        return self.engines[-1]


ANSWER = ["It is Paris."]
TOKEN_S = 0.0


class SmallProtocol(Protocol):
    limits = Limits(idle_s=0.5, read_s=0.5)


class SmallWebSocket(WebSocketProtocol):
    write_s = 0.5


class Served:
    def __init__(self, realtime: FakeRealtime) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "websocket":
                await (realtime if scope["path"] == REALTIME_PATH else _no_such_web_socket)(scope, receive, send)

        guard = Guard(app, host="127.0.0.1", allowed_hosts=(), allowed_origins=("https://ok.example",), routes=[])
        config = uvicorn.Config(
            guard,
            port=0,
            http=SmallProtocol,
            ws=SmallWebSocket,
            ws_max_size=MAX_EVENT_BYTES + 1024,
            ws_per_message_deflate=False,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        self.realtime = realtime
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def connect(self, query: str = "", **options: Any) -> ClientConnection:
        return connect(f"ws://127.0.0.1:{self.port}{REALTIME_PATH}{query}", compression=None, proxy=None, **options)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def serve(abilities: Abilities = TEXT_ONLY, **options: Any) -> Iterator[Served]:
    served = Served(FakeRealtime(abilities, **options))
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def text() -> Iterator[Served]:
    yield from serve()


@pytest.fixture(scope="module")
def voice() -> Iterator[Served]:
    yield from serve(ABILITIES)


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    yield from serve(with_keys=True, idle_s=0.3)


def event_of(client: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(client.recv(timeout=10))
    assert event["event_id"].startswith("event_")
    return event


def until(client: ClientConnection, name: str) -> list[dict[str, Any]]:
    events = [event_of(client)]
    while events[-1]["type"] != name:
        events.append(event_of(client))
    return events


def send(client: ClientConnection, name: str, **fields: Any) -> None:
    client.send(json.dumps({"type": name, **fields}))


def ask(client: ClientConnection) -> None:
    content = [{"type": "input_text", "text": "Hi?"}]
    send(client, "conversation.item.create", item={"type": "message", "role": "user", "content": content})
    send(client, "response.create")


def test_openais_client_talks_text(text: Served) -> None:
    url = f"http://127.0.0.1:{text.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none") as client, client.realtime.connect(model="auto") as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        content: Any = [{"type": "input_text", "text": "What is the capital of France?"}]
        connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        connection.response.create()
        words = ""
        for event in connection:
            if event.type == "response.output_text.delta":
                words += event.delta
            elif event.type == "response.done":
                assert event.response.status == "completed" and event.response.usage.total_tokens == 8
                break
    assert words == "It is Paris."


def test_the_connection_outlives_the_limits_of_requests(text: Served) -> None:
    with text.connect() as client:
        event_of(client)
        time.sleep(1.2)  # more than a request may take to arrive, or a connection may be idle
        ask(client)
        assert until(client, "response.done")[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"origin": "https://evil.example"}, 403, "origin_not_allowed"),
        ({"host": "evil.example"}, 421, "host_not_allowed"),
    ],
)
def test_pages_and_names_that_are_not_ours_are_refused(
    text: Served, headers: dict[str, str], status: int, code: str
) -> None:
    request = (
        f"GET {REALTIME_PATH} HTTP/1.1\r\nhost: {headers.get('host', 'localhost')}\r\nupgrade: websocket\r\n"
        "connection: upgrade\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nsec-websocket-version: 13\r\n"
        "x-request-id: mine\r\n" + (f"origin: {headers['origin']}\r\n" if "origin" in headers else "") + "\r\n"
    )
    with socket.create_connection(("127.0.0.1", text.port), timeout=10) as connection:
        connection.sendall(request.encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and f'"code": "{code}"'.encode() in answer
    assert b"x-request-id: mine\r\n" in answer


def test_pages_that_were_named_may_connect(text: Served) -> None:
    with text.connect(origin="https://ok.example") as client:
        event_of(client)


@pytest.mark.parametrize(("query", "status"), [("?model=gpt-realtime", 404), ("?voice=joe", 400)])
def test_wrong_addresses_are_refused(text: Served, query: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidStatus) as got, text.connect(query):
        pass
    assert got.value.response.status_code == status
    with pytest.raises(InvalidStatus) as got, connect(f"ws://127.0.0.1:{text.port}/v1/other", proxy=None):
        pass
    assert got.value.response.status_code == 404 and got.value.response.headers["x-request-id"]
    assert "without completing handshake" not in caplog.text, "a stranger's doing is no error of ours"


@pytest.mark.parametrize("query", ["model=simple&api_key=rt-secret", "model=simple", "key=rt-secret"])
def test_no_address_is_logged(locked: Served, query: str, caplog: pytest.LogCaptureFixture) -> None:
    """Some clients put their key there."""
    with caplog.at_level("INFO"), pytest.raises(InvalidStatus):
        locked.connect(f"?{query}")
    assert "model=" not in caplog.text and "rt-secret" not in caplog.text


def test_keys(locked: Served) -> None:
    with pytest.raises(InvalidStatus) as got, locked.connect():
        pass
    assert got.value.response.status_code == 401
    assert got.value.response.headers["www-authenticate"] == "Bearer"
    with locked.connect(additional_headers={"authorization": KEY}) as client:
        event_of(client)
    protocols: Any = ["realtime", "openai-insecure-api-key.rt-good"]  # as browsers send it
    with locked.connect(subprotocols=protocols) as client:
        event_of(client)
        assert client.subprotocol == "realtime"


def test_who_sends_nothing_is_let_go(locked: Served) -> None:
    with locked.connect(additional_headers={"authorization": KEY}) as client:
        assert until(client, "error")[-1]["error"]["message"].startswith("nothing was sent for 0.3 s")
        with pytest.raises(ConnectionClosed) as got:
            client.recv(timeout=5)
        assert got.value.rcvd is not None and got.value.rcvd.code == 1001


def test_faulty_frames_end_nothing(text: Served) -> None:
    with text.connect() as client:
        event_of(client)
        for frame in (b"\0\1", "{", "null", "[" * 100_000, json.dumps({"type": "x" * 1000}), "x" * MAX_EVENT_BYTES):
            client.send(frame)
            assert event_of(client)["type"] == "error"
        ask(client)
        assert until(client, "response.done")


def test_a_frame_without_end_closes_the_connection(text: Served) -> None:
    with text.connect() as client:
        event_of(client)
        client.send("x" * (MAX_EVENT_BYTES + 2000))
        with pytest.raises(ConnectionClosed) as got:
            until(client, "never")
        assert got.value.rcvd is not None and got.value.rcvd.code == 1009


def test_too_many_sessions(voice: Served) -> None:
    clients = [voice.connect() for _ in range(voice.realtime.max_sessions)]
    for client in clients:
        assert event_of(client)["type"] == "session.created"
    with voice.connect() as client:
        assert event_of(client)["error"]["code"] == "session_limit"
        with pytest.raises(ConnectionClosed) as got:
            client.recv(timeout=5)
        assert got.value.rcvd is not None and got.value.rcvd.code == 1013
    clients.pop().close()

    def has_room() -> bool:
        with voice.connect() as client:
            return event_of(client)["type"] == "session.created"

    wait_for(has_room)
    for client in clients:
        client.close()
    wait_for(lambda: voice.realtime._num_sessions == 0)


def test_voice_over_the_socket(voice: Served) -> None:
    with voice.connect() as client:
        event_of(client)
        loud, silent = (base64.b64encode(bytes(pair) * 12_000).decode() for pair in ((0, 64), (0, 0)))
        for audio in (silent, loud, loud, silent, silent):
            send(client, "input_audio_buffer.append", audio=audio)
        events = until(client, "response.done")
        assert events[-1]["response"]["status"] == "completed"
        assert any(event["type"] == "response.output_audio.delta" for event in events)


def test_who_vanishes_ends_what_runs_for_him(text: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_gateway_realtime.ANSWER", ["word "] * 10_000)
    monkeypatch.setattr("test_gateway_realtime.TOKEN_S", 0.01)
    client = text.connect()
    event_of(client)
    ask(client)
    until(client, "response.output_text.delta")
    client.socket.shutdown(socket.SHUT_RDWR)
    engines = text.realtime.engines[-1]
    wait_for(lambda: engines.num_cancelled == 1)
    wait_for(lambda: text.realtime._num_sessions == 0)


def test_who_does_not_read_is_let_go(text: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not told more than his connection holds."""
    monkeypatch.setattr("test_gateway_realtime.ANSWER", ["word " * 4000] * 600)
    handshake = (
        f"GET {REALTIME_PATH} HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    content = [{"type": "input_text", "text": "Hi?"}]
    events = [
        {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": content}},
        {"type": "response.create"},
    ]
    with socket.create_connection(("127.0.0.1", text.port), timeout=10) as connection:
        connection.sendall(handshake.encode())
        connection.recv(1000)
        for event in events:
            body = json.dumps(event).encode()
            # A short text frame of a client, masked with zeros.
            connection.sendall(b"\x81" + bytes([0x80 | 126]) + len(body).to_bytes(2, "big") + bytes(4) + body)
        wait_for(lambda: text.realtime._num_sessions == 1)
        wait_for(lambda: text.realtime._num_sessions == 0, 20)


def test_events_for_who_does_not_read_are_bounded() -> None:
    async def scene() -> None:
        blocked = asyncio.Event()

        async def send(_: Any) -> None:
            await blocked.wait()

        outbox = Outbox(send)
        writing = asyncio.create_task(outbox.run())
        for number in range(3 * MAX_WAITING):
            outbox.emit({"type": "error", "number": number})
            await asyncio.sleep(0)
        assert outbox.is_closed and len(outbox._waiting) <= MAX_WAITING
        await asyncio.wait_for(outbox.drain(), 1)  # nobody waits for him
        writing.cancel()

    asyncio.run(scene())
