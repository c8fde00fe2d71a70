"""The store in Redis 8, shared by every orchestrator that is told of it: entries as hashes, a vector set per partition.

Keys, all under `prefix` and the schema's version; parts are percent-encoded, so that no tenant can spell another's key:

    entry:TENANT:KEY               one answer: head (JSON), answer, vector (raw FP32), member; ends by itself
    vectors:TENANT:PARTITION:DIMS  the vector set of a partition, its elements are exact keys
    blocked:TENANT                 pairs said to be wrong, the oldest first
    invalidations                  what was invalidated, with when (s of the clock of whoever did it)
    used, ends, sizes              of TENANT:PARTITION:DIMS:KEY, an entry's member: when it was used last, when it ends
                                   (both ms of Redis's clock), its bytes; the field "" of sizes is their sum

Whatever changes more than one key is a script, so that several orchestrators never see half of it. Redis itself ends an
entry on time; what it leaves in the other keys goes at the next `put` or `nearest`, and all of it when the last entry
ends. One Redis, not a cluster: the scripts reach keys that they are not told of.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from time import time
from typing import Annotated, Any
from urllib.parse import quote
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from orchestrator.cache.key import Identity
from orchestrator.cache.store import MAX_REMEMBERED_INVALIDATIONS, Entry, Invalidated, Near, Selection, Size, Vector

log = logging.getLogger("orchestrator.cache")

# Raised by whoever changes what is written: entries of another version are not read.
SCHEMA = 1
# A command waits for a free one; more side by side than this help nobody, since Redis runs scripts one by one.
MAX_CONNECTIONS = 16
# Of the graph, when searching and building: the neighbours that it keeps in view. Of the 8 nearest of 20,000 mixtures
# of real questions 98 % are found (32: 95 %, 64: 96 %). Q8: without it a search took ten times as long, found 99 %,
# and took twice the memory.
SEARCH_EF = 100
BUILD_EF = 100
# Entries that ended and are cleaned up by one script at most, so that none takes long.
_MAX_PURGED = 32
_SCAN_COUNT = 500
# How long invalidations are remembered: no answer takes as long to be made.
_REMEMBERED_S = 24 * 3600
# By how much the clocks of those who share may differ.
_MAX_SKEW_S = 1.0

_COMMON = (
    """
local prefix = KEYS[1]
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + tonumber(t[2]) / 1000
end
local function forget(member)
  local space, tenant, dims, key = member:match('^(([^:]*):[^:]*:([^:]*)):(.*)$')
  if not space then return 0 end
  if dims ~= '0' then redis.call('VREM', prefix .. 'vectors:' .. space, key) end
  local entry = prefix .. 'entry:' .. tenant .. ':' .. key
  if redis.call('HGET', entry, 'member') == member then redis.call('DEL', entry) end
  local bytes = redis.call('HGET', prefix .. 'sizes', member)
  if bytes then
    redis.call('HINCRBY', prefix .. 'sizes', '', -bytes)
    redis.call('HDEL', prefix .. 'sizes', member)
    if redis.call('HLEN', prefix .. 'sizes') == 1 then redis.call('DEL', prefix .. 'sizes') end
  end
  redis.call('ZREM', prefix .. 'used', member)
  redis.call('ZREM', prefix .. 'ends', member)
  return tonumber(bytes or 0)
end
local function purge(now)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'ends', '-inf', now, 'LIMIT', 0, """
    + str(_MAX_PURGED)
    + """)) do
    forget(member)
  end
end
"""
)
# ARGV: tenant:key, member, space, key, head, answer, vector, bytes, max_bytes, ttl in ms, build EF, since when it must
# not have been invalidated (s or "+inf"), the last of these invalidations that is known not to concern it, or "".
# Returns the invalidations since if there is one that is not known; nothing is stored then.
_PUT = (
    _COMMON
    + """
