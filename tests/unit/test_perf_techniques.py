"""The arithmetic of `python -m perf techniques`, its worker over the scripted engine, and what an early end leaves."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.engines.scripted import ScriptedStepper, Settings
from perf.__main__ import main
from perf.errors import PerfError
from perf.techniques import TECHNIQUES, serving, techniques
from perf.techniques.comparison import (
    Comparison,
    acceptance_of,
    alternate,
    gaps_within,
    shared_prefix,
    tokens_per_step,
)
from perf.techniques.engine import decoded_by_step, in_batches
from perf.techniques.engine_worker import run
from perf.techniques.ground import COMPRESSED_TIER, Ground
from perf.techniques.serving import NUM_TURNS


@pytest.mark.parametrize(("better", "ratio"), [("higher", 0.25), ("lower", 4.0)])
def test_a_ratio_above_one_says_that_it_helps(better: Any, ratio: float) -> None:
    """It is the median of the rounds' own ratios, so that one disturbed round spoils nothing."""
    described = Comparison("ms", better, [(10, 40), (1, 4), (500, 4), (20, 80), (5, 20)], {"tokens": 7}).describe()
    assert (described["ratio"], described["on"], described["off"]) == (ratio, 10, 20)
    assert (described["unit"], described["better"], described["tokens"]) == ("ms", better, 7)
    assert len(described["ratios"]) == 5


def test_a_side_that_is_zero_is_an_error() -> None:
    with pytest.raises(PerfError, match="nothing can be said of a side that is zero"):
        Comparison("ms", "lower", [(1, 2), (0, 2)]).describe()


def test_who_goes_first_alternates() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> Callable[[], float]:
        return lambda: order.append(name) or value  # type: ignore[func-returns-value]

    assert alternate(3, side("on", 1), side("off", 2)) == [(1, 2)] * 3
    assert order == ["on", "off", "off", "on", "on", "off"]


def test_gaps_count_where_they_touch_the_time() -> None:
    times = [0.0, 1.0, 2.0, 5.0, 6.0, 7.0]
    assert gaps_within(times, 1.5, 5.5) == [1.0, 3.0, 1.0]
    assert gaps_within(times, 2.5, 3.0) == [3.0]  # which the long step lies in
    assert gaps_within(times, 8.0, 9.0) == []


def test_the_formula_of_speculative_decoding() -> None:
    assert tokens_per_step(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert tokens_per_step(0.0, 5) == 1.0
    assert tokens_per_step(1.0, 5) == 6.0


@given(st.floats(0.02, 0.98), st.integers(1, 8), st.integers(0, 9))
@settings(max_examples=20)
def test_acceptance_is_found_in_what_steps_brought(alpha: float, num_draft: int, seed: int) -> None:
    draw = random.Random(seed)

    def step() -> int:
        return 1 + sum(1 for _ in itertools.takewhile(lambda _: draw.random() < alpha, range(num_draft)))

    steps = [step() for _ in range(4000)]
    assert acceptance_of(steps, num_draft) == pytest.approx(alpha, abs=0.06)
    by_formula = tokens_per_step(acceptance_of(steps, num_draft), num_draft)
    assert by_formula == pytest.approx(sum(steps) / len(steps), rel=0.05)


def test_steps_that_cannot_be_are_refused() -> None:
    assert (acceptance_of([1, 1], 4), acceptance_of([5, 5], 4)) == (0.0, 1.0)
    for steps in ([], [0, 1], [6]):
        with pytest.raises(PerfError, match="tokens of a step: 1 to 5 are possible"):
            acceptance_of(steps, 4)


def test_tokens_that_come_together_are_of_one_step() -> None:
    assert decoded_by_step([0.1, 0.2, 0.2, 0.2, 0.3, 0.4, 0.4]) == [3, 1, 2]


def test_how_long_two_answers_are_the_same() -> None:
    assert [shared_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [9], [1, 2])] == [3, 2, 0, 2]


# --- the worker ----------------------------------------------------------------------------------------------


