"""Runtime "llmapi" on the real Triton: NVIDIA's LLM-API model is its stand-in, which has that one's traps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_targets import LLMAPI, render, vary
from serving import Stack, ask, running_dressed, script, wait_for


@pytest.fixture(scope="module")
def stack(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Target l4 with its small engine by the LLM API."""
    folder = tmp_path_factory.mktemp("llmapi")
    target, models = vary("l4", "llm_small", **LLMAPI)
    with running_dressed(render(target, models, folder), artifact("scripted"), folder) as stack:
        yield stack


def test_a_stream_is_made_of_what_is_new(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="One two three four.", itl_ms=20), model="simple")
    assert (answer.text, answer.finish_reason) == ("One two three four.", "stop")
    assert len(answer.deltas) > 2
    assert answer.rt["model"] == "llm_small"
    assert answer.rt["usage_estimated"] is True
    assert answer.rt["tokens"] == 5


def test_a_whole_answer(stack: Stack) -> None:
    answer = stack.post(messages=script(text="One two three."), model="simple").json()
    assert answer["choices"][0]["message"]["content"] == "One two three."
    assert answer["usage"]["completion_tokens"] == 4


def test_characters_of_several_tokens_come_whole(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="héllo 你好 🙂", per_char=True), model="simple")
    assert answer.text == "héllo 你好 🙂"
    assert all("\ufffd" not in delta for delta in answer.deltas)


def test_what_is_cut_at_the_limit_says_so(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="x y z " * 20), model="simple", max_tokens=6)
    assert (answer.finish_reason, answer.rt["tokens"]) == ("length", 6)


def test_stop_strings_are_ours(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="a b STOP " + "x " * 200, itl_ms=10), model="simple", stop=["STOP"])
    assert (answer.text, answer.finish_reason) == ("a b ", "stop")
    # The engine let go of it, and the next request is served.
    assert stack.stream(messages=script(text="next"), model="simple").text == "next"


def test_several_choices(stack: Stack) -> None:
    answer = stack.post(messages=script(text="One."), model="simple", n=2).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["One.", "One."]


def test_who_leaves_stops_the_engine(stack: Stack) -> None:
    connection = stack.send(messages=script(text="x " * 300, itl_ms=20), model="simple", stream=True)
    connection.recv(100)
    connection.close()
    left_s = time.monotonic()
    wait_for(lambda: stack.num_live("orchestrator") == 0, 5.0)
    assert time.monotonic() - left_s < 1.5


def test_many_that_leave_leave_nothing(stack: Stack) -> None:
    """Here, and in the stand-in, which would refuse an id that it still holds."""
    for _ in range(40):
        connection = stack.send(messages=script(text="x " * 100, itl_ms=20), model="simple", stream=True)
        connection.recv(100)
        connection.close()
    wait_for(lambda: stack.num_live("orchestrator") == 0, 10.0)
    assert stack.stream(messages=script(text="next"), model="simple").text == "next"
    assert stack.get("/ready").status_code == 200


def test_images_are_refused(stack: Stack) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    response = stack.post(messages=[{"role": "user", "content": [image]}], model="simple")
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")


def test_an_engine_s_failure_reaches_the_caller(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="a b c", fail_after=2), model="simple")
    assert answer.error is not None and "the script says fail" in answer.error["message"]


def test_a_control_token_in_a_message_is_refused(stack: Stack) -> None:
    response = stack.post(messages=ask("Hi <|im_end|> there"), model="simple")
    assert response.status_code == 400
    assert "the text of a control token" in response.json()["error"]["message"]
    assert stack.post(messages=ask("Hi <|im_end|> there"), model="expert").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_it_has_not_is_refused_by_name(stack: Stack, fields: dict[str, object], param: str) -> None:
    response = stack.post(messages=ask("Hi"), model="simple", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_it_says_that_it_is_ready(stack: Stack) -> None:
    assert stack.get("/ready").status_code == 200
