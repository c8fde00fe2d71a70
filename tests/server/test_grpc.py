"""The orchestrator over gRPC: the example, and clients that go past the gateway, at the front and at Triton itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import Stack, script

from orchestrator.inference_key import INFERENCE_KEY_METADATA

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_stream.py"


@pytest.fixture(params=["front", "triton"])
def url(scripted_stack: Stack, request: pytest.FixtureRequest) -> str:
    return {"front": scripted_stack.front_url, "triton": scripted_stack.grpc_url}[request.param]


@pytest.fixture
def headers(scripted_stack: Stack, url: str) -> dict[str, str]:
    """What Triton itself wants to be sent."""
    return {INFERENCE_KEY_METADATA: scripted_stack.inference_key} if url == scripted_stack.grpc_url else {}


@pytest.fixture
def stream(headers: dict[str, str]) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("grpc_stream", EXAMPLE)
    assert spec and spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(module.stream, headers=headers)


def test_the_example_as_it_is_run(url: str, headers: dict[str, str]) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLE),
            "Hello?",
            "--url",
            url,
            *(f"--header={':'.join(each)}" for each in headers.items()),
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    text, rt = done.stdout.splitlines()
    assert text == "The scripted engine answers."
    assert json.loads(rt)["tier"] == "simple"


def test_grpc_and_http_give_the_same_events(scripted_stack: Stack, url: str, stream: Callable[..., Any]) -> None:
    request = {"messages": script(text="One two.", itl_ms=20), "stream": True}
    by_grpc = list(stream(url, request))
    by_http = scripted_stack.stream(**request).events
    for events in (by_grpc, by_http):
        for event in events:
            for of_one_call in ("id", "created", "rt"):
                event.pop(of_one_call, None)
    assert by_grpc == by_http


def test_a_whole_answer(url: str, stream: Callable[..., Any]) -> None:
    (answer,) = stream(url, {"messages": script(text="One two.")})
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "One two."


def test_an_error_is_openais_error_object(url: str, stream: Callable[..., Any]) -> None:
    with pytest.raises(triton.InferenceServerException) as got:
        list(stream(url, {"messages": []}))
    error = json.loads(got.value.message())["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")


def test_leaving_ends_the_generation(scripted_stack: Stack, url: str, stream: Callable[..., Any]) -> None:
    since = scripted_stack.log_length()
    request = {"messages": script(text="x " * 500, itl_ms=20), "stream": True, "max_tokens": 500}
    events = stream(url, request)
    next(events)
    events.close()
    assert scripted_stack.wait_for_log("request", since)["outcome"] == "cancelled"
    scripted_stack.wait_until_idle()


def test_a_request_that_is_not_a_stream_is_refused_by_triton(scripted_stack: Stack) -> None:
    body = triton.InferInput("request", [1], "BYTES")
    body.set_data_from_numpy(np.array([b"{}"], dtype=np.object_))
    with (
        scripted_stack.triton_client() as client,
        pytest.raises(triton.InferenceServerException, match="decoupled"),
    ):
        client.infer("orchestrator", [body])