def test_groups_follow_each_other_and_prompts_come_at_their_time(tokenizer: Tokenizer) -> None:
    stepper = ScriptedStepper(
        tokenizer, Settings(engine="scripted", max_batch_size=8, context_window=8192, vocab_size=49152)
    )
    orders = json.dumps({"text": "one two three four", "itl_ms": 5})
    asked = [
        {"ids": tokenizer.encode(f"#script {orders}").ids, "max_tokens": 3, "after_s": after_s} for after_s in (0, 0.03)
    ]
    for groups in ([asked], in_batches(asked, 1)):
        reply = run(stepper, groups)
        first, second = reply["answers"]
        assert [len(each["ids"]) for each in reply["answers"]] == [3, 3]
        assert [len(each["times_s"]) for each in reply["answers"]] == [3, 3]
        assert second["sent_s"] >= 0.03 and reply["peak_mib"] > 0
        assert reply["seconds"] >= second["times_s"][-1] > first["times_s"][0] > 0
        if len(groups) == 2:
            assert second["sent_s"] >= first["times_s"][-1] + 0.03


# --- the run ---------------------------------------------------------------------------------------------------


def fake(monkeypatch: pytest.MonkeyPatch, ending: BaseException | None = None) -> None:
    def good(_: Ground) -> Comparison:
        return Comparison("ms", "lower", [(1.0, 2.0)])

    def bad(_: Ground) -> Comparison:
        if ending is not None:
            raise ending
        return good(_)

    for place in ("perf.techniques", "perf.__main__"):
        monkeypatch.setattr(f"{place}.TECHNIQUES", {"first": good, "second": bad, "third": good})


def test_those_that_are_named_are_measured_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    kept: list[list[str]] = []
    table, result = techniques(tmp_path, ["third", "first"], 1, lambda part: kept.append(list(part["techniques"])))
    assert list(result["techniques"]) == ["first", "third"] and kept == [["first"], ["first", "third"]]
    assert "first" in table and "second" not in table


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted; everything was stopped"),
        (PerfError("the engine failed"), 1, "error: the engine failed"),
    ],
)
def test_what_was_measured_before_the_end_is_left(
    ending: BaseException,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake(monkeypatch, ending)
    path = tmp_path / "measured.json"
    assert main(["techniques", f"--artifacts={tmp_path}", f"--json={path}"]) == code
    output = capsys.readouterr()
    left = json.loads(output.out.splitlines()[-1])
    assert list(left["techniques"]) == ["first"] and left["techniques"]["first"]["ratio"] == 2.0
    assert says in output.err and json.loads(path.read_text())["techniques"] == left["techniques"]


def test_an_unknown_technique_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["techniques", "--only", "magic"])
    error = capsys.readouterr().err
    assert all(name in error for name in TECHNIQUES)


# --- what is asked ---------------------------------------------------------------------------------------------


def test_compression_asks_the_same_of_both_tiers_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a server that is none: each answer is a word, the compressed tier saves a third and is twice as fast."""
    asked: list[tuple[str, str]] = []

    class FakeClient:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None: ...

        def chat(self, model: str, messages: list[dict[str, str]], **_: Any) -> tuple[float, dict[str, Any]]:
            saved = {"prompt_tokens_saved": 100} if model == COMPRESSED_TIER else {}
            return 1.0, {"choices": [{"message": {"content": "word"}}], "rt": {"input_tokens": 300, **saved}}

    class FakeConnection(FakeClient):
        def ask(self, body: bytes) -> Any:
            request = json.loads(body)
            assert request["messages"][0]["content"][:6].isdecimal() and len(request["messages"]) == 2 * NUM_TURNS - 1
            asked.append((request["model"], request["messages"][0]["content"]))
            return SimpleNamespace(ttft_ms=10.0 if request["model"] == COMPRESSED_TIER else 20.0)

    monkeypatch.setattr(serving, "Client", FakeClient)
    monkeypatch.setattr(serving, "SseConnection", FakeConnection)
    with Ground(tmp_path, 1) as ground:
        ground.stack = SimpleNamespace(gateway_url="")  # type: ignore[assignment]
        described = serving.compression(ground).describe()
    assert (described["on"], described["off"], described["ratio"]) == (10, 20, 2)
    assert (described["tokens_saved"], described["share_saved"]) == (100, 0.3333)
    assert described["with_cached_prefix"] == {"on": 10, "off": 20, "ratio": 2}
    assert len(asked) == 4 * serving.NUM_TALKS and len(set(asked)) == 2 * serving.NUM_TALKS
    assert len({text for _, text in asked}) == 2 * serving.NUM_TALKS  # no tier finds the other's prompt cached
