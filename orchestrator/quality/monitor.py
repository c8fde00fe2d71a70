"""What is known of each watched tier's answers: by tier, and by clusters of questions. Pure: no clock, no I/O.

Whoever takes in the same samples in the same order knows the same, so several servers that share their samples agree.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from orchestrator.config import QualityPolicy, Row
from orchestrator.quality.clusters import MAX_CLUSTERS, Clusters, Vector
from orchestrator.quality.track import NUM_USUAL_OF_CLUSTER, NUM_USUAL_OF_TIER, WINDOWS, Track

# Changes with the layout of `State`; what was written by another version is not read.
VERSION = 1
_DAY_S = 86400.0
Count = Annotated[int, Field(ge=0)]


class Sample(NamedTuple):
    """A tier's answer, compared. `vector` is the question's, FP32 [dimensions] of length 1, or None without one;
    `at_s` is in seconds since 1970."""

    tier: str
    vector: Vector | None
    is_good: bool
    at_s: float


class Change(NamedTuple):
    """What a sample brought about, of a tier or of one cluster: it became "doubtful", "recovered", or, of tiers alone,
    calls for "retraining"."""

    kind: Literal["doubtful", "recovered", "retraining"]
    tier: str
    cluster: int | None
    num_good: int
    num: int
    usual: float | None


class Kept(Row):
    """A `Track`; `latest` is a 1 for each good answer, a 0 for each poor one."""

    tier: str
    cluster: int | None = None
    num_usual: Count
    usual_good: Count
    latest: Annotated[str, Field(pattern=r"^[01]*$", max_length=max(WINDOWS))]
    num_fresh: Count
    is_doubtful: bool
    num_until_call: Count
    answered_s: float


class Leader(Row):
    """A cluster; `vector` is base64 of FP16."""

    id: Count
    count: Annotated[float, Field(ge=0)]
    vector: Annotated[str, Field(max_length=8192)]


class State(Row):
    """All of it as JSON. `tiers` are fingerprints of the tiers' rows: what is known of another model is not kept."""

    version: Literal[1] = 1
    tiers: dict[str, str]
    next_cluster: Count
    num_questions: Count
    leaders: Annotated[list[Leader], Field(max_length=MAX_CLUSTERS)]
    tracks: Annotated[list[Kept], Field(max_length=4096)]
    samples: dict[str, dict[str, Count]]
    calls: dict[str, Count]


