"""`python -m orchestrator chat` against a small HTTP server of the test's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orchestrator.__main__ import main
from orchestrator.chat import ChatError, ask, chat_loop

RT = {"tokens": 2, "tps": 12.345, "input_tokens": 9, "model": "m", "tier": "simple", "cache": "bypass", "more": 1}


def frames(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def delta(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {} if text is None else {"content": text}}]}


GOOD = frames(delta("Par"), delta("is"), {**delta(None), "rt": RT}) + b"data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    answer = GOOD
    status = 200
    requests: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append({"path": self.path, **json.loads(body)})
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_ask_streams_and_returns_the_facts(server: Server) -> None:
    written: list[str] = []
    text, facts = ask(server.url, [{"role": "user", "content": "Capital?"}], "auto", written.append)
    assert (text, written) == ("Paris", ["Par", "is"])
    assert set(facts) == {"ttft_ms", "total_ms", "tokens", "tps", "input_tokens", "model", "tier", "cache"}
    assert 0 < facts["ttft_ms"] <= facts["total_ms"]
    assert server.requests == [
        {
            "path": "/v1/chat/completions",
            "model": "auto",
            "messages": [{"role": "user", "content": "Capital?"}],
            "stream": True,
        }
    ]


def test_an_answer_without_text_has_no_first_token(server: Server) -> None:
    server.answer = frames({**delta(""), "rt": {**RT, "tokens": 0, "tps": None}}) + b"data: [DONE]\n\n"
    text, facts = ask(server.url, [], "auto", lambda _: None)
    assert (text, facts["ttft_ms"], facts["tps"]) == ("", None, None)


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, b'{"error": {"message": "stop: too many"}}', "HTTP 400: .*stop: too many"),
        (200, frames(delta("Par"), {"error": {"message": "the engine failed"}}), "^the engine failed$"),
        (200, frames(delta("Par")), "^the stream broke off before its last event$"),
        (200, b"", "^the stream broke off before its last event$"),
    ],
)
def test_a_failure_is_told(server: Server, status: int, answer: bytes, message: str) -> None:
    server.status, server.answer = status, answer
    with pytest.raises(ChatError, match=message):
        ask(server.url, [], "auto", lambda _: None)


def test_no_server() -> None:
    with pytest.raises(ChatError, match="^http://127.0.0.1:1: .*refused"):
        ask("http://127.0.0.1:1", [], "auto", lambda _: None)


def test_once_prints_answer_facts_and_json(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "--once", "Capital?", "--json", "--model", "medium"]) == 0
    answer, facts, line = capsys.readouterr().out.splitlines()
    assert answer == "Paris"
    assert facts.startswith("[tier simple | model m | first token ")
    assert facts.endswith(" ms | 2 tokens | 12.3 tokens/s | cache bypass]")
    assert json.loads(line)["tokens"] == 2
    assert server.requests[0]["model"] == "medium"


def test_once_with_an_error(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.status, server.answer = 503, b"busy"
    assert main(["chat", "--url", server.url, "--once", "Capital?"]) == 1
    assert capsys.readouterr().err == "error: HTTP 503: busy\n"


def test_a_conversation_remembers_and_forgets_what_failed(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter(["One?", "", "Two?", "Three?"])

    def ask_person(_: str) -> str:
        question = next(questions, None)
        if question is None:
            raise EOFError
        server.status = 500 if question == "Two?" else 200
        return question

    monkeypatch.setattr("builtins.input", ask_person)
    chat_loop(server.url, "auto")
    asked = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert asked == [["One?"], ["One?", "Paris", "Two?"], ["One?", "Paris", "Three?"]]
    assert "error: HTTP 500" in capsys.readouterr().err
