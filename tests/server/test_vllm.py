"""Engine `vllm` on the real Triton, with a stand-in for vLLM that echoes the prompt's tokens."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Stack, ask, running, wait_for

from build.fetch import cache_folder, cached_path, fetch
from build.model_rows import ModelRow
from build.rows import load_models, load_target
from orchestrator.engines.process import PYTHON_VARIABLE
from perf.gpu.rows import LLAMA, SMOLLM2, make_artifact, make_row

pytestmark = pytest.mark.own_target("of engine vllm, in a server of its own")
ROOT = Path(__file__).parents[2]
DIES = 33  # see the stand-in


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("vllm")
    smollm2 = load_models(load_target("cpu"))[SMOLLM2]
    assert isinstance(smollm2, ModelRow) and smollm2.gguf is not None
    linked = cached_path(smollm2.gguf, folder / "cache")
    linked.parent.mkdir(parents=True)
    linked.symlink_to(fetch(smollm2.gguf, cache_folder()))
    row = make_row("gpu-test", LLAMA, precision="fp8", load_format="dummy", max_seq_len=4096)
    artifact = make_artifact(row, folder, folder / "cache")
    python = folder / "engine-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}/tests/standins/vllm:{ROOT}" exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with running(artifact, folder / "run", **{PYTHON_VARIABLE: str(python)}) as stack:
        yield stack


def test_a_stream_is_the_engines_tokens_one_by_one(stack: Stack) -> None:
    answer = stack.stream(messages=ask("One two three"), model="simple", stream_options={"include_usage": True})
    assert answer.text.endswith("user\nOne two three\nassistant\n")
    assert answer.finish_reason == "stop" or answer.events[-1]["usage"]
    assert len(answer.deltas) == answer.rt["tokens"]
    assert stack.post(messages=ask("One two three"), model="simple").json()["choices"][0]["finish_reason"] == "stop"


def test_limits_log_probs_and_several_choices(stack: Stack) -> None:
    answer = stack.post(messages=ask("a b c"), model="simple", n=2, max_tokens=5, logprobs=True).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert [each["logprob"] for each in answer["choices"][1]["logprobs"]["content"]] == [-0.5] * 5
    assert answer["usage"]["completion_tokens"] == 10


def test_what_the_engine_cannot_hold_is_refused(stack: Stack) -> None:
    answer = stack.stream(messages=ask("a"), model="simple", max_tokens=5000)
    assert answer.error is not None and "context window of 4096 tokens" in answer.error["message"]


def test_whoever_leaves_is_stopped(stack: Stack) -> None:
    since = stack.log_length()
    connection = stack.send(messages=ask("on and on"), model="simple", stream=True, max_tokens=4000, ignore_eos=True)
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.close()
    stack.wait_for_log("engine_stopped", since)
    stack.wait_until_idle()
    stack.post(messages=ask("a"), model="simple", max_tokens=1)
    wait_for(lambda: stack.model_metric("rt_kv_cache_usage_ratio", "llm_small") == 0)


def test_a_dead_engine_is_told(stack: Stack) -> None:
    """The last test: nothing is served after it."""
    completion = {"prompt": [DIES, 100, 101], "model": "simple", "max_tokens": 8}
    answer = stack._http.post("/v1/completions", json=completion)
    assert (answer.status_code, "the core is dead" in answer.text) == (502, True)
    assert stack.post(messages=ask("a"), model="simple").status_code >= 500
