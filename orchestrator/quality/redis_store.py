"""Samples and state in Redis, shared by the servers that watch the same tiers.

    triton-realtime:quality:1:<what is watched>:samples   a stream: tier, vector (FP16), good, at
    triton-realtime:quality:1:<what is watched>:state     a hash: state (JSON), and the id of the last sample in it

A state and its id belong together, so it does not matter whose is saved last: the samples behind it are in the stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis

from orchestrator.quality.monitor import Sample, State, pack, unpack
from orchestrator.quality.store import parse_state

_PREFIX = "triton-realtime:quality:1:"
# Far more than come between two saves.
_MAX_SAMPLES = 5000
_MAX_RECEIVED = 500
_TIMEOUT_S = 2.0


class RedisStore:
    """Raises what the client raises (`redis.RedisError`, `OSError`), and `asyncio.TimeoutError`."""

    def __init__(self, url: str, fingerprints: Mapping[str, str], keep_days: float) -> None:
        """`url` as redis-py takes it, else `ValueError` is raised; nothing is sent before the first call."""
        pool = BlockingConnectionPool.from_url(url, max_connections=2, timeout=None)
        self._redis: Any = Redis.from_pool(pool)
        watched = hashlib.sha256(json.dumps(dict(fingerprints), sort_keys=True).encode()).hexdigest()[:16]
        self._samples, self._state = (f"{_PREFIX}{watched}:{name}" for name in ("samples", "state"))
        self._keep_s = max(1, int(keep_days * 86400))
        self._last_id = "0"

    async def load(self) -> State | None:
        held = await self._do(self._redis.hgetall(self._state))
        state = parse_state(held[b"state"], self._state) if held.get(b"state") and held.get(b"id") else None
        if state is not None:
            self._last_id = held[b"id"].decode()
        return state

    async def share(self, sample: Sample) -> None:
        fields = {
            "tier": sample.tier,
            "vector": "" if sample.vector is None else pack(sample.vector),
            "good": int(sample.is_good),
            "at": sample.at_s,
        }
        await self._do(self._redis.xadd(self._samples, fields, maxlen=_MAX_SAMPLES, approximate=True))
        await self._do(self._redis.expire(self._samples, self._keep_s))

    async def receive(self) -> list[Sample]:
        found = []
        rows = await self._do(self._redis.xrange(self._samples, min=f"({self._last_id}", count=_MAX_RECEIVED))
        for row_id, fields in rows:
            self._last_id = row_id.decode()
            try:
                vector = unpack(fields[b"vector"].decode()) if fields[b"vector"] else None
                found.append(Sample(fields[b"tier"].decode(), vector, fields[b"good"] == b"1", float(fields[b"at"])))
            except (KeyError, ValueError):
                continue  # not ours; it is over all the same
        return found

    async def save(self, state: State) -> None:
        await self._do(self._redis.hset(self._state, mapping={"state": state.model_dump_json(), "id": self._last_id}))
        await self._do(self._redis.expire(self._state, self._keep_s))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _do(self, command: Any) -> Any:
        return await asyncio.wait_for(command, _TIMEOUT_S)
