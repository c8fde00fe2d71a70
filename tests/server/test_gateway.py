"""The gateway among clients that mean no good, or too much of it; and among several workers of its own."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT_PATH, Stack, Start, running, script, wait_for

LONG: dict[str, Any] = {"messages": script(text="x " * 2000, itl_ms=20), "max_tokens": 2000}


def error_of(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return response.status_code, error["code"]


def post(stack: Stack, content: Any, **headers: str) -> httpx.Response:
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(stack.url + CHAT_PATH, content=content, headers=named, timeout=30)


# --- what is refused, and how ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", (404, "not_found")),
        ("GET", "/" + "x" * 60_000, (404, "not_found")),
        ("GET", "/health/", (404, "not_found")),
        ("GET", CHAT_PATH, (405, "method_not_allowed")),
        ("OPTIONS", CHAT_PATH, (405, "method_not_allowed")),
        ("DELETE", "/v1/models", (405, "method_not_allowed")),
    ],
)
def test_routes(scripted_stack: Stack, method: str, path: str, expected: tuple[int, str]) -> None:
    response = httpx.request(method, scripted_stack.url + path)
    assert error_of(response) == expected
    assert len(response.content) < 400
    assert response.headers.get("allow", "") == {CHAT_PATH: "POST", "/v1/models": "GET, HEAD"}.get(path, "")
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"content_type": "application/json; charset=utf-8"}, None),
        ({"content_type": 'Application/JSON;charset="UTF-8"'}, None),
        ({"content_type": "text/plain"}, (415, "unsupported_media_type")),
        ({"content_type": ""}, (415, "unsupported_media_type")),
        ({"content_type": "application/json; charset=latin-1"}, (415, "unsupported_media_type")),
        ({"content_type": "application/jsonp"}, (415, "unsupported_media_type")),
        ({"content_encoding": "gzip"}, (415, "unsupported_media_type")),
        ({"host": "evil.example"}, (421, "host_not_allowed")),
        ({"origin": "https://evil.example"}, (403, "origin_not_allowed")),
        ({"x_request_id": "a b"}, (400, "invalid_value")),
    ],
)
def test_headers(scripted_stack: Stack, headers: dict[str, str], expected: tuple[int, str] | None) -> None:
    response = post(scripted_stack, json.dumps({"messages": script(text="x")}), **headers)
    if expected is None:
        assert response.status_code == 200
    else:
        assert error_of(response) == expected


def test_a_stream_that_nobody_reads_is_ended_with_an_error(scripted_stack: Stack) -> None:
    """Long before the time that a reader has: what waits for one is bounded in bytes."""
    body = json.dumps(
        {
            "model": "expert",
            "messages": script(text="word " * 2000, itl_ms=2),
            "stream": True,
            "n": 8,
            "logprobs": True,
            "max_tokens": 2000,
        }
    )
    since = scripted_stack.log_length()
    address = urlsplit(scripted_stack.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect((str(address.hostname), int(address.port or 0)))
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert scripted_stack.wait_for_log("request", since, 20)["outcome"] == "reader_too_slow"
        received = b""
        while data := connection.recv(1 << 20):
            received += data
    last = received.split(b"data: ")[-1].split(b"\n")[0]
    assert json.loads(last)["error"]["code"] == "reader_too_slow"
    assert received.endswith(b"0\r\n\r\n")
    scripted_stack.wait_until_idle()


def test_a_body_that_is_too_large_is_refused_by_its_length(scripted_stack: Stack) -> None:
    """Before it comes; the connection serves on when it did."""
    with scripted_stack.connect() as connection:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1048577\r\n\r\n".encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "request_too_large"
        connection.sendall(b" " * 1048577)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        second = http.client.HTTPResponse(connection)
        second.begin()
        assert second.status == 200


def test_a_body_that_is_too_large_is_refused_as_it_comes(scripted_stack: Stack) -> None:
    response = post(scripted_stack, (b" " * 65536 for _ in range(17)))
    assert error_of(response) == (413, "request_too_large")
    assert post(scripted_stack, b" " * (1 << 20)).status_code == 400


def test_nesting_is_refused_over_http_and_grpc_alike(scripted_stack: Stack) -> None:
    response = post(scripted_stack, b'{"messages": ' + b"[" * 100)
    assert error_of(response) == (400, "invalid_value")
    assert response.json()["error"]["message"] == "the request nests 101 levels deep; at most 64 are allowed"


def test_the_request_id_comes_back_on_answers_and_streams(scripted_stack: Stack) -> None:
    body = {"messages": script(text="x")}
    for stream in (True, False):
        response = post(scripted_stack, json.dumps({**body, "stream": stream}), x_request_id="mine-1.2_3")
        assert (response.status_code, response.headers["x-request-id"]) == (200, "mine-1.2_3")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["messages", "model", "stream", "x"]) | st.text(), inner)
    ),
    max_leaves=20,
)


@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_body(scripted_stack: Stack, body: bytes) -> None:
    response = scripted_stack._http.post(CHAT_PATH, content=body, headers={"content-type": "application/json"})
    status, code = error_of(response)
    assert (status, code) in ((400, "invalid_value"), (404, "model_not_found")), body


def test_it_lives_after_any_body(scripted_stack: Stack) -> None:
    assert scripted_stack.stream(messages=script(text="alive")).text == "alive"
    assert "Traceback" not in scripted_stack.log("gateway")


# --- metrics -----------------------------------------------------------------------------------------------


def read_metrics(stack: Stack) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name and label values; fails when the page is not one page of Prometheus' text format."""
    response = httpx.get(stack.url + "/metrics", timeout=10)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return samples


