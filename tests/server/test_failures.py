"""What is left when a part fails: errors for everyone who waits, and no readiness. Each test has its own server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from serving import Answer, Stack, running, script, wait_for

SLOW = {"messages": script(text="x " * 500, itl_ms=20), "max_tokens": 500}


@pytest.fixture
def own_stack(artifact: Callable[[str], Path], tmp_path: Path) -> Iterator[Stack]:
    with running(artifact("scripted"), tmp_path) as stack:
        yield stack


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.fixture
def own_artifact(artifact: Callable[[str], Path], tmp_path: Path) -> Path:
    """One whose files may be renamed."""
    return shutil.copytree(artifact("scripted"), tmp_path / "artifact", copy_function=link_or_copy)


@pytest.mark.parametrize("how", ["error", "kill"])
def test_the_engine_dies_and_comes_back(own_artifact: Path, tmp_path: Path, how: str) -> None:
    with running(own_artifact, tmp_path / "run") as stack:
        check_death(stack, own_artifact / "model_repository" / "llm_small" / "1" / "tokenizer" / "tokenizer.json", how)


def check_death(own_stack: Stack, needed: Path, how: str) -> None:
    """`needed` is a file without which the engine's process cannot load."""
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(own_stack.stream, **SLOW) for _ in range(6)]
        wait_for(lambda: own_stack.num_live("llm_small") == 6)
        needed.rename(needed.with_suffix(".gone"))
        if how == "error":
            own_stack.stream(messages=script(text="a b", die_after=1, itl_ms=100))
        else:
            own_stack.kill("orchestrator.engines.worker")
        answers: list[Answer] = [future.result(timeout=20) for future in waiting]
    for answer in answers:
        assert answer.error is not None
        assert answer.error["code"] == "engine_error"
        assert (answer.finish_reason, answer.is_done) == (None, False)
    wait_for(lambda: own_stack.get("/ready").status_code == 503)
    assert own_stack.get("/ready").json() == {"status": "not ready", "not_ready": ["llm_small"]}
    assert own_stack.get("/health").status_code == 200
    with triton.InferenceServerClient(own_stack.front_url) as front:
        assert front.is_server_live()
        assert not front.is_server_ready()
        assert not front.is_model_ready("orchestrator")
        assert front.is_model_ready("embedding")
    late = own_stack.post(messages=script(text="x"))
    assert late.status_code == 502
    assert late.json()["error"]["message"] == answers[0].error["message"]
    own_stack.wait_until_idle()
    needed.with_suffix(".gone").rename(needed)
    wait_for(lambda: own_stack.get("/ready").status_code == 200, 30)  # the tries are seconds apart by now
    assert own_stack.stream(messages=script(text="I am back.")).text == "I am back."
    (line,) = own_stack.logged("engine_restarted")
    assert line["took_s"] > 0


def test_stopping_lets_live_answers_end_and_refuses_none_silently(own_stack: Stack) -> None:
    """A stream shorter than the drain time ends whole; one that is longer ends with an error, never cleanly."""
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(own_stack.stream, messages=script(text="x " * 50, itl_ms=20))
        long = pool.submit(own_stack.stream, messages=script(text="x " * 2000, itl_ms=20), max_tokens=2000)
        wait_for(lambda: own_stack.num_live("llm_small") == 2)
        own_stack.process.terminate()
        assert short.result(timeout=20).text == "x " * 50
        assert short.result().is_done
        answer = long.result(timeout=20)
    assert answer.error is not None
    assert answer.error["code"] == "shutting_down"
    assert (answer.finish_reason, answer.is_done) == (None, False)


def test_nothing_of_a_finished_request_keeps_triton_from_stopping(own_stack: Stack) -> None:
    """Triton waits for the last reference to a request: a leaked one costs the whole drain time."""
    for index in range(40):
        own_stack.post(messages=script(text="x"), stream=index % 4 == 0)
    own_stack.process.terminate()
    own_stack.process.communicate(timeout=20)
    assert own_stack.process.returncode == 0
    assert "Exit timeout expired" not in own_stack.log()
