"""Who is answered, and what every answer has: names, origins, request ids, OpenAI's error shape, the count."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse

from orchestrator.errors import InternalError
from orchestrator.gateway import metrics
from orchestrator.gateway.app import _with_cors
from orchestrator.gateway.guard import Guard

OWN = "http://127.0.0.1:8080"


class Route:
    """Answers with the request's headers; /fail and /boom fail, the first as Starlette does; /cut in its midst."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/boom":
            raise RuntimeError("boom")
        if scope["path"] == "/fail":
            await JSONResponse(InternalError("internal").body(), 500)(scope, receive, send)
            raise RuntimeError("boom")
        if scope["path"] == "/cut":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise RuntimeError("boom")
        if scope["path"] == "/stopped":
            raise asyncio.CancelledError
        await JSONResponse(dict(Request(scope).headers))(scope, receive, send)


def ask(
    path: str = "/seen",
    *,
    url: str = OWN,
    host: str = "127.0.0.1",
    allowed_hosts: tuple[str, ...] = (),
    allowed_origins: tuple[str, ...] = (),
    headers: Any = None,
) -> httpx.Response:
    guard = Guard(
        Route(), host=host, allowed_hosts=allowed_hosts, allowed_origins=allowed_origins, routes=["/seen", "/fail"]
    )

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(guard)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


def code_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    return str(error["code"])


@pytest.mark.parametrize(
    ("host", "bound", "allowed"),
    [
        ("localhost", "127.0.0.1", True),
        ("localhost:1", "127.0.0.1", True),
        ("LocalHost", "127.0.0.1", True),
        ("127.0.0.1:8080", "10.0.0.1", True),
        ("[::1]:8080", "::1", True),
        ("[fd00::1]:8080", "fd00::1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.2", "10.0.0.1", False),
        ("10.0.0.2:80", "0.0.0.0", True),
        ("[fd00::1]", "::", True),
        ("evil.example", "0.0.0.0", False),
        ("evil.example", "127.0.0.1", False),
        ("evil.example:8080", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("chat.example.com", "127.0.0.1", True),
        ("chat.example.com:443", "0.0.0.0", True),
        ("127.0.0.1@evil.example", "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
        ("localhost:x", "127.0.0.1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_host(host: str, bound: str, allowed: bool) -> None:
    response = ask(host=bound, allowed_hosts=("Chat.example.com",), headers={"host": host})
    if allowed:
        assert response.status_code == 200
    else:
        assert (response.status_code, code_of(response)) == (421, "host_not_allowed")
        assert response.json()["error"]["message"].startswith(f"host: {host!r} is not a name of this server; fix: ")


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (OWN, True),
        ("https://127.0.0.1:8080", True),  # behind something that ends TLS
        ("https://chat.example.com", True),
        ("http://chat.example.com", False),
        ("https://chat.example.com.evil.example", False),
        ("http://127.0.0.1:3000", False),
        ("http://localhost:8080", False),
        ("null", False),
        ("", False),
        ("127.0.0.1:8080", False),
        ("x://127.0.0.1:8080", False),
        ("file://127.0.0.1:8080", False),
    ],
)
def test_origin(origin: str, allowed: bool) -> None:
    response = ask(allowed_origins=("https://chat.example.com",), headers={"origin": origin})
    if allowed:
        assert response.status_code == 200
    else:
        assert (response.status_code, code_of(response)) == (403, "origin_not_allowed")
        assert f"origin: pages of {origin!r} may not use this server" in response.json()["error"]["message"]


@pytest.mark.parametrize("given_id", ["a", "A.b_c-9", "x" * 128])
def test_a_request_id_is_passed_on_and_returned(given_id: str) -> None:
    response = ask(headers={"x-request-id": given_id})
    assert response.json()["x-request-id"] == response.headers["x-request-id"] == given_id


@pytest.mark.parametrize(
    "name", ["host", "origin", "content-type", "content-encoding", "authorization", "x-request-id", "x-deadline-ms"]
)
def test_what_may_come_once(name: str) -> None:
    response = ask(headers=[(name, "a"), (name, "a")])
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{name}: sent 2 times; once is allowed"
    assert response.json()["error"]["param"] == name


def test_lists_may_come_twice() -> None:
    assert ask(headers=[("cache-control", "no-store"), ("cache-control", "max-age=5")]).status_code == 200


def test_a_refused_preflight_has_openais_shape() -> None:
    async def preflight(method: str) -> httpx.Response:
        transport = httpx.ASGITransport(_with_cors(Route(), [OWN]))  # type: ignore[arg-type]
        headers = {"origin": OWN, "access-control-request-method": method}
        async with httpx.AsyncClient(transport=transport, base_url=OWN) as client:
            return await client.options("/seen", headers=headers)

    assert asyncio.run(preflight("POST")).status_code == 200
    refused = asyncio.run(preflight("DELETE"))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_value")
    assert error["message"] == "the preflight: Disallowed CORS method"


def test_a_request_without_an_id_gets_one() -> None:
    first, second = ask(), ask()
    assert first.json()["x-request-id"] == first.headers["x-request-id"] != second.headers["x-request-id"]


@given(st.text(st.characters(max_codepoint=255)).filter(lambda text: not set(text) & {"\r", "\n", "\0"}))
def test_any_request_id(text: str) -> None:
    is_allowed = 1 <= len(text) <= 128 and all(char.isascii() and (char.isalnum() or char in "._-") for char in text)
    response = ask(headers={b"x-request-id": text.encode("latin-1")})
    if is_allowed:
        assert response.headers["x-request-id"] == text
    else:
        assert (response.status_code, code_of(response)) == (400, "invalid_value")
        assert response.json()["error"]["param"] == "x-request-id"
        assert response.headers["x-request-id"].isalnum()


@pytest.mark.parametrize("path", ["/fail", "/boom"])
def test_a_failure_is_logged_with_its_request_id(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = ask(path, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["code"] == "internal_error"
    assert "request mine failed" in caplog.text and "boom" in caplog.text


def test_a_failure_after_the_answer_began_cuts_the_connection() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        ask("/cut")


def test_a_request_that_the_drain_ends() -> None:
    response = ask("/stopped")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


def test_an_error_does_not_wait_for_a_body_that_may_not_come() -> None:
    assert ask("/fail", headers={"expect": "100-continue"}).headers["connection"] == "close"
    assert "connection" not in ask(headers={"expect": "100-continue"}).headers


def test_the_count() -> None:
    def count(route: str, status: int) -> float:
        return metrics._answers(route, status)._value.get()

    before = count("/seen", 200), count("/seen", 421), count("other", 200), count("/fail", 500)
    ask(), ask(headers={"host": "evil.example"}), ask("/x" * 9), ask("/fail")
    after = count("/seen", 200), count("/seen", 421), count("other", 200), count("/fail", 500)
    assert [late - early for late, early in zip(after, before)] == [1, 1, 1, 1]
