"""The real language model behind the same doors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Stack, ask, one_instance, wait_for
from tokenizers import Tokenizer

QUESTION = ask("What is the capital of France?")
COUNTING = ask("Count from 1 to 100, separated by commas.")
PROMPTS = {
    "english": "Tell me about the sea.",
    "chinese": "请用中文介绍一下北京。",
    "arabic": "تحدث عن البحر باللغة العربية.",
    "emoji": "Repeat this exactly: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️‍🔥",
    "code": "Write a Python function that reverses a list. Use tabs.",
}


def content(stack: Stack, **fields: Any) -> str:
    response = stack.post(**fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_it_knows_the_capital_of_france(cpu_stack: Stack) -> None:
    answer = cpu_stack.stream(messages=QUESTION)
    assert "Paris" in answer.text
    assert (answer.finish_reason, answer.is_done) == ("stop", True)
    assert len(answer.deltas) > 3


@pytest.mark.parametrize("language", PROMPTS)
def test_streamed_and_whole_are_the_same_text(cpu_stack: Stack, language: str) -> None:
    request = {"messages": ask(PROMPTS[language]), "temperature": 0.8, "seed": 7, "max_tokens": 40}
    streamed = cpu_stack.stream(**request)
    assert streamed.text == content(cpu_stack, **request)
    assert streamed.text
    assert not streamed.text.endswith("\ufffd")


def test_a_seed_repeats_and_another_differs(cpu_stack: Stack) -> None:
    request = {"messages": ask("Invent a name for a dragon."), "temperature": 1.5, "max_tokens": 12}
    first = content(cpu_stack, **request, seed=1)
    assert content(cpu_stack, **request, seed=1) == first
    assert {content(cpu_stack, **request, seed=seed) for seed in (2, 3)} != {first}
    assert len({content(cpu_stack, **request) for _ in range(3)}) > 1  # without one, each is random


def test_temperature_0_repeats(cpu_stack: Stack) -> None:
    request = {"messages": ask("Say something."), "temperature": 0, "max_tokens": 15}
    assert content(cpu_stack, **request) == content(cpu_stack, **request)


def test_max_tokens(cpu_stack: Stack) -> None:
    """Case S10."""
    body = cpu_stack.post(messages=COUNTING, max_tokens=16, ignore_eos=True).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["prompt_tokens"] == body["rt"]["input_tokens"] > 10


def test_min_tokens(cpu_stack: Stack) -> None:
    request = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}
    assert cpu_stack.post(**request).json()["usage"]["completion_tokens"] < 20
    assert cpu_stack.post(**request, min_tokens=30).json()["usage"]["completion_tokens"] >= 30


def test_ignore_eos(cpu_stack: Stack) -> None:
    body = cpu_stack.post(messages=QUESTION, ignore_eos=True, max_tokens=30).json()
    assert body["usage"]["completion_tokens"] == 30
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stop_string(cpu_stack: Stack) -> None:
    """Case S09."""
    request = {"messages": COUNTING, "temperature": 0, "max_tokens": 30}
    free = content(cpu_stack, **request)
    stop = free[20:24]
    expected = free[: free.index(stop)]
    streamed = cpu_stack.stream(**request, stop=[stop])
    assert (streamed.text, streamed.finish_reason) == (expected, "stop")
    assert content(cpu_stack, **request, stop=[stop]) == expected
    cpu_stack.wait_until_idle()


def test_penalties_change_the_answer(cpu_stack: Stack) -> None:
    request = {"messages": ask("Write the word tree ten times."), "temperature": 0, "max_tokens": 25}
    free = content(cpu_stack, **request)
    for penalty in ({"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert content(cpu_stack, **request, **penalty) != free, penalty


def test_a_long_prompt_beyond_the_window_is_refused_with_counts(cpu_stack: Stack) -> None:
    """Case V03."""
    response = cpu_stack.post(messages=ask("word " * 9000), max_tokens=5)
    assert response.status_code == 400
    assert "9031 tokens and an answer of up to 5 are more than the context window of 8192 tokens" in response.text


def test_300_that_leave_hold_no_kv_block(cpu_stack: Stack) -> None:
    """At any moment: before the prefill, in it, and between tokens. What only the prefix cache knows is free."""
    peak = 0.0

    def come_and_go(index: int) -> None:
        nonlocal peak
        question = ask(f"{index:03d} is my number. Tell me a story about it.")
        with cpu_stack.send(messages=question, ignore_eos=True, max_tokens=500, stream=index % 2 == 0):
            time.sleep(index % 11 / 20)
            peak = max(peak, cpu_stack.model_metric("rt_kv_cache_usage_ratio", "llm_small"))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(come_and_go, range(300)))
    cpu_stack.wait_until_idle(20)
    assert peak > 0, "nobody ever held one"
    wait_for(lambda: cpu_stack.model_metric("rt_kv_cache_usage_ratio", "llm_small") == 0)
    assert content(cpu_stack, messages=QUESTION, temperature=0) == "The capital of France is Paris."


# --- together ------------------------------------------------------------------------------------------------


def test_six_staggered_streams(cpu_stack: Stack) -> None:
    """Each gets its first token while the first one is still running. How soon is measured by `perf stagger`."""

    def run(number: int, after_s: float) -> tuple[float, float]:
        time.sleep(after_s)
        started_s = time.monotonic()
        question = ask(f"{number} is my number. Tell me a story about it.")
        answer = cpu_stack.stream(messages=question, ignore_eos=True, max_tokens=100)
        return started_s + answer.came_s[0], time.monotonic()

    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(run, 2000 + 111 * index, 0.2 * index) for index in range(6)]
        first_token_s, ended_s = zip(*(stream.result() for stream in streams))
    assert max(first_token_s) < ended_s[0], "they did not overlap"


@pytest.mark.alone
def test_a_short_answer_does_not_wait_for_a_long_one(cpu_stack: Stack) -> None:
    """Requests join and leave mid-flight."""
    ended_s: dict[str, float] = {}

    def run(name: str, max_tokens: int) -> None:
        cpu_stack.stream(messages=COUNTING, ignore_eos=True, max_tokens=max_tokens)
        ended_s[name] = time.monotonic()

    long = threading.Thread(target=run, args=("long", 100))
    long.start()
    time.sleep(0.3)
    run("short", 3)
    long.join(50)
    assert ended_s["short"] < ended_s["long"] - 0.3


@pytest.mark.alone
@one_instance
def test_leaving_a_stream_ends_it_within_a_step(cpu_stack: Stack) -> None:
    """Case K02: at most one decode step begins after the orchestrator has seen that the client left."""
    since = cpu_stack.log_length()
    with cpu_stack.send(messages=COUNTING, ignore_eos=True, max_tokens=1000, stream=True) as connection:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
    left_s = time.monotonic()
    stopped = cpu_stack.wait_for_log("engine_stopped", since)
    seen = cpu_stack.wait_for_log("caller_left", since)
    assert seen["request_id"] == stopped["request_id"]
    later_steps = [began_s for began_s in stopped["last_steps_began_s"] if began_s > seen["monotonic_s"]]
    assert len(later_steps) <= 1
    assert stopped["monotonic_s"] - left_s < 0.150
    cpu_stack.wait_until_idle()


@pytest.mark.alone
def test_leaving_a_whole_answer_ends_it(cpu_stack: Stack) -> None:
    """Case K01."""
    since = cpu_stack.log_length()
    with cpu_stack.send(messages=COUNTING, ignore_eos=True, max_tokens=1000):
        time.sleep(0.1)
    left_s = time.monotonic()
    assert cpu_stack.wait_for_log("engine_stopped", since)["monotonic_s"] - left_s < 0.150
    cpu_stack.wait_until_idle()


# --- speculation ---------------------------------------------------------------------------------------------

GENERATE = """
import json, sys
from pathlib import Path
from orchestrator.engines import EngineRequest, create_stepper
parameters, model_dir, input_ids = json.loads(sys.argv[1])
for speculation in ("none", "prompt_lookup"):
    stepper = create_stepper({**parameters, "speculation": speculation}, Path(model_dir))
    stepper.add(EngineRequest("a", input_ids, max_new_tokens=40, end_id=2))
    made, num_steps = [], 0
    while stepper.has_requests():
        num_steps += 1
        for chunk in stepper.step().values():
            made += chunk.token_ids
    print(json.dumps([made, num_steps]))
"""


def test_prompt_lookup_gives_the_same_text_in_fewer_steps(artifact: Callable[[str], Path]) -> None:
    model_dir = artifact("cpu") / "model_repository" / "llm_small" / "1"
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer" / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog near the old mill by the quiet river."
    prompt = f"<|im_start|>user\nRepeat this text: {text}<|im_end|>\n<|im_start|>assistant\n"
    parameters = {
        "engine": "openvino",
        "max_batch_size": "4",
        "max_tokens_in_paged_kv_cache": "2048",
        "max_num_tokens": "512",
        "enable_kv_cache_reuse": "true",
        "enable_chunked_context": "true",
        "context_window": "2048",
        "vocab_size": "49152",
        # With 8 bits a rejected draft leaves its trace in its block's scale, and near ties fall otherwise.
        "kv_cache_precision": "f32",
    }
    input_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    command = [sys.executable, "-c", GENERATE, json.dumps([parameters, str(model_dir), input_ids])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    (plain, plain_steps), (drafted, drafted_steps) = map(json.loads, done.stdout.splitlines()[-2:])
    assert drafted == plain
    assert drafted_steps < plain_steps
