"""Quotas that several orchestrators share, in Redis: a hash for each key, changed by one script a call.

All three limits are looked at and taken in the same script, on the server's clock: no orchestrator can come between.
"""

from __future__ import annotations

import secrets
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis

from orchestrator.limits.ledger import DAY_S, WINDOW_S, Amount, Quota, Reserved, fields_at

_MAX_CONNECTIONS = 4
# Changes with the layout of the hashes, so that two versions on one Redis do not misread each other.
_PREFIX = "triton-realtime:limits:1:"

# KEYS: the hash. ARGV: the limits ('' for none) and the amounts of requests, tokens and money.
_RESERVE = f"""
local time = redis.call('TIME')
local now = tonumber(time[1])
local today = math.floor(now / {DAY_S})
local used = {{r = 0, t = 0, m = 0}}
local held = redis.call('HGETALL', KEYS[1])
for i = 1, #held, 2 do
  local kind, at = held[i]:sub(1, 1), tonumber(held[i]:sub(3))
  if (kind == 'm' and at >= today) or (kind ~= 'm' and now - at <= {WINDOW_S}) then
    used[kind] = used[kind] + tonumber(held[i + 1])
  else
    redis.call('HDEL', KEYS[1], held[i])
  end
end
local granted = 1
for i, kind in ipairs({{'r', 't', 'm'}}) do
  local limit = tonumber(ARGV[i])
  if limit and used[kind] + tonumber(ARGV[i + 3]) > limit then granted = 0 end
end
if granted == 1 then
  for i, field in ipairs({{'r:' .. time[1], 't:' .. time[1], 'm:' .. today}}) do
    if ARGV[i + 3] ~= '0' then redis.call('HINCRBY', KEYS[1], field, ARGV[i + 3]) end
  end
  redis.call('EXPIRE', KEYS[1], {DAY_S + WINDOW_S})
end
return {{granted, time[1], time[2], redis.call('HGETALL', KEYS[1])}}
"""

# How long it is known that a reservation was settled: longer than anybody tries to, having lost the answer.
_SETTLED_S = 180

# KEYS: the hash, the mark. ARGV: three fields, and what to add to each if it is there. Once for a mark.
_SETTLE = f"""
if not redis.call('SET', KEYS[2], 1, 'NX', 'EX', {_SETTLED_S}) then return end
for i = 1, 3 do
  if ARGV[i + 3] ~= '0' and redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    if redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 3]) < 0 then redis.call('HSET', KEYS[1], ARGV[i], 0) end
  end
end
"""


class RedisLedger:
    """Raises what the client raises (`redis.RedisError`, `OSError`); see `GuardedLedger`. For one event loop."""

    def __init__(self, url: str) -> None:
        """`url` as redis-py takes it: redis://, rediss:// or unix://. Nothing is sent before the first call."""
        # A burst takes turns on few connections: to open one takes longer than a hundred scripts.
        # No retries: a reservation whose reply was lost would be made twice.
        pool = BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=None, retry=None, retry_on_error=[]
        )
        self._redis: Any = Redis.from_pool(pool)
        self._reserve = self._redis.register_script(_RESERVE)
        self._settle = self._redis.register_script(_SETTLE)

    async def reserve(self, account: str, quota: Quota, amount: Amount) -> Reserved:
        limits = ["" if limit is None else limit for limit in quota]
        granted, seconds, micros, held = await self._reserve(keys=[_PREFIX + account], args=[*limits, *amount])
        fields = {field.decode(): int(used) for field, used in zip(held[::2], held[1::2])}
        return Reserved(bool(granted), int(seconds) + int(micros) / 1e6, fields, name=secrets.token_hex(8))

    async def settle(self, account: str, reserved: Reserved, change: Amount) -> None:
        mark = f"{_PREFIX}settled:{reserved.name}"
        await self._settle(keys=[_PREFIX + account, mark], args=[*fields_at(reserved.now_s), *change])

    async def close(self) -> None:
        await self._redis.aclose()
