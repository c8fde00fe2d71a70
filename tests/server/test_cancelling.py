"""A client that leaves, on any path and at any moment, ends the generation."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import CHAT_PATH, Stack, script, wait_for

# An answer that would take 40 s.
LONG: dict[str, Any] = {"model": "simple", "messages": script(text="x " * 2000, itl_ms=20), "max_tokens": 2000}
SLOW_PREFILL: dict[str, Any] = {"model": "simple", "messages": script(text="x", first_token_ms=5000)}


def read_frames(connection: socket.socket, count: int) -> None:
    """Read until `count` SSE frames have come."""
    received = b""
    while received.count(b"data: ") < count:
        data = connection.recv(4096)
        assert data, "the stream ended early"
        received += data


def wait_until_running(stack: Stack, count: int = 1) -> None:
    wait_for(lambda: stack.num_live("llm_small") == count)


@pytest.mark.alone
def test_after_three_tokens(scripted_stack: Stack) -> None:
    """Case K02: the engine makes at most the tokens of the 150 ms that leaving may take."""
    since = scripted_stack.log_length()
    with scripted_stack.send(**LONG, stream=True) as connection:
        read_frames(connection, 3)
    left_s = time.monotonic()
    stopped = scripted_stack.wait_for_log("engine_stopped", since)
    assert stopped["monotonic_s"] - left_s < 0.150
    settled = scripted_stack.wait_for_log("request", since)
    assert settled["outcome"] == "cancelled"
    assert settled["tokens"] <= 3 + 150 / 20 + 1
    scripted_stack.wait_until_idle()


@pytest.mark.alone
def test_before_the_end_of_a_whole_answer(scripted_stack: Stack) -> None:
    """Case K01: the client leaves after 100 ms; the engine is told within a second (we hold 150 ms)."""
    since = scripted_stack.log_length()
    with scripted_stack.send(**LONG, stream=False):
        time.sleep(0.1)
    left_s = time.monotonic()
    stopped = scripted_stack.wait_for_log("engine_stopped", since)
    assert stopped["monotonic_s"] - left_s < 0.150
    assert scripted_stack.wait_for_log("request", since)["outcome"] == "cancelled"
    scripted_stack.wait_until_idle()


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_in_prefill(scripted_stack: Stack, stream: bool) -> None:
    since = scripted_stack.log_length()
    with scripted_stack.send(**SLOW_PREFILL, stream=stream):
        wait_until_running(scripted_stack)
        time.sleep(0.1)
    left_s = time.monotonic()
    stopped = scripted_stack.wait_for_log("engine_stopped", since)
    assert stopped["monotonic_s"] - left_s < 0.150
    assert scripted_stack.wait_for_log("request", since)["tokens"] == 0
    scripted_stack.wait_until_idle()


def test_half_closing_before_the_answer_is_leaving_and_is_told(scripted_stack: Stack) -> None:
    since = scripted_stack.log_length()
    with scripted_stack.send(**LONG, stream=False) as connection:
        wait_until_running(scripted_stack)
        connection.shutdown(socket.SHUT_WR)
        assert b"the sending side of the connection was closed before the answer" in connection.makefile("rb").read()
    assert scripted_stack.wait_for_log("request", since)["outcome"] == "cancelled"
    scripted_stack.wait_until_idle()


def test_half_closing_is_leaving_too(scripted_stack: Stack) -> None:
    since = scripted_stack.log_length()
    with scripted_stack.send(**LONG, stream=True) as connection:
        read_frames(connection, 1)
        connection.shutdown(socket.SHUT_WR)
        scripted_stack.wait_for_log("engine_stopped", since)
    scripted_stack.wait_until_idle()


def test_a_reset_is_leaving_too(scripted_stack: Stack) -> None:
    since = scripted_stack.log_length()
    with scripted_stack.send(**LONG, stream=True) as connection:
        read_frames(connection, 1)
        linger_for_0_s = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_0_s)
    scripted_stack.wait_for_log("engine_stopped", since)
    scripted_stack.wait_until_idle()


def test_in_the_midst_of_an_upload(scripted_stack: Stack) -> None:
    since = scripted_stack.log_length()
    with scripted_stack.connect() as connection:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b'{"messages": [')
        time.sleep(0.05)
    assert scripted_stack.stream(messages=script(text="alive")).text == "alive"
    scripted_stack.wait_for_log("request", since)
    assert len(scripted_stack.logged("request", since)) == 1
    assert "Traceback" not in scripted_stack.log("gateway")


def test_beyond_the_limit_of_live_requests_is_refused(scripted_stack: Stack) -> None:
    # Of several engines none may hold more than three quarters of them.
    tiers = itertools.cycle(("simple", "complex"))
    busy = [scripted_stack.send(**(LONG | {"model": next(tiers)}), stream=True) for _ in range(256)]
    try:
        wait_for(lambda: scripted_stack.num_live("orchestrator") == 256)
        response = scripted_stack.post(messages=script(text="one too many"))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert "256 requests are running, which is the limit" in response.text
    finally:
        for connection in busy:
            connection.close()
    scripted_stack.wait_until_idle(20)
    assert scripted_stack.post(messages=script(text="room again")).status_code == 200


def test_200_that_come_and_go(scripted_stack: Stack) -> None:
    """Case K08: the server lives, nothing runs on (case K05), and the next answer is whole."""

    def come_and_go(index: int) -> None:
        with scripted_stack.send(**LONG, stream=index % 2 == 0) as connection:
            time.sleep(index % 7 / 200)
            if index % 14 == 0:
                read_frames(connection, 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(200)))
    scripted_stack.wait_until_idle(20)
    assert scripted_stack.stream(messages=script(text="still here")).text == "still here"
    assert scripted_stack.get("/ready").status_code == 200
    assert "Traceback" not in scripted_stack.log("triton") + scripted_stack.log("gateway")


def test_one_that_leaves_disturbs_no_other(scripted_stack: Stack) -> None:
    answers = []
    stays = threading.Thread(
        target=lambda: answers.append(scripted_stack.stream(messages=script(text="y " * 50, itl_ms=10)))
    )
    stays.start()
    for _ in range(5):
        with scripted_stack.send(**LONG, stream=True) as connection:
            read_frames(connection, 1)
    stays.join(30)
    assert (answers[0].text, answers[0].is_done) == ("y " * 50, True)
    scripted_stack.wait_until_idle()