local invalidations = redis.call('ZRANGEBYSCORE', prefix .. 'invalidations', ARGV[12], '+inf')
if #invalidations > 0 and invalidations[#invalidations] ~= ARGV[13] then return invalidations end
local now = now_ms()
purge(now)
local entry = prefix .. 'entry:' .. ARGV[1]
local old = redis.call('HGET', entry, 'member')
if old then forget(old) end
forget(ARGV[2])
local ttl = tonumber(ARGV[10])
if tonumber(ARGV[8]) > tonumber(ARGV[9]) or ttl <= 0 then return {} end
local vectors = prefix .. 'vectors:' .. ARGV[3]
if ARGV[7] ~= '' then redis.call('VADD', vectors, 'FP32', ARGV[7], ARGV[4], 'Q8', 'EF', ARGV[11]) end
redis.call('HSET', entry, 'head', ARGV[5], 'answer', ARGV[6], 'vector', ARGV[7], 'member', ARGV[2])
redis.call('PEXPIRE', entry, ttl)
redis.call('ZADD', prefix .. 'used', now, ARGV[2])
redis.call('ZADD', prefix .. 'ends', now + ttl, ARGV[2])
redis.call('HSET', prefix .. 'sizes', ARGV[2], ARGV[8])
local sum = redis.call('HINCRBY', prefix .. 'sizes', '', ARGV[8])
while sum > tonumber(ARGV[9]) do
  local first = redis.call('ZRANGE', prefix .. 'used', 0, 0)[1]
  if not first then break end
  sum = sum - forget(first)
end
for _, key in ipairs({vectors, prefix .. 'used', prefix .. 'ends', prefix .. 'sizes'}) do
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
end
return {}
"""
)
# ARGV: when, what; what to remember instead of too many; how many these are, and for how many s.
_REMEMBER = """
local key = KEYS[1] .. 'invalidations'
redis.call('ZREMRANGEBYSCORE', key, '-inf', ARGV[1] - ARGV[5])
if redis.call('ZCARD', key) >= tonumber(ARGV[4]) then
  redis.call('DEL', key)
  redis.call('ZADD', key, ARGV[1], ARGV[3])
end
redis.call('ZADD', key, ARGV[1], ARGV[2])
redis.call('EXPIRE', key, ARGV[5])
return 1
"""
# ARGV: space, tenant, vector, num, search EF. Returns {key, head, answer, vector} of each.
_NEAREST = (
    _COMMON
    + """