class Monitor:
    """For one thread. `samples` counts by tier and "good" or "poor", `calls` for retraining by tier."""

    def __init__(self, policy: QualityPolicy, fingerprints: Mapping[str, str]) -> None:
        """`fingerprints` change with what answers for a tier, or with what it is compared to; of all watched tiers."""
        self.policy = policy
        self.samples: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[str] = Counter()
        self.tracks: dict[tuple[str, int | None], Track] = {}
        self._fingerprints = dict(fingerprints)
        self._clusters = Clusters()
        for tier in self._fingerprints:
            self._track(tier, None)

    def is_doubtful(self, tier: str, vector: Vector | None) -> bool:
        """Whether a question (by its unit vector, if there is one) had better go to a tier above `tier`."""
        track = self.tracks.get((tier, None))
        if track is None:
            return False
        if track.is_doubtful or vector is None:
            return track.is_doubtful
        track = self.tracks.get((tier, self._clusters.find(vector)))
        return track is not None and track.is_doubtful

    def add(self, sample: Sample) -> list[Change]:
        """Take in a sample; one of a tier that is not watched changes nothing."""
        if sample.tier not in self._fingerprints:
            return []
        self._forget(sample.at_s)
        self.samples[sample.tier, "good" if sample.is_good else "poor"] += 1
        changes = []
        for cluster in self._clusters_of(sample):
            track = self._track(sample.tier, cluster)
            track.answered_s = sample.at_s
            if track.add(sample.is_good, self.policy):
                kind: Literal["doubtful", "recovered"] = "doubtful" if track.is_doubtful else "recovered"
                changes.append(self._change(kind, sample.tier, cluster, track))
            if cluster is None and track.calls_for_retraining(self.policy):
                self.calls[sample.tier] += 1
                changes.append(self._change("retraining", sample.tier, None, track))
        return changes

    def cluster_of(self, vector: Vector | None) -> int | None:
        return None if vector is None else self._clusters.find(vector)

    @property
    def has_doubtful_clusters(self) -> bool:
        return any(self.num_doubtful_clusters(tier) for tier in self._fingerprints)

    def num_doubtful_clusters(self, tier: str) -> int:
        tracks = list(self.tracks.items())  # read by the thread that tells metrics as well
        return sum(track.is_doubtful for (name, cluster), track in tracks if name == tier and cluster is not None)

    def state(self) -> State:
        return State(
            tiers=self._fingerprints,
            next_cluster=self._clusters.next_id,
            num_questions=self._clusters.num_questions,
            leaders=[
                Leader(id=each, count=self._clusters.counts[each], vector=pack(leader))
                for each, leader in self._clusters.leaders.items()
            ],
            tracks=[_keep(tier, cluster, track) for (tier, cluster), track in self.tracks.items() if track.answered_s],
            samples={
                tier: {verdict: self.samples[tier, verdict] for verdict in ("good", "poor")}
                for tier in self._fingerprints
            },
            calls={tier: self.calls[tier] for tier in self._fingerprints},
        )

    def restore(self, state: State) -> None:
        """Go on from `state`, with what it knows of tiers that are still the same.

        Raises `ValueError` for a vector that is none; then nothing is changed.
        """
        leaders = {leader.id: (unpack(leader.vector), leader.count) for leader in state.leaders}
        if len({len(vector) for vector, _ in leaders.values()}) > 1:
            raise ValueError("leaders: vectors of several lengths")
        self._clusters = Clusters()
        self._clusters.next_id, self._clusters.num_questions = state.next_cluster, state.num_questions
        for each, (vector, count) in leaders.items():
            self._clusters.leaders[each], self._clusters.counts[each] = vector, count
        same = {tier for tier, fingerprint in state.tiers.items() if self._fingerprints.get(tier) == fingerprint}
        for kept in state.tracks:
            if kept.tier in same and (kept.cluster is None or kept.cluster in leaders):
                self.tracks[kept.tier, kept.cluster] = _unkeep(kept)
        for tier in same:
            self.calls[tier] = state.calls.get(tier, 0)
            for verdict, count in state.samples.get(tier, {}).items():
                self.samples[tier, verdict] = count

    def _clusters_of(self, sample: Sample) -> tuple[int | None, ...]:
        """None for the tier itself, and the question's cluster."""
        if sample.vector is None:
            return (None,)
        kept = {cluster for (_, cluster), track in self.tracks.items() if cluster is not None and track.is_doubtful}
        cluster, gone = self._clusters.add(sample.vector, kept)
        if gone is not None:
            self._drop(gone)
        return (None, cluster)

    def _track(self, tier: str, cluster: int | None) -> Track:
        track = self.tracks.get((tier, cluster))
        if track is None:
            track = Track(NUM_USUAL_OF_TIER if cluster is None else NUM_USUAL_OF_CLUSTER)
            self.tracks[tier, cluster] = track
        return track

    def _drop(self, cluster: int) -> None:
        for key in [key for key in self.tracks if key[1] == cluster]:
            del self.tracks[key]

    def _forget(self, now_s: float) -> None:
        """What nothing was heard of for so long."""
        before_s = now_s - self.policy.keep_days * _DAY_S
        old = [key for key, track in self.tracks.items() if 0 < track.answered_s < before_s]
        for key in old:
            del self.tracks[key]
        for cluster in {cluster for _, cluster in old if cluster is not None}:
            if not any(each == cluster for _, each in self.tracks):
                self._clusters.remove(cluster)

    def _change(
        self, kind: Literal["doubtful", "recovered", "retraining"], tier: str, cluster: int | None, track: Track
    ) -> Change:
        num_good, num = track.share(WINDOWS[0])
        return Change(kind, tier, cluster, num_good, num, track.usual)


def pack(vector: Vector) -> str:
    """Base64 of FP16, little-endian."""
    return base64.b64encode(vector.astype("<f2").tobytes()).decode()


def unpack(text: str) -> Vector:
    """A unit vector; raises `ValueError` for what `pack` did not write."""
    try:
        vector = np.frombuffer(base64.b64decode(text, validate=True), "<f2").astype(np.float32)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"vector: not base64 of FP16 numbers ({error})") from error
    length = float(np.linalg.norm(vector)) if len(vector) else 0.0
    if not 0.5 < length < 2:
        raise ValueError("vector: not of length 1")
    unit: Vector = vector / np.float32(length)
    return unit


def _keep(tier: str, cluster: int | None, track: Track) -> Kept:
    return Kept(
        tier=tier,
        cluster=cluster,
        num_usual=track.num_usual,
        usual_good=track.usual_good,
        latest="".join(str(int(good)) for good in track.latest),
        num_fresh=track.num_fresh,
        is_doubtful=track.is_doubtful,
        num_until_call=track.num_until_call,
        answered_s=track.answered_s,
    )


def _unkeep(kept: Kept) -> Track:
    max_usual = NUM_USUAL_OF_TIER if kept.cluster is None else NUM_USUAL_OF_CLUSTER
    fields: dict[str, Any] = kept.model_dump(exclude={"tier", "cluster", "latest"})
    fields["num_usual"] = min(kept.num_usual, max_usual)
    fields["usual_good"] = min(kept.usual_good, fields["num_usual"])
    fields["num_fresh"] = min(kept.num_fresh, len(kept.latest))
    track = Track(max_usual, **fields)
    track.latest.extend(each == "1" for each in kept.latest)
    return track