def test_metrics(scripted_stack: Stack) -> None:
    before = read_metrics(scripted_stack)
    scripted_stack.stream(messages=script(text="a b c"))
    scripted_stack.post(messages=[])
    with scripted_stack.send(**LONG, stream=True) as connection:
        connection.recv(100)
        assert read_metrics(scripted_stack)["rt_gateway_live_streams"][()] == 1
    wait_for(lambda: read_metrics(scripted_stack)["rt_gateway_live_streams"][()] == 0)
    scripted_stack.wait_until_idle()
    after = read_metrics(scripted_stack)

    def grown(name: str, *labels: str) -> float:
        return after[name][labels] - before.get(name, {}).get(labels, 0)

    assert grown("rt_gateway_requests_total", CHAT_PATH, "200") == 2
    assert grown("rt_gateway_requests_total", CHAT_PATH, "400") == 1
    assert grown("rt_gateway_ttft_seconds_count") == 2
    assert grown("rt_gateway_events_total") >= 4
    assert after["rt_gateway_triton_up"][()] == 1
    assert after["rt_live_requests"][("orchestrator",)] == 0  # Triton's part of the page
    assert any(name.startswith("nv_inference_request_success") for name in after)


# --- many --------------------------------------------------------------------------------------------------


def test_1000_idle_connections_change_nothing(scripted_stack: Stack) -> None:
    with ExitStack() as idle:
        for _ in range(1000):
            idle.enter_context(scripted_stack.connect())
        gateway = scripted_stack.process_id("orchestrator.gateway")
        wait_for(lambda: open_files(gateway) > 1000)  # it accepts them one after the other, beside requests
        for _ in range(20):
            assert scripted_stack.stream(messages=script(text="a b")).text == "a b"
        assert open_files(gateway) > 1000
    wait_for(lambda: open_files(gateway) < 500)


def test_200_streams_at_once_are_exact(scripted_stack: Stack) -> None:
    texts = [f"stream {number}: " + " ".join(str(number * index) for index in range(8)) for number in range(200)]
    with ThreadPoolExecutor(200) as pool, httpx.Client(timeout=60, limits=httpx.Limits(max_connections=200)) as client:

        def ask(text: str) -> tuple[str, bool]:
            body = {"messages": script(text=text, itl_ms=5), "stream": True}
            lines = client.post(scripted_stack.url + CHAT_PATH, json=body).text.split("\n\n")
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            deltas = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
            return "".join(deltas), lines[-2:] == ["data: [DONE]", ""]

        assert list(pool.map(ask, texts)) == [(text, True) for text in texts]
    scripted_stack.wait_until_idle()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_300_that_connect_and_leave_cost_nothing(scripted_stack: Stack) -> None:
    marks = ("orchestrator.gateway", "/orchestrator/1/model.py", " llm_small_0_", "orchestrator.engines.worker")
    found = {mark: scripted_stack.process_ids(mark) for mark in marks}
    assert all(found.values()), found
    pids = [pid for each in found.values() for pid in each]

    def count() -> dict[int, tuple[int, int]]:
        return {pid: (len(os.listdir(f"/proc/{pid}/task")), open_files(pid)) for pid in pids}

    def come_and_go(index: int) -> None:
        with scripted_stack.send(**LONG, stream=index % 2 == 0) as connection:
            time.sleep(index % 7 / 200)
            if index % 10 == 0:
                connection.recv(100)

    def storm(num_clients: int) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(come_and_go, range(num_clients)))
        scripted_stack.wait_until_idle(20)
        assert scripted_stack.stream(messages=script(text="still here")).text == "still here"

    storm(100)  # pools fill
    before = count()
    storm(300)

    def has_grown() -> bool:
        """Threads and files of a pool may be some more or fewer; 300 clients would show."""
        return any(late > early + 20 for pid, now in count().items() for early, late in zip(before[pid], now))

    wait_for(lambda: not has_grown())
    assert scripted_stack.metric("rt_gateway_live_streams") == 0
    assert "Traceback" not in scripted_stack.log("triton") + scripted_stack.log("gateway")


