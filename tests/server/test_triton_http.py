"""Triton's own HTTP port on loopback: open to every process and every web page of the machine, so it does nothing."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Stack, script


@pytest.mark.parametrize("model", ["orchestrator", "llm_small"])
@pytest.mark.parametrize("call", ["infer", "generate", "generate_stream"])
def test_nobody_infers_without_the_key(scripted_stack: Stack, model: str, call: str) -> None:
    url = f"{scripted_stack.facts['triton_http_url']}/v2/models/{model}/{call}"
    response = httpx.post(url, content=b"{}", headers={"content-type": "text/plain", "origin": "http://evil.example"})
    assert response.status_code == 403
    assert "restricted" in response.text
    assert httpx.get(f"{scripted_stack.facts['triton_http_url']}/v2/health/ready").status_code == 200


@pytest.mark.parametrize("call", ["models/orchestrator/generate_stream", "models/orchestrator/infer", "logging"])
def test_a_body_of_many_chunks_is_survived(scripted_stack: Stack, call: str) -> None:
    """600,000 chunks of one byte overflow Triton 2.51's stack where it reads them."""
    address = urlsplit(scripted_stack.facts["triton_http_url"])
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30) as connection:
        head = f"POST /v2/{call} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        try:
            connection.sendall(head.encode() + b"1\r\nx\r\n" * 600_000 + b"0\r\n\r\n")
            assert b" 403 " in connection.recv(1000).split(b"\r\n")[0]
        except OSError:
            pass  # it hung up on us
    assert scripted_stack.stream(messages=script(text="alive")).text == "alive"
