"""The choice of a tier: tables, and what holds for any tiers, any complexity and any pace."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.routing.complexity import TIERS, Complexity
from orchestrator.routing.policy import Candidate, Decision, Unfit, decide, levels

EASY = Complexity((0.9, 0.06, 0.03, 0.01))
MIDDLING = Complexity((0.2, 0.6, 0.15, 0.05))
HARD = Complexity((0.01, 0.04, 0.15, 0.8))
UNSURE = Complexity((0.49, 0.2, 0.2, 0.11))


def tier(name: str, **facts: Any) -> Candidate:
    return Candidate(
        **{
            "tier": name,
            "backend": f"engine-{name}",
            "level": name if name in TIERS else "simple",
            "context_window": 1000,
            "num_prompt_tokens": 100,
            "num_answer_tokens": 100,
            **facts,
        }
    )


FOUR = [tier(name) for name in TIERS]


def choose(
    candidates: list[Candidate], complexity: Complexity | None, left_s: float | None = None, **options: Any
) -> tuple[str | None, str, str]:
    """The tier that was chosen, the kind of reason, and the reason."""
    found = decide(candidates, complexity, threshold=0.5, left_s=left_s, **options)
    return (candidates[found.order[0]].tier if found.order else None), found.kind, found.reason


@pytest.mark.parametrize(
    ("complexity", "chosen"), [(EASY, "simple"), (MIDDLING, "medium"), (HARD, "expert"), (UNSURE, "medium")]
)
def test_the_cheapest_that_is_likely_to_suffice(complexity: Complexity, chosen: str) -> None:
    got, kind, reason = choose(FOUR, complexity)
    assert (got, kind) == (chosen, "suffices")
    assert reason == f"the cheapest tier that is likely to suffice ({complexity.suffices(chosen):.2f})"


def test_one_that_cannot_hold_prompt_and_answer_is_passed_over() -> None:  # R04
    tiers = [tier("simple", context_window=199), tier("medium", context_window=200), *FOUR[2:]]
    assert choose(tiers, EASY) == (
        "medium",
        "window",
        "likely to suffice (0.96); simple is cheaper, but has no room for prompt and answer",
    )


def test_one_that_cannot_do_what_is_asked_is_named_where_it_would_have_sufficed() -> None:
    narrow = Unfit("simple", "simple", 0, "window")
    assert choose(FOUR[1:], EASY, unfit=[narrow]) == (
        "medium",
        "window",
        "likely to suffice (0.96); simple is cheaper, but has no room for prompt and answer",
    )
    assert choose(FOUR[1:], EASY, unfit=[narrow._replace(kind="tools")])[1:] == (
        "tools",
        "likely to suffice (0.96); simple is cheaper, but has no tool parser",
    )
    assert choose(FOUR[1:], EASY, unfit=[narrow._replace(kind="unable", param="min_tokens")])[1:] == (
        "unable",
        "likely to suffice (0.96); simple is cheaper, but cannot take min_tokens",
    )
    assert choose(FOUR[1:], MIDDLING, unfit=[narrow])[:2] == ("medium", "suffices")  # it would not have been the one
    out = [FOUR[1]._replace(is_out=True), *FOUR[2:]]
    assert choose(out, MIDDLING, unfit=[narrow])[:2] == ("complex", "out")
    assert choose(FOUR[1:], None, mode="unclassified", unfit=[narrow])[1:] == (
        "window",
        "there is no classifier here; simple is cheaper, but has no room for prompt and answer",
    )
    dear = Unfit("expert", "expert", 3, "tools")
    assert choose(FOUR[:3], HARD, unfit=[dear])[1:] == (
        "tools",
        "may not suffice (0.20); expert would, but has no tool parser",
    )
    assert choose(FOUR[:3], EASY, unfit=[dear])[1] == "suffices"
    assert choose(FOUR[3:], EASY, unfit=[narrow, narrow._replace(tier="medium", kind="tools")])[1:] == (
        "window",
        "no other can: simple has no room for prompt and answer, medium has no tool parser",
    )


def test_where_no_window_holds_both_the_widest_does_what_it_can() -> None:
    tiers = [
        tier("simple", context_window=150),
        tier("medium", context_window=180),
        tier("complex", context_window=180),
    ]
    assert choose(tiers, HARD)[:2] == ("complex", "window")
    assert choose(tiers, EASY)[:2] == ("medium", "window")


def test_one_that_is_out_is_passed_over_and_all_of_them_are_nobody() -> None:
    tiers = [tier("simple", is_out=True), *FOUR[1:]]
    assert choose(tiers, EASY) == ("medium", "out", "likely to suffice (0.96); simple is cheaper, but out")
    dear = [*FOUR[:3], tier("expert", is_out=True)]
    assert choose(dear, HARD) == ("complex", "out", "may not suffice (0.20); expert would, but out")
    assert decide([tier("simple", is_out=True)], EASY, threshold=0.5) == Decision(
        (), "out", "every tier that could answer is out"
    )


def test_one_whose_answers_are_poor_is_passed_over() -> None:
    tiers = [tier("simple", is_doubtful=True), *FOUR[1:]]
    assert choose(tiers, EASY) == (
        "medium",
        "doubtful",
        "likely to suffice (0.96); simple is cheaper, but its answers have been poor lately",
    )
    assert decide(tiers, EASY, threshold=0.5).lifted_from == 0
    assert choose(tiers, None, mode="unclassified")[:2] == ("medium", "doubtful")
    # Nobody is lifted who pins, who goes elsewhere anyway, or if there is nowhere better.
    assert decide(tiers, EASY, threshold=0.5, mode="pinned")[:2] == ((0,), "pinned")
    assert decide(tiers, HARD, threshold=0.5).lifted_from is None
    all_poor = [each._replace(is_doubtful=True) for each in FOUR]
    assert decide(all_poor, EASY, threshold=0.5)[:2] == decide(FOUR, EASY, threshold=0.5)[:2]


def test_one_that_would_be_late_is_passed_over() -> None:
    tiers = [tier("simple", expected_s=3.0), tier("medium", expected_s=1.0), tier("complex", expected_s=9.0), FOUR[3]]
    assert choose(tiers, EASY, left_s=3.0)[:2] == ("simple", "suffices")
    assert choose(tiers, EASY, left_s=2.0)[:2] == ("medium", "deadline")
    late = [*FOUR[:2], tier("complex", expected_s=5.0), tier("expert", expected_s=5.0)]
    # In time and perhaps not enough, rather than late.
    assert choose(late, HARD, left_s=2.0) == (
        "medium",
        "deadline",
        "may not suffice (0.05); expert would, but not expected to be in time",
    )
    everything = [tier(name, expected_s=seconds) for name, seconds in zip(TIERS, (5.0, 3.0, 3.0, 4.0))]
    assert choose(everything, HARD, left_s=1.0)[:2] == ("medium", "deadline")


def test_a_tier_without_a_place_is_never_in_time() -> None:
    tiers = [tier("simple", expected_s=math.inf), *FOUR[1:]]
    assert choose(tiers, EASY)[:2] == ("medium", "deadline")


def test_the_quotas_leave_the_most_capable_of_the_cheap_ones() -> None:
    assert choose(FOUR[:2], HARD, is_limited=True) == (
        "medium",
        "quota",
        "may not suffice (0.05); the key's quotas leave no dearer tier",
    )
    assert choose(FOUR[:2], EASY, is_limited=True)[:2] == ("simple", "suffices")
    assert choose(FOUR[:1], None, is_limited=True) == ("simple", "quota", "the key's quotas leave no other")
    assert choose(FOUR[:2], HARD)[:2] == ("medium", "best")


def test_without_a_judgement_it_goes_up() -> None:
    assert choose(FOUR, None)[:2] == ("expert", "unjudged")
    assert choose([*FOUR, tier("cloud", level="expert")], None)[0] == "expert"
    assert choose([*FOUR[:3], tier("expert", is_out=True)], None)[0] == "complex"


def test_what_nobody_was_asked_to_judge_was_not_late() -> None:
    assert choose(FOUR, None)[2] == "the classifier did not judge it in time; so the most capable tier"
    assert choose(FOUR, None, is_asked=False) == (
        "expert",
        "unjudged",
        "there is nothing that the classifier reads; so the most capable tier",
    )


def test_without_a_classifier_it_is_the_cheapest() -> None:
    assert choose(FOUR, None, mode="unclassified") == (
        "simple",
        "unclassified",
        "there is no classifier here; the cheapest tier",
    )
    tiers = [tier("simple", is_out=True), *FOUR[1:]]
    assert choose(tiers, None, mode="unclassified") == (
        "medium",
        "out",
        "there is no classifier here; simple is cheaper, but out",
    )


def test_what_is_pinned_stays() -> None:
    found = decide(FOUR[:1], None, threshold=0.5, mode="pinned")
    assert found == Decision((0,), "pinned", "the request names it")
    two = [tier("cloud", context_window=150), tier("other", context_window=900)]
    assert decide(two, None, threshold=0.5, mode="pinned").order == (1,)  # one model, another window


def test_after_a_failure_first_upward_and_no_engine_twice() -> None:
    assert decide(FOUR, MIDDLING, threshold=0.5).order == (1, 2, 3, 0)
    shared = [tier(name, backend=engine) for name, engine in zip(TIERS, ("a", "a", "b", "b"))]
    assert decide(shared, EASY, threshold=0.5).order == (0, 2)
    assert decide(shared, HARD, threshold=0.5).order == (3, 1)
    tiers = [*FOUR[:2], tier("complex", is_out=True), tier("expert", context_window=150)]
    assert decide(tiers, EASY, threshold=0.5).order == (0, 1)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (TIERS, list(TIERS)),
        (["simple", "expert", "cloud"], ["simple", "expert", "expert"]),
        (["fast", "good"], ["simple", "simple"]),
    ],
)
def test_what_tiers_of_other_names_are_good_for(names: list[str], expected: list[str]) -> None:
    assert levels(names) == expected


def test_of_unknown_tiers_the_dear_one_takes_what_is_hard() -> None:
    two = [tier("fast"), tier("good", expected_s=0.1)]
    assert choose(two, EASY)[0] == "fast"


SECONDS = st.one_of(st.floats(0, 20), st.just(math.inf))
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        tier=st.just("t"),
        backend=st.sampled_from("abc"),
        level=st.sampled_from(TIERS),
        context_window=st.integers(50, 400),
        num_prompt_tokens=st.integers(1, 200),
        num_answer_tokens=st.integers(1, 200),
        expected_s=SECONDS,
        is_out=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
COMPLEXITIES = st.lists(st.integers(0, 100), min_size=4, max_size=4).map(
    lambda shares: Complexity(tuple(each / max(1, sum(shares)) for each in shares))  # type: ignore[arg-type]
)


@given(CANDIDATES, COMPLEXITIES, st.floats(0, 1), st.one_of(st.none(), st.floats(0, 20)), st.booleans())
def test_for_any_tiers(
    candidates: list[Candidate], complexity: Complexity, threshold: float, left_s: float | None, is_limited: bool
) -> None:
    found = decide(candidates, complexity, threshold=threshold, left_s=left_s, is_limited=is_limited)
    up = [each for each in candidates if not each.is_out]
    assert bool(found.order) == bool(up) and found.reason
    if not up:
        return
    chosen = candidates[found.order[0]]
    assert not any(candidates[place].is_out for place in found.order)
    backends = [candidates[place].backend for place in found.order]
    assert len(set(backends)) == len(backends)
    assert chosen.holds or not any(each.holds for each in up)

    def satisfies(each: Candidate) -> bool:
        is_in_time = each.expected_s < math.inf and (left_s is None or each.expected_s <= left_s)
        return each.holds and not each.is_out and is_in_time and complexity.suffices(each.level) >= threshold

    assert not any(satisfies(each) for each in candidates[: found.order[0]])
    if any(satisfies(each) for each in candidates):
        assert satisfies(chosen)
    assert (found.kind == "suffices") <= satisfies(chosen)
