"""Triton's own ports on loopback: open to every process and every web page of the machine, so they do nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from serving import Stack, script
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from orchestrator import contracts
from orchestrator.inference_key import (
    GRPC_PREFIX,
    INFERENCE_KEY_HEADER,
    INFERENCE_KEY_METADATA,
    INFERENCE_KEY_VARIABLE,
    LOCKED_OUT,
    unlock,
)
from orchestrator.wire import add_string, find_output, is_end, new_request, stop_request
from perf.stack import triton_keys_below

NOBODYS = "nobodys-key-0123456789-0123456789-0123456789"


@pytest.fixture
def stub(scripted_stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(scripted_stack.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def models(scripted_stack: Stack, artifact: Callable[[str], Path]) -> list[str]:
    found = sorted(path.name for path in (artifact("scripted") / "model_repository").iterdir())
    assert {"orchestrator", "llm_small", "embedding", "embedding_encoder", "complexity"} <= set(found)
    return found


def refusal(call: Callable[[], Any]) -> str:
    """Why Triton did not even look at it; empty if it did."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    details = str(caught.value.details())
    return details if details.startswith("This protocol is restricted") else ""


def test_no_model_answers_without_the_key(scripted_stack: Stack, stub: Any, models: list[str]) -> None:
    control = triton_keys_below(scripted_stack.process.pid)
    del control[INFERENCE_KEY_METADATA]
    (control_key,) = control.values()
    sent = (
        (),
        ((INFERENCE_KEY_METADATA, NOBODYS),),
        ((INFERENCE_KEY_METADATA, ""),),
        ((INFERENCE_KEY_METADATA, control_key),),
        ((INFERENCE_KEY_HEADER, scripted_stack.inference_key),),  # as over HTTP
        tuple(control.items()),
    )
    url = scripted_stack.facts["triton_http_url"]
    for model in models:
        request = pb.ModelInferRequest(model_name=model)
        for metadata in sent:
            assert refusal(lambda: stub.ModelInfer(request, metadata=metadata)), model  # noqa: B023 (it runs at once)
            assert refusal(lambda: list(stub.ModelStreamInfer(iter([request]), metadata=metadata))), model  # noqa: B023
        for call in ("infer", "generate", "generate_stream"):
            for headers in (
                {},
                {INFERENCE_KEY_HEADER: NOBODYS},
                {INFERENCE_KEY_METADATA: scripted_stack.inference_key},
            ):
                response = httpx.post(f"{url}/v2/models/{model}/{call}", content=b"{}", headers=headers)
                assert (response.status_code, "restricted" in response.text) == (403, True), (model, call)
    assert stub.ServerReady(pb.ServerReadyRequest()).ready  # health and metadata stay open
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="orchestrator")).name == "orchestrator"


def test_with_it_they_do(scripted_stack: Stack, stub: Any, models: list[str]) -> None:
    unlock(stub, scripted_stack.inference_key)
    headers = {INFERENCE_KEY_HEADER: scripted_stack.inference_key}
    url = scripted_stack.facts["triton_http_url"]
    for model in models:
        assert not refusal(lambda: stub.ModelInfer(pb.ModelInferRequest(model_name=model))), model  # noqa: B023
        response = httpx.post(f"{url}/v2/models/{model}/infer", content=b"{}", headers=headers)
        # It was read: without inputs, of a decoupled model.
        assert response.status_code in (400, 500, 501) and "restricted" not in response.text, (model, response.text)
    (stopped,) = stub.ModelStreamInfer(iter([stop_request("llm_small", "nobody")]))
    assert is_end(stopped) and not stopped.error_message
    embed = new_request(contracts.EMBEDDING_MODEL)
    add_string(embed, contracts.TEXT, b"Hi", (1, 1))
    assert (
        len(find_output(pb.ModelStreamInferResponse(infer_response=stub.ModelInfer(embed)), contracts.EMBEDDING))
        == 1536
    )
    body = {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["Hi"]}]}
    response = httpx.post(f"{url}/v2/models/embedding/infer", json=body, headers=headers)
    assert response.status_code == 200, response.text


def test_it_opens_inference_alone(scripted_stack: Stack, stub: Any) -> None:
    key = scripted_stack.inference_key
    control_header = "x-triton-realtime-key"
    metadata = ((INFERENCE_KEY_METADATA, key), (GRPC_PREFIX + control_header, key))
    for call in (
        lambda: stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata),
        lambda: stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="orchestrator"), metadata=metadata),
        lambda: stub.ModelConfig(pb.ModelConfigRequest(name="orchestrator"), metadata=metadata),
        lambda: stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=metadata),
        lambda: stub.LogSettings(pb.LogSettingsRequest(), metadata=metadata),
        lambda: stub.TraceSetting(pb.TraceSettingRequest(), metadata=metadata),
        lambda: stub.ModelStatistics(pb.ModelStatisticsRequest(), metadata=metadata),
    ):
        assert refusal(call)
    url = scripted_stack.facts["triton_http_url"]
    response = httpx.post(f"{url}/v2/repository/index", headers={INFERENCE_KEY_HEADER: key, control_header: key})
    assert (response.status_code, "restricted" in response.text) == (403, True)


@contextmanager
def own_front(stack: Stack, artifact: Path, **env: str) -> Iterator[Any]:
    """A front that is no child of `serve`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = (sys.executable, "-m", "orchestrator.grpc_front", f"--artifact={artifact}", f"--port={port}")
    process = subprocess.Popen([*command, f"--triton-grpc={stack.grpc_url}"], env={**os.environ, **env})
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
    finally:
        process.terminate()
        process.wait(30)


def test_a_front_without_serve_needs_the_key(scripted_stack: Stack, artifact: Callable[[str], Path]) -> None:
    question = new_request(contracts.ORCHESTRATOR_MODEL)
    add_string(question, contracts.REQUEST, json.dumps({"messages": script(text="Hi")}).encode())
    embed = new_request(contracts.EMBEDDING_MODEL)
    add_string(embed, contracts.TEXT, b"Hi", (1, 1))
    with own_front(scripted_stack, artifact("scripted")) as front:
        for request in (question, embed):
            with pytest.raises(grpc.RpcError) as caught:
                front.ModelInfer(request, timeout=30)
            assert json.loads(caught.value.details())["error"]["message"] == LOCKED_OUT
    given = {INFERENCE_KEY_VARIABLE: scripted_stack.inference_key}
    with own_front(scripted_stack, artifact("scripted"), **given) as front:
        for request in (question, embed):
            assert front.ModelInfer(request, timeout=30).outputs


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
