"""The vectors of one partition: all compared while they are few, by an HNSW graph (usearch) once they are many."""

from __future__ import annotations

from collections.abc import KeysView
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import simsimd

Vector = npt.NDArray[np.float32]

# From here on comparing all costs more than the graph (measured: 1,000 rows of 384 take 0.1 ms, 2,000 up to 0.9 ms).
GRAPH_FROM = 2_000
# A graph is built on the side, so many rows with each that comes: half a second at once would hold up every stream.
ROWS_PER_ADD = 16
# HNSW's M, efConstruction and efSearch: of the 8 nearest of 20,000 mixtures of real questions 97 % are found, by
# 32 instead of 64 96 % in half the time. `python -m perf cache-lookup` measures it.
CONNECTIVITY = 16
EXPANSION_ADD = 128
EXPANSION_SEARCH = 64
# What was removed from a graph keeps its place there and is found, so more are asked for: this many times.
_SPARE = 4


class VectorIndex:
    """Unit vectors of `num_dims`, each under a key of its own; similarity is the cosine."""

    def __init__(self, num_dims: int) -> None:
        self._num_dims = num_dims
        self._all: _Rows | _Graph = _Rows(num_dims)
        self._next: _Graph | None = None  # takes the place of `_all` when it has all
        self._not_in_next: dict[str, None] = {}  # in order

    def __len__(self) -> int:
        return len(self._all.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._all.keys

    def add(self, key: str, vector: Vector) -> None:
        """Raises `ValueError` for a key that is there already."""
        if key in self:
            raise ValueError(f"key: {key!r} is in the index; remove it first")
        self._all.add(key, vector)
        if self._next is not None:
            self._not_in_next[key] = None
        elif len(self) > GRAPH_FROM and (isinstance(self._all, _Rows) or self._all.is_worn):
            self._next, self._not_in_next = _Graph(self._num_dims), dict.fromkeys(self._all.keys)
        self._build_further()

    def remove(self, key: str) -> None:
        """Raises `KeyError` for a key that is not there."""
        self._all.remove(key)
        if key in self._not_in_next:
            del self._not_in_next[key]
        elif self._next is not None:
            self._next.remove(key)
        if isinstance(self._all, _Graph) and self._all.is_worn and len(self) <= GRAPH_FROM:
            rows = _Rows(self._num_dims)
            for left in self._all.keys:
                rows.add(left, self._all.vector(left))
            self._all, self._next, self._not_in_next = rows, None, {}

    def nearest(self, vector: Vector, num: int) -> list[tuple[str, float]]:
        """Up to `num` keys with their similarities, nearest first."""
        return self._all.nearest(vector, num) if len(self) else []

    def _build_further(self) -> None:
        if self._next is None:
            return
        for key in list(islice(self._not_in_next, ROWS_PER_ADD)):
            self._next.add(key, self._all.vector(key))
            del self._not_in_next[key]
        if not self._not_in_next:
            self._all, self._next = self._next, None


class _Rows:
    """All are compared."""

    def __init__(self, num_dims: int) -> None:
        self._rows: Vector = np.zeros((1, num_dims), np.float32)
        self._keys: list[str] = []  # of the rows in use
        self._places: dict[str, int] = {}  # a key's row

    @property
    def keys(self) -> KeysView[str]:
        return self._places.keys()

    def vector(self, key: str) -> Vector:
        row: Vector = self._rows[self._places[key]]
        return row

    def add(self, key: str, vector: Vector) -> None:
        if len(self._keys) == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._places[key] = len(self._keys)
        self._rows[len(self._keys)] = vector
        self._keys.append(key)

    def remove(self, key: str) -> None:
        place = self._places.pop(key)
        last = self._keys.pop()  # takes the free row
        if last != key:
            self._rows[place] = self._rows[len(self._keys)]
            self._keys[place] = last
            self._places[last] = place

    def nearest(self, vector: Vector, num: int) -> list[tuple[str, float]]:
        # Not `@`: BLAS takes threads for it, which wait for each other on a busy machine (p95 5 ms instead of 0.3).
        similarities = np.asarray(simsimd.cdist(vector[None], self._rows[: len(self._keys)], "dot")).reshape(-1)
        order = np.argsort(-similarities, kind="stable")[:num]
        return [(self._keys[place], float(similarities[place])) for place in order]


class _Graph:
    """An HNSW graph."""

    def __init__(self, num_dims: int) -> None:
        from usearch.index import Index  # loaded only by whoever has that many

        self._graph: Any = Index(
            ndim=num_dims,
            metric="ip",
            dtype="f32",
            connectivity=CONNECTIVITY,
            expansion_add=EXPANSION_ADD,
            expansion_search=EXPANSION_SEARCH,
        )
        self._keys: dict[int, str] = {}
        self._numbers: dict[str, int] = {}  # a key's number in the graph
        self._num_added = 0

    @property
    def is_worn(self) -> bool:
        """More than half of what it was given has been removed."""
        return self._num_added > 2 * len(self._numbers)

    @property
    def keys(self) -> KeysView[str]:
        return self._numbers.keys()

    def vector(self, key: str) -> Vector:
        row: Vector = self._graph.get(self._numbers[key]).reshape(-1)
        return row

    def add(self, key: str, vector: Vector) -> None:
        self._graph.add(self._num_added, vector, threads=1)
        self._keys[self._num_added] = key
        self._numbers[key] = self._num_added
        self._num_added += 1

    def remove(self, key: str) -> None:
        number = self._numbers.pop(key)
        del self._keys[number]
        self._graph.remove(number)

    def nearest(self, vector: Vector, num: int) -> list[tuple[str, float]]:
        num_live = len(self._numbers)
        num_asked = num if num_live == self._num_added else _SPARE * num * self._num_added // num_live
        found = self._graph.search(vector, num_asked)
        live = (
            (self._keys[int(number)], 1.0 - float(distance))
            for number, distance in zip(found.keys, found.distances)
            if int(number) in self._keys
        )
        return list(islice(live, num))
