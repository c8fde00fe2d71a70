"""Clusters of questions, found while they come: leader clustering by cosine, with leaders that follow their cluster.

A question belongs to the nearest leader if that is near enough, else it leads a cluster of its own. There are at most
`MAX_CLUSTERS`; a new one takes the place of the one that was asked least of late, so that what is asked once passes
through and what is asked again and again stays.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

MAX_CLUSTERS = 128
# How near (a cosine) a question must be to a leader. Chosen by `python -m perf quality`, see its README.
MIN_SIMILARITY = 0.35
# A leader is the mean of about so many of its questions, the latest most.
_MEMORY = 50
# After so many questions all counts are halved: what was asked long ago makes room.
_HALF_LIFE = 2000


class Clusters:
    """`leaders` are unit vectors by cluster id; ids are never used twice."""

    def __init__(self, min_similarity: float = MIN_SIMILARITY, max_clusters: int = MAX_CLUSTERS) -> None:
        self.leaders: dict[int, Vector] = {}
        self.counts: dict[int, float] = {}
        self.next_id = 0
        self.num_questions = 0
        self._min_similarity = min_similarity
        self._max_clusters = max_clusters
        self._ids: list[int] = []
        self._matrix: Vector | None = None  # rows as `_ids`

    def find(self, vector: Vector) -> int | None:
        """The cluster of a question by its unit vector, FP32 [dimensions]; None for one of none."""
        if self._matrix is None:
            if not self.leaders:
                return None
            self._ids = list(self.leaders)
            self._matrix = np.stack([self.leaders[each] for each in self._ids])
        if self._matrix.shape[1] != len(vector):
            return None
        similarities = self._matrix @ vector
        best = int(similarities.argmax())
        return self._ids[best] if similarities[best] >= self._min_similarity else None

    def add(self, vector: Vector, kept: Collection[int] = ()) -> tuple[int, int | None]:
        """The cluster that a question is in from now on, and the one that had to go for it.

        Those `kept` stay, unless all are.
        """
        self.num_questions += 1
        if self.num_questions % _HALF_LIFE == 0:
            self.counts = {each: count / 2 for each, count in self.counts.items()}
        found, gone = self.find(vector), None
        if found is None:
            if len(self.leaders) >= self._max_clusters:
                gone = min(self.leaders, key=lambda each: (each in kept, self.counts[each], each))
                self.remove(gone)
            found = self.next_id
            self.next_id += 1
            self.leaders[found], self.counts[found] = vector.astype(np.float32), 0.0
        self.counts[found] += 1
        weight = 1 / min(self.counts[found], _MEMORY)
        moved = (1 - weight) * self.leaders[found] + weight * vector
        self.leaders[found] = (moved / max(float(np.linalg.norm(moved)), 1e-9)).astype(np.float32)
        self._matrix = None
        return found, gone

    def remove(self, cluster: int) -> None:
        del self.leaders[cluster], self.counts[cluster]
        self._matrix = None