purge(now_ms())
local found = {}
local vectors = prefix .. 'vectors:' .. ARGV[1]
for _, key in ipairs(redis.call('VSIM', vectors, 'FP32', ARGV[3], 'COUNT', ARGV[4], 'EF', ARGV[5])) do
  local values = redis.call('HMGET', prefix .. 'entry:' .. ARGV[2] .. ':' .. key, 'head', 'answer', 'vector')
  if values[1] then
    found[#found + 1] = {key, values[1], values[2], values[3]}
  else
    forget(ARGV[1] .. ':' .. key)
  end
end
return found
"""
)
# ARGV: members. Returns how many of them there were, and their bytes.
_FORGET = (
    _COMMON
    + """
local num, bytes = 0, 0
for _, member in ipairs(ARGV) do
  local freed = forget(member)
  if freed > 0 then num, bytes = num + 1, bytes + freed end
end
return {num, bytes}
"""
)
# Returns the number of entries, and their bytes.
_SIZE = (
    _COMMON
    + """
purge(now_ms())
return {redis.call('ZCARD', prefix .. 'ends'), tonumber(redis.call('HGET', prefix .. 'sizes', '') or 0)}
"""
)
# ARGV: member
_TOUCH = _COMMON + "return redis.call('ZADD', prefix .. 'used', 'XX', now_ms(), ARGV[1])"
# ARGV: tenant:key, member, head, answer, blocked key, pair or "", max_blocked
_MARK_WRONG = (
    _COMMON
    + """
local values = redis.call('HMGET', prefix .. 'entry:' .. ARGV[1], 'head', 'answer')
if values[1] == ARGV[3] and values[2] == ARGV[4] then forget(ARGV[2]) end
if ARGV[6] ~= '' then
  redis.call('ZADD', prefix .. ARGV[5], now_ms(), ARGV[6])
  redis.call('ZREMRANGEBYRANK', prefix .. ARGV[5], 0, -ARGV[7] - 1)
end
return 1
"""
)


class _Head(BaseModel):
    """What an entry says beside its answer and vector, over both of which `crc32` is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    identity: Identity
    model: str
    stored_s: Annotated[float, Field(allow_inf_nan=False)]
    expires_s: Annotated[float, Field(allow_inf_nan=False)]
    num_dims: Annotated[int, Field(ge=0)]
    crc32: int


class CorruptEntryError(Exception):
    """What was read back is not what a store of this version writes."""


@dataclass
class RedisStore:
    """`max_bytes` bounds the entries of all who share `prefix`, `max_blocked` the pairs of each tenant.

    Raises redis-py's errors. An entry that cannot be read is removed, counted in `errors["corrupt"]`, and a miss.
    `clock` is the time of day in seconds, the same on all machines but for what NTP leaves.
    """

    client: Redis = field(repr=False)  # its repr may hold the password
    max_bytes: int
    max_blocked: int = 10_000
    prefix: str = "triton-realtime:cache"
    clock: Callable[[], float] = time
    errors: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._prefix = f"{self.prefix}:{SCHEMA}:"
        texts = (_PUT, _NEAREST, _FORGET, _SIZE, _TOUCH, _MARK_WRONG, _REMEMBER)
        self._scripts = {text: self.client.register_script(text) for text in texts}
        self._has_vector_sets = True
        self._preparing = asyncio.Lock()

    async def prepare(self) -> None:
        """Open all connections and load the scripts, each of which takes several times as long as a command.

        Finds out whether this Redis has vector sets; without, nothing is near anything.
        """
        async with self._preparing:  # two at once would wait for each other's connections
            client: Any = self.client
            await self._open_connections()
            async with self.client.pipeline(transaction=False) as pipeline:
                for text in self._scripts:
                    pipeline.script_load(text)
                await pipeline.execute()
            try:
                await client.execute_command("VSIM", self._prefix + "vectors:", "VALUES", 1, 1.0)
            except ResponseError as error:
                log.warning("this Redis has no vector sets (Redis 8 has): only exact repetitions are found: %s", error)
                self._has_vector_sets = False
            else:
                self._has_vector_sets = True

    async def _open_connections(self) -> None:
        pool: Any = self.client.connection_pool
        opened = []

        async def open_one() -> None:
            opened.append(await pool.get_connection())

        try:
            ends = await asyncio.gather(*(open_one() for _ in range(MAX_CONNECTIONS)), return_exceptions=True)
        finally:
            for connection in opened:
                await pool.release(connection)
        if not opened:  # a server that lets fewer in is one to work with
            raise next(end for end in ends if end is not None)

    async def get(self, identity: Identity) -> Entry | None:
        key = self._prefix + "entry:" + _join(identity.tenant, identity.exact_key)
        values: list[Any] = await self.client.hmget(key, ["head", "answer", "vector", "member"])
        head, answer, vector, member = values
        if values == [None] * 4:
            return None
        try:
            entry = _read(head, answer, vector)
            if entry.identity != identity:
                raise CorruptEntryError("identity")
        except CorruptEntryError:
            await self._drop_corrupt(key, member)
            return None
        return await self._if_live(entry)

    async def nearest(self, identity: Identity, vector: Vector, num: int) -> Sequence[Near]:
        """The set compares in 8 bits; the similarities are of the FP32 vectors."""
        if not self._has_vector_sets:
            return []
        space = _join(identity.tenant, identity.partition, str(len(vector)))
        tenant = _join(identity.tenant)
        found = await self._run(_NEAREST, space, tenant, _written(vector), num, SEARCH_EF)
        near = []
        for name, head, answer, stored in found:
            try:
                entry = _read(head, answer, stored)
                of_partition = (entry.identity.tenant, entry.identity.partition) == (
                    identity.tenant,
                    identity.partition,
                )
                if entry.vector is None or not of_partition:
                    raise CorruptEntryError("identity")
            except CorruptEntryError:
                key = name.decode(errors="surrogateescape")
                await self._drop_corrupt(f"{self._prefix}entry:{tenant}:{key}", f"{space}:{key}".encode())
                continue
            if await self._if_live(entry) is not None:
                near.append(Near(entry, float(entry.vector @ vector)))
        return sorted(near, key=lambda each: -each.similarity)

    async def put(self, entry: Entry, begun_s: float | None = None) -> None:
        """Store it in place of an entry of the same key; one that is larger than `max_bytes` is not stored."""
        known = b""
        while invalidations := await self._put(entry, begun_s, known):
            if any(_selection(each).has(entry, self.clock()) for each in invalidations):
                return
            known = invalidations[-1]

    async def _put(self, entry: Entry, begun_s: float | None, known: bytes) -> list[bytes]:
        if not self._has_vector_sets:
            entry = replace(entry, vector=None)
        identity = entry.identity
        vector = b"" if entry.vector is None else _written(entry.vector)
        invalidations: list[bytes] = await self._run(
            _PUT,
            _join(identity.tenant, identity.exact_key),
            _member(entry),
            _space(entry),
            _join(identity.exact_key),
            _head(entry),
            entry.answer,
            vector,
            entry.num_bytes,
            self.max_bytes,
            int((entry.expires_s - self.clock()) * 1000),
            BUILD_EF,
            "+inf" if begun_s is None else begun_s - _MAX_SKEW_S,
            known,
        )
        return invalidations

    async def touch(self, entry: Entry) -> None:
        await self._run(_TOUCH, _member(entry))

    async def is_blocked(self, identity: Identity, entry: Entry) -> bool:
        key = self._prefix + "blocked:" + _join(entry.identity.tenant)
        return await self.client.zscore(key, _pair(identity, entry)) is not None

    async def mark_wrong(self, asked: Identity, entry: Entry | None) -> None:
        """As `MemoryStore`: an answer that is wrong for its own question is evicted; the next one may be right."""
        entry = entry or await self.get(asked)
        if entry is None:
            return
        identity = entry.identity
        await self._run(
            _MARK_WRONG,
            _join(identity.tenant, identity.exact_key),
            _member(entry),
            _head(entry),
            entry.answer,
            "blocked:" + _join(identity.tenant),
            "" if asked.exact_key == identity.exact_key else _pair(asked, entry),
            self.max_blocked,
        )

    async def invalidate(self, selection: Selection, *, dry_run: bool) -> Invalidated:
        """Looks at every entry, some hundred at a time; Redis serves others in between.

        What is stored meanwhile may or may not be among what is looked at, but its making began afterwards.
        """
        if not dry_run:  # before anything is looked at, for who stores now
            everything = Selection(tenant=selection.tenant, everything=selection.tenant is None)
            what = (_written_selection(each) for each in (selection, everything))
            await self._run(_REMEMBER, self.clock(), *what, MAX_REMEMBERED_INVALIDATIONS, _REMEMBERED_S)
        num_entries = num_bytes = 0
        async for members in self._members(selection.tenant):
            chosen = [member for member, head in await self._heads(members) if self._has(selection, head)]
            if not chosen:
                continue
            if dry_run:
                sizes = [int(each) for each in await self.client.hmget(self._prefix + "sizes", chosen) if each]
                found = len(sizes), sum(sizes)
            else:
                found = await self._run(_FORGET, *chosen)
            num_entries, num_bytes = num_entries + found[0], num_bytes + found[1]
        return Invalidated(num_entries, num_bytes)

    async def size(self) -> Size:
        """Of all who share `prefix`. Cleans up what ended, so it is worth asking for now and then."""
        return Size(*await self._run(_SIZE))

    async def close(self) -> None:
        await self.client.aclose()

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._scripts[script](keys=[self._prefix], args=arguments)

    async def _if_live(self, entry: Entry) -> Entry | None:
        """Redis ends it by its own clock, which may run behind."""
        if self.clock() < entry.expires_s:
            return entry
        await self._run(_FORGET, _member(entry))
        return None

    async def _drop_corrupt(self, key: str, member: bytes | None) -> None:
        self.errors["corrupt"] += 1
        if member is not None and member.count(b":") == 3:
            await self._run(_FORGET, member)
        await self.client.delete(key)

    async def _members(self, tenant: str | None) -> AsyncIterator[list[bytes]]:
        """All entries' members, each once, in parts; with `tenant`, that one's."""
        pattern = None if tenant is None else _join(tenant) + ":*"  # percent-encoded: nothing in it is a wildcard
        scan = self.client.zscan_iter(self._prefix + "ends", match=pattern, count=_SCAN_COUNT)
        seen = {member async for member, _ in scan}  # a scan may name one twice
        members = iter(seen)
        while part := list(islice(members, _SCAN_COUNT)):
            yield part

    async def _heads(self, members: Sequence[bytes]) -> list[tuple[bytes, bytes | None]]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for member in members:
                tenant, _, _, key = member.split(b":")
                pipeline.hget((self._prefix + "entry:").encode() + tenant + b":" + key, "head")
            return list(zip(members, await pipeline.execute()))

    def _has(self, selection: Selection, head: bytes | None) -> bool:
        try:
            parsed = _Head.model_validate_json(head or b"")
        except ValidationError:
            return selection.everything  # ended, or nobody can say what it is
        entry = Entry(parsed.identity, b"", parsed.model, None, parsed.stored_s, parsed.expires_s)
        return selection.has(entry, self.clock())


def connect(url: str) -> Redis:
    """A client of `url` (redis://, rediss://, unix://) that connects when it is first used.

    A connection that Redis has closed is opened anew once; how long a call may take is up to the caller.
    """
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=None, retry=retry)
    return Redis.from_pool(pool)


