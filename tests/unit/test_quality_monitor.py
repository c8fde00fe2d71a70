"""The quality monitor's judgement: on seeded simulations, and what it keeps of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.config import QualityPolicy
from orchestrator.quality.clusters import Clusters, Vector
from orchestrator.quality.monitor import Change, Monitor, Sample, State, pack, unpack
from orchestrator.quality.track import MIN_ANSWERS, NUM_USUAL_OF_TIER, Track
from perf.quality_drift import GOOD_SHARES, NONSENSE_SHARE, simulate_cluster, simulate_tier

POLICY = QualityPolicy(tiers=["simple", "medium"])
PRINTS = {"simple": "a", "medium": "b"}


def unit(seed: int, num_dims: int = 32) -> Vector:
    vector = np.random.default_rng(seed).normal(size=num_dims)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def feed(monitor: Monitor, share: float, num: int, *, vector: Vector | None = None, seed: int = 0) -> list[Change]:
    chance = random.Random(seed)
    changes = []
    for _ in range(num):
        changes += monitor.add(Sample("simple", vector, chance.random() < share, 1.0))
    return changes


# --- the bars ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", GOOD_SHARES)
def test_a_tier_that_starts_answering_nonsense_is_found_and_a_good_one_is_left_alone(share: float) -> None:
    """10,000 good requests at 5 %, then the drift; `python -m perf quality` does the same 200 times."""
    runs = [simulate_tier(share, seed) for seed in range(1000, 1006)]
    assert [run.false_alarms for run in runs] == [0] * len(runs)
    assert all(run.delay is not None and run.delay <= 1500 for run in runs), runs


def test_a_cluster_that_drifts_is_found_by_its_own_requests() -> None:
    runs = [simulate_cluster(seed) for seed in range(1000, 1012)]
    assert [run.false_alarms for run in runs] == [0] * len(runs)
    assert all(run.delay is not None and run.delay <= 1500 for run in runs), runs


def test_a_tier_that_was_never_good_is_found_too() -> None:
    for seed in range(30):
        monitor = Monitor(POLICY, PRINTS)
        num = next(num for num in range(1, 200) if feed(monitor, NONSENSE_SHARE, 1, seed=seed * 1000 + num))
        assert MIN_ANSWERS <= num <= 75
        assert monitor.is_doubtful("simple", None)


# --- doubt and recovery --------------------------------------------------------------------------------------


def test_nothing_is_said_before_fifty_answers() -> None:
    track = Track(NUM_USUAL_OF_TIER)
    assert not any(track.add(False, POLICY) for _ in range(MIN_ANSWERS - 1))
    assert track.add(False, POLICY) and track.is_doubtful


def test_what_is_usual_is_the_line_and_not_a_share_as_such() -> None:
    """A tier that is usually good half of the time stays; one that falls from nine in ten to that does not."""
    steady = Monitor(POLICY, PRINTS)
    assert feed(steady, 0.5, 2000) == []
    fallen = Monitor(POLICY, PRINTS)
    assert feed(fallen, 0.9, NUM_USUAL_OF_TIER) == []
    kinds = [change.kind for change in feed(fallen, 0.4, 300)]
    assert "doubtful" in kinds and "retraining" in kinds
    assert not fallen.is_doubtful("medium", None)


def test_it_recovers_when_the_interval_says_so_and_falls_again() -> None:
    monitor = Monitor(POLICY, PRINTS)
    feed(monitor, 0.7, 150)
    assert [change.kind for change in feed(monitor, 0.0, 80) if change.kind == "doubtful"] == ["doubtful"]
    feed(monitor, 0.0, 400)
    assert monitor.is_doubtful("simple", None)
    changes = feed(monitor, 0.7, 90)
    assert [change.kind for change in changes if change.kind != "retraining"] == ["recovered"]
    assert not monitor.is_doubtful("simple", None)
    assert feed(monitor, 0.7, 300) == []  # what was before does not count against it
    feed(monitor, 0.0, 80)
    assert monitor.is_doubtful("simple", None)


def test_a_cluster_is_doubtful_by_itself() -> None:
    monitor = Monitor(POLICY, PRINTS)
    cooking, coding = unit(1), unit(2)
    for seed in range(150):
        feed(monitor, 0.9, 1, vector=cooking, seed=seed)
        feed(monitor, 0.9, 1, vector=coding, seed=seed + 1000)
    changes = []
    for seed in range(70):
        changes += feed(monitor, 0.0, 1, vector=cooking)
        feed(monitor, 0.9, 3, vector=coding, seed=seed)
        if monitor.is_doubtful("simple", cooking):
            break
    assert monitor.is_doubtful("simple", cooking) and not monitor.is_doubtful("simple", coding)
    assert not monitor.is_doubtful("simple", None) and not monitor.is_doubtful("medium", cooking)
    assert not monitor.is_doubtful("simple", unit(3))
    assert monitor.num_doubtful_clusters("simple") == 1 and monitor.num_doubtful_clusters("medium") == 0
    (change,) = [change for change in changes if change.kind == "doubtful"]
    assert change.tier == "simple" and change.cluster == monitor.cluster_of(cooking)


def test_it_calls_for_retraining_once_a_hundred() -> None:
    monitor = Monitor(POLICY, PRINTS)
    feed(monitor, 0.95, 200)
    changes = feed(monitor, 0.55, 199, seed=1)
    assert 1 <= [change.kind for change in changes].count("retraining") <= 2
    assert monitor.calls["simple"] == [change.kind for change in changes].count("retraining")


def test_a_tier_that_nobody_watches_changes_nothing() -> None:
    monitor = Monitor(POLICY, PRINTS)
    assert monitor.add(Sample("complex", unit(1), False, 1.0)) == []
    assert not monitor.is_doubtful("complex", unit(1)) and not monitor.samples


# --- clusters ------------------------------------------------------------------------------------------------


def test_clusters_are_bounded_and_what_is_asked_again_stays() -> None:
    clusters = Clusters(max_clusters=8)
    often = unit(0)
    first, _ = clusters.add(often)
    for seed in range(1, 200):
        clusters.add(unit(seed))
        assert clusters.add(often) == (first, None)
        assert len(clusters.leaders) <= 8


def test_a_cluster_in_doubt_is_not_forgotten_for_a_new_one() -> None:
    clusters = Clusters(max_clusters=4)
    kept, _ = clusters.add(unit(0))
    for seed in range(1, 60):
        clusters.add(unit(seed), kept=[kept])
    assert clusters.find(unit(0)) == kept


def test_a_vector_of_another_length_is_in_no_cluster() -> None:
    clusters = Clusters()
    clusters.add(unit(0))
    assert clusters.find(unit(0, num_dims=16)) is None


# --- what is kept --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_a_restart_changes_nothing(answers: Sequence[tuple[int, bool]]) -> None:
    monitor = Monitor(POLICY, PRINTS)
    for kind, is_good in answers:
        monitor.add(Sample("simple", unit(kind) if kind else None, is_good, 5.0))
    again = Monitor(POLICY, PRINTS)
    again.restore(State.model_validate_json(monitor.state().model_dump_json()))
    first, second = monitor.state().model_dump(), again.state().model_dump()
    assert len(first.pop("leaders")) == len(second.pop("leaders"))
    assert first == second
    for kind in range(1, 6):
        assert monitor.is_doubtful("simple", unit(kind)) == again.is_doubtful("simple", unit(kind))
        assert monitor.cluster_of(unit(kind)) == again.cluster_of(unit(kind))


def test_another_model_begins_anew() -> None:
    monitor = Monitor(POLICY, PRINTS)
    feed(monitor, 0.0, 60)
    assert monitor.is_doubtful("simple", None)
    other = Monitor(POLICY, {**PRINTS, "simple": "another"})
    other.restore(monitor.state())
    assert not other.is_doubtful("simple", None) and not sum(other.samples.values())


def test_what_nothing_was_heard_of_is_forgotten() -> None:
    monitor = Monitor(POLICY, PRINTS)
    feed(monitor, 0.0, 60, vector=unit(1))
    later = 1.0 + POLICY.keep_days * 86400 + 1
    monitor.add(Sample("medium", unit(2), True, later))
    assert not monitor.is_doubtful("simple", unit(1)) and monitor.cluster_of(unit(1)) is None
    assert len(monitor.tracks) == 2


def test_the_state_is_bounded_and_holds_vectors_but_no_text() -> None:
    monitor = Monitor(POLICY, PRINTS)
    for seed in range(1500):
        monitor.add(Sample("simple", unit(seed, 384), seed % 2 == 0, 1.0))
    written = monitor.state().model_dump_json()
    assert len(written) < 300_000


@pytest.mark.parametrize(
    "vector", ["", "!", pack(np.zeros(4, np.float32)), pack(np.full(4, np.nan, np.float32)), "AA=="]
)
def test_what_is_no_vector_is_refused(vector: str) -> None:
    with pytest.raises(ValueError, match="vector: "):
        unpack(vector)


def test_a_state_with_a_broken_vector_changes_nothing() -> None:
    monitor = Monitor(POLICY, PRINTS)
    feed(monitor, 0.5, 10, vector=unit(1))
    state = monitor.state()
    broken = state.model_copy(update={"leaders": [state.leaders[0].model_copy(update={"vector": "AA=="})]})
    other = Monitor(POLICY, PRINTS)
    with pytest.raises(ValueError, match="vector: "):
        other.restore(broken)
    assert not other.samples


def test_another_version_is_not_read() -> None:
    state = Monitor(POLICY, PRINTS).state().model_dump()
    with pytest.raises(ValidationError):
        State.model_validate({**state, "version": 2})