def test_the_gateway_reads_no_further_than_its_clients(scripted_stack: Stack) -> None:
    """Each answer is 700 KB, more than all buffers on the way to the client: the rest stays where it is until read."""
    body = {"messages": script(text="word " * 600, per_char=True), "max_tokens": 3000, "stream": True}
    content = json.dumps(body).encode()
    address, since = urlsplit(scripted_stack.url), scripted_stack.log_length()
    with ExitStack() as readers:
        for _ in range(3):
            reader = readers.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(10)
            reader.connect((address.hostname, address.port))
            head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            reader.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_for(lambda: len(scripted_stack.logged("request", since)) == 3, 25)
        time.sleep(1)
        assert scripted_stack.metric("rt_gateway_live_streams") == 3
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += reader.recv(1 << 16)
        assert received.count(b'"content":') == 3000
    wait_for(lambda: scripted_stack.metric("rt_gateway_live_streams") == 0)


# --- a server of the tests' own ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_stack(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers; a further name; a web page that may call."""
    flags = ("--gateway-workers=2", "--allow-host=chat.example.com", "--allow-origin=https://chat.example.com")
    with start("scripted", tmp_path_factory.mktemp("open"), *flags) as stack:
        yield stack


def test_a_page_of_an_allowed_origin_may_call(open_stack: Stack) -> None:
    origin = {"origin": "https://chat.example.com"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-stainless-os"}
    preflight = httpx.options(open_stack.url + CHAT_PATH, headers=origin | asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "content-type,x-stainless-os"
    for body, status in ((json.dumps({"messages": script(text="x")}), 200), ("{}", 400)):
        response = post(open_stack, body, **origin)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, origin["origin"])
        assert response.headers["access-control-expose-headers"].startswith("x-request-id, retry-after, ")
    assert error_of(httpx.options(open_stack.url + CHAT_PATH, headers=asked | {"origin": "https://evil.example"})) == (
        403,
        "origin_not_allowed",
    )
    assert httpx.get(open_stack.url + "/health", headers={"host": "chat.example.com"}).status_code == 200


def workers_of(stack: Stack) -> list[int]:
    """The workers, by the command line that multiprocessing gives them."""
    parent = stack.process_id("orchestrator.gateway")
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_workers_share_the_port_and_one_metrics_page(open_stack: Stack) -> None:
    before = read_metrics(open_stack)["rt_gateway_requests_total"].get(("/health", "200"), 0)
    for _ in range(100):
        assert httpx.get(open_stack.url + "/health").status_code == 200
    assert read_metrics(open_stack)["rt_gateway_requests_total"][("/health", "200")] == before + 100
    with ExitStack() as streams:
        for _ in range(10):
            streams.enter_context(open_stack.send(**LONG, stream=True))
        wait_for(lambda: read_metrics(open_stack)["rt_gateway_live_streams"][()] == 10)
    wait_for(lambda: read_metrics(open_stack)["rt_gateway_live_streams"][()] == 0)


def test_a_worker_that_dies_is_replaced(open_stack: Stack) -> None:
    """Its streams break off, and nobody goes on generating for them; the others never notice."""
    before = workers_of(open_stack)
    assert len(before) == 2
    with ExitStack() as streams:
        for _ in range(10):
            streams.enter_context(open_stack.send(**LONG, stream=True))
        wait_for(lambda: open_stack.num_live("llm_small") == 10)
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(set(workers_of(open_stack)) - {before[0]}) == 2)
    open_stack.wait_until_idle()
    assert set(workers_of(open_stack)) > {before[1]}
    for _ in range(20):
        assert httpx.get(open_stack.url + "/ready", timeout=10).status_code == 200
    wait_for(lambda: read_metrics(open_stack)["rt_gateway_live_streams"][()] == 0)


def test_workers_drain(start: Start, tmp_path: Path) -> None:
    with start("scripted", tmp_path, "--gateway-workers=2") as stack, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(stack.stream, messages=script(text="x " * 50, itl_ms=100)) for _ in range(6)]
        # Five seconds each: where the first of them make a new stack slow, the last have to come in time.
        wait_for(lambda: stack.num_live("llm_small") == 6)
        stack.process.terminate()
        assert [answer.result(timeout=20).text for answer in answers] == ["x " * 50] * 6
        stack.process.communicate(timeout=20)
        assert stack.process.returncode == 0


def test_a_stream_over_http_1_0_is_refused(scripted_stack: Stack) -> None:
    """It could not say where its stream ends."""
    body = json.dumps({"messages": script(text="x"), "stream": True}).encode()
    address = urlsplit(scripted_stack.url)
    head = f"POST {CHAT_PATH} HTTP/1.0\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with scripted_stack.connect() as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = connection.recv(1 << 16)
        while chunk := connection.recv(1 << 16):
            answer += chunk
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"stream: needs HTTP/1.1" in answer


def test_one_model(scripted_stack: Stack) -> None:
    assert scripted_stack.get("/v1/models/llm_small").json()["id"] == "llm_small"
    missing = scripted_stack.get("/v1/models/gpt-4")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_run_dir_with_a_space(artifact: Callable[[str], Path], tmp_path: Path) -> None:
    """Triton starts its stub by a shell and does not quote."""
    folder = tmp_path / "my artifacts"
    shutil.copytree(artifact("scripted"), folder)
    with running(folder, tmp_path / "run é") as stack:
        assert stack.stream(messages=script(text="hi")).text == "hi"
