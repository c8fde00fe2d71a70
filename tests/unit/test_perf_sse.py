"""The client that counts tokens, against a server that sends every byte the test chooses."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from perf.errors import PerfError
from perf.sse import COMPLETIONS_PATH, Answer, SseConnection, chat_body
from perf.sse_load import load

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"choices": [], "usage": {"completion_tokens": 5}}


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(value: object) -> bytes:
    return chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}], "usage": None}


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@contextmanager
def server(*pieces: bytes, pause_s: float = 0.0, num_clients: int = 1) -> Iterator[str]:
    """Answers each client's first request with `pieces`, one `send` each, then closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for _ in range(num_clients):
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(pause_s)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join()
        listener.close()


def ask(url: str) -> tuple[int, int, float, float]:
    with SseConnection(url) as connection:
        answer = connection.ask(chat_body("?", 5))
    return answer.num_events, answer.num_tokens, answer.ttft_ms, answer.last_token_s - answer.first_token_s


def test_events_with_text_and_tokens_of_usage_are_counted() -> None:
    deltas = event(delta("a")), event(delta("")), event(delta('"content":"b'))
    with server(HEAD, *deltas, event(USAGE), END) as url:
        num_events, num_tokens, ttft_ms, _ = ask(url)
    assert (num_events, num_tokens) == (2, 5)
    assert 0 < ttft_ms < 5000


def test_any_cut_of_the_bytes_gives_the_same_counts() -> None:
    raw = HEAD + event(delta("é")) + event(delta("b")) + event(USAGE) + END
    with server(*(raw[i : i + 1] for i in range(len(raw)))) as url:
        assert ask(url)[:2] == (2, 5)


def test_several_events_in_one_chunk_and_one_event_in_several_chunks() -> None:
    joined = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in (delta("a"), delta("b")))
    with server(HEAD, chunk(joined[:20]), chunk(joined[20:]), event(USAGE), END) as url:
        assert ask(url)[:2] == (2, 5)


def test_times_are_those_of_the_first_and_last_text() -> None:
    pieces = HEAD, event(delta("a")), event(delta("b")), event(USAGE) + END
    with server(*pieces, pause_s=0.05) as url:
        _, _, ttft_ms, gap_s = ask(url)
    assert ttft_ms >= 40  # the head alone is no token; it may be answered before the client has its time
    assert gap_s >= 0.04


@pytest.mark.parametrize("channel", ["reasoning_content", "reasoning", "tool_calls", "refusal"])
def test_the_first_token_is_one_of_any_channel(channel: str) -> None:
    first = {"choices": [{"delta": {channel: [{"index": 0}] if channel == "tool_calls" else "Hm"}}]}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    with server(HEAD + event(role), event(first), event(delta("a")), event(USAGE) + END, pause_s=0.05) as url:
        num_events, _, ttft_ms, gap_s = ask(url)
    assert num_events == 2
    assert ttft_ms >= 40  # after the role
    assert gap_s >= 0.04  # and before the content


def test_an_event_of_several_tokens_is_several_tokens() -> None:
    """One token, then twice three: each of the six takes a sixth of the time since the first."""
    answer = Answer(10.0, [11.0, 11.3, 11.6], 7, {})
    assert answer.ttft_ms == 1000
    assert answer.tpot_ms == pytest.approx(100)
    assert Answer(10.0, [11.0], 1, {}).tpot_ms == 0


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((HEAD, event({"error": {"message": "the engine failed"}}) + END), "the engine failed"),
        ((HEAD, event(USAGE) + END), "without any text"),
        ((HEAD, event(delta("a")) + END), "without usage"),
        ((HEAD, event(delta("a"))), "closed the connection inside an answer"),
        (
            (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"overloaded"),
            "503 Service Unavailable\r\n\r\noverloaded",
        ),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces: tuple[bytes, ...], message: str) -> None:
    with server(*pieces, pause_s=0.01) as url, pytest.raises(PerfError, match=message):
        ask(url)


def test_load_adds_up_all_streams() -> None:
    pieces = HEAD, event(delta("a")), event(delta("b")), event(USAGE) + END
    with server(*pieces, num_clients=3) as url:
        result = load(url, ["x", "y", "z"], 5)
    assert (result["tokens"], result["events"]) == (15, 6)
    assert result["seconds"] > 0


def test_completions_have_their_text_in_another_place() -> None:
    pieces = [event({"choices": [{"text": text}]}) for text in ("a", "", "b")]
    with server(HEAD, *pieces, event(USAGE), END) as url, SseConnection(url, COMPLETIONS_PATH) as connection:
        connection.ask(b"{}")
        answer = connection.answer()
    assert (answer.texts, answer.num_tokens) == (["a", "b"], 5)
