"""GPU targets, rendered and booted on the real Triton: NVIDIA's backend is its stand-in, an engine of ours answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from images import LETTER, encode, error_rate, letter
from serving import Stack, ask, running_rendered, script, wait_for

TIERS = {"simple": "llm_small", "medium": "llm_small", "complex": "llm_large", "expert": "llm_large"}


@pytest.fixture(scope="module", params=["l4", "h100"])
def stack(
    request: pytest.FixtureRequest, artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with running_rendered(request.param, artifact("scripted"), tmp_path_factory.mktemp(request.param)) as stack:
        yield stack


@pytest.mark.parametrize("tier", TIERS)
def test_every_engine_answers(stack: Stack, tier: str) -> None:
    answer = stack.stream(messages=script(text="One two three."), model=tier)
    assert (answer.text, answer.finish_reason, answer.rt["model"]) == ("One two three.", "stop", TIERS[tier])
    whole = stack.post(messages=script(text="One two three."), model=tier).json()
    assert whole["choices"][0]["message"]["content"] == "One two three."
    assert whole["usage"]["completion_tokens"] == 4


def test_the_embedder_answers(stack: Stack) -> None:
    body = {"model": "embedding", "input": ["Turn on dark mode.", "Switch to the dark theme."]}
    answer = httpx.post(f"{stack.url}/v1/embeddings", json=body, timeout=30).json()
    assert [len(each["embedding"]) for each in answer["data"]] == [384, 384]


def encode_ids(stack: Stack, shape: tuple[int, int], kind: type = np.int32) -> np.ndarray:
    """What the plan of the embedder makes of token ids, asked by whoever reaches Triton itself."""
    given = {"input_ids": np.full(shape, 2000, kind), "attention_mask": np.ones(shape, kind)}
    tensors = [triton.InferInput(name, shape, "INT32" if kind is np.int32 else "INT64") for name in given]
    for tensor, array in zip(tensors, given.values()):
        tensor.set_data_from_numpy(array)
    with stack.triton_client() as client:
        return np.asarray(client.infer("embedding_encoder", tensors).as_numpy("embedding"))


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (32, 17), (2, 256)])
def test_the_plan_takes_what_its_profiles_say(stack: Stack, shape: tuple[int, int]) -> None:
    rows = encode_ids(stack, shape)
    assert rows.shape == (shape[0], 384)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-4)


def test_the_plan_refuses_what_no_profile_takes(stack: Stack) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        encode_ids(stack, (1, 257))
    assert str(caught.value.message()) == (
        "request specifies invalid shape for input 'input_ids' for embedding_encoder_0_0. Error details: model "
        "expected the shape of dimension 1 to be between 1 and 16 but received 257"
    )
    with pytest.raises(triton.InferenceServerException, match="batch-size must be <= 32"):
        encode_ids(stack, (33, 16))
    with pytest.raises(triton.InferenceServerException, match="data-type is 'INT64'.* expects 'INT32'"):
        encode_ids(stack, (1, 16), np.int64)
    assert encode_ids(stack, (1, 16)).shape == (1, 384)


def test_an_image_is_read(stack: Stack) -> None:
    image = encode(letter(), "PNG")
    answer = httpx.post(f"{stack.url}/v1/ocr", content=image, headers={"content-type": "image/png"}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert error_rate([line["text"] for line in answer.json()["lines"]], LETTER) <= 0.01


def test_it_says_that_it_is_ready(stack: Stack) -> None:
    assert stack.get("/ready").status_code == 200


def test_a_token_comes_when_it_is_made(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="a b c d e f", itl_ms=50), model="expert")
    assert answer.deltas == ["a", " b", " c", " d", " e", " f"]
    gaps_s = [later - earlier for earlier, later in zip(answer.came_s, answer.came_s[1:6])]
    assert sorted(gaps_s)[len(gaps_s) // 2] == pytest.approx(0.050, abs=0.02)


def test_characters_of_several_tokens_come_whole(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="héllo 你好 🙂", per_char=True), model="simple")
    assert answer.text == "héllo 你好 🙂"
    assert all("\ufffd" not in delta for delta in answer.deltas)


def test_log_probabilities_that_nvidia_repeats_are_told_once(stack: Stack) -> None:
    messages = script(token_ids=[[32], [33], [34]], log_probs=[-1.0, -2.0, -0.5], itl_ms=20)
    answer = stack.stream(messages=messages, model="expert", logprobs=True)
    choices = [event["choices"][0] for event in answer.events]
    told = [each["logprob"] for choice in choices for each in (choice["logprobs"] or {}).get("content") or []]
    assert told == [-1.0, -2.0, -0.5]


def test_a_stop_string_ends_the_engine_s_work(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="a b c STOP " + "x " * 200, itl_ms=10), model="simple", stop=["STOP"])
    assert (answer.text, answer.finish_reason) == ("a b c ", "stop")
    wait_for(lambda: stack.num_live("llm_small") == 0, 1.0)


@pytest.mark.alone
def test_who_leaves_stops_the_engine_whichever_instance_it_is(stack: Stack) -> None:
    """Triton hands the stop to any instance of the model; `h100` has two."""
    for _ in range(6):
        connection = stack.send(messages=script(text="x " * 300, itl_ms=20), model="simple", stream=True)
        connection.recv(100)
        connection.close()
        left_s = time.monotonic()
        wait_for(lambda: stack.num_live("orchestrator") == 0, 5.0)
        assert time.monotonic() - left_s < 1.5


def test_an_engine_s_failure_reaches_the_caller(stack: Stack) -> None:
    answer = stack.stream(messages=script(text="a b c", fail_after=2), model="complex")
    assert answer.error is not None and "the script says fail" in answer.error["message"]


def test_a_prompt_beyond_the_engine_s_limit(stack: Stack) -> None:
    """max_input_len is the engine's; the tier's window, prompt and answer, is what callers are told of."""
    response = stack.post(messages=ask("word " * 20000), model="simple")
    assert response.status_code == 400
    assert "context window" in response.json()["error"]["message"]