def _join(*parts: str) -> str:
    return ":".join(quote(part, safe="", errors="surrogatepass") for part in parts)


def _space(entry: Entry) -> str:
    num_dims = 0 if entry.vector is None else len(entry.vector)
    return _join(entry.identity.tenant, entry.identity.partition, str(num_dims))


def _member(entry: Entry) -> str:
    return f"{_space(entry)}:{_join(entry.identity.exact_key)}"


def _pair(identity: Identity, entry: Entry) -> str:
    """The same for both directions: what is wrong for one is wrong for the other."""
    return _join(*sorted((identity.words_key, entry.identity.words_key)))


def _written_selection(selection: Selection) -> bytes:
    """Unlike any other: the same may be invalidated again."""
    return json.dumps([asdict(selection), uuid4().hex]).encode()


def _selection(written: bytes) -> Selection:
    return Selection(**json.loads(written)[0])


def _written(vector: Vector) -> bytes:
    return vector.astype("<f4", copy=False).tobytes()


def _head(entry: Entry) -> str:
    vector = b"" if entry.vector is None else _written(entry.vector)
    num_dims = 0 if entry.vector is None else len(entry.vector)
    return _Head(
        identity=entry.identity,
        model=entry.model,
        stored_s=entry.stored_s,
        expires_s=entry.expires_s,
        num_dims=num_dims,
        crc32=zlib.crc32(vector, zlib.crc32(entry.answer)),
    ).model_dump_json()


def _read(head: bytes | None, answer: bytes | None, vector: bytes | None) -> Entry:
    """Raises `CorruptEntryError` for anything but what `put` wrote."""
    if head is None or answer is None or vector is None:
        raise CorruptEntryError("a field is missing")
    try:
        parsed = _Head.model_validate_json(head)
    except ValidationError as error:
        raise CorruptEntryError("head") from error
    if len(vector) != 4 * parsed.num_dims or zlib.crc32(vector, zlib.crc32(answer)) != parsed.crc32:
        raise CorruptEntryError("answer or vector")
    row = np.frombuffer(vector, "<f4").astype(np.float32, copy=False) if parsed.num_dims else None
    return Entry(parsed.identity, answer, parsed.model, row, parsed.stored_s, parsed.expires_s)
