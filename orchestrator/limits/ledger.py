"""What a key has used of its quotas, reserved before a request runs and corrected when it has ended.

Requests and tokens count for a minute in a sliding window of one-second slots: a reservation lies in the slot of its
second and leaves with it, 60 to 61 s later, so that no 60 s ever hold more than the limit. (A token bucket of the same
limit lets twice as much through in its first minute.) Money counts by the day, UTC. A correction goes to the slot of
its reservation: a request counts when it was admitted, as OpenAI counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from orchestrator.limits.keys import Key

WINDOW_S = 60
DAY_S = 86400
NANO_PER_USD = 10**9

# What is used, by field: "r:<second>" requests, "t:<second>" tokens, "m:<day>" billionths of a dollar.
Fields = Mapping[str, int]
_KINDS = ("r", "t", "m")


class Amount(NamedTuple):
    """What a request takes. `nano_usd` are billionths of a dollar: whole, so that sums are exact."""

    requests: int = 0
    tokens: int = 0
    nano_usd: int = 0

    def minus(self, other: Amount) -> Amount:
        return Amount(*(mine - its for mine, its in zip(self, other)))


class Quota(NamedTuple):
    """The most that may be used: requests and tokens in a minute, money in a day. None: no limit."""

    requests: int | None = None
    tokens: int | None = None
    nano_usd: int | None = None

    @classmethod
    def of(cls, key: Key) -> Quota:
        money = None if key.usd_per_day is None else round(key.usd_per_day * NANO_PER_USD)
        return cls(key.requests_per_minute, key.tokens_per_minute, money)


class Reserved(NamedTuple):
    """The answer of a ledger: whether there was room, its time, and what is used, with the reservation if there was.

    `is_local` says that a stand-in made it, since the store was gone. By its `name` a shared store knows whether it was
    settled already.
    """

    granted: bool
    now_s: float
    fields: Fields
    is_local: bool = False
    name: str = ""


class Ledger(Protocol):
    """Where the quotas are kept."""

    async def reserve(self, account: str, quota: Quota, amount: Amount) -> Reserved:
        """All of `amount`, or nothing of it: what is used never passes `quota`. Atomic."""

    async def settle(self, account: str, reserved: Reserved, change: Amount) -> None:
        """Add `change` (mostly negative) to a granted reservation; nothing when its time is over."""

    async def close(self) -> None: ...


def is_live(field: str, now_s: float) -> bool:
    """Whether what is used in `field` still counts."""
    kind, _, at = field.partition(":")
    return int(at) >= int(now_s) // DAY_S if kind == "m" else int(now_s) - int(at) <= WINDOW_S


def fields_at(now_s: float) -> tuple[str, str, str]:
    """Where a reservation of this moment goes: requests, tokens, money."""
    second = int(now_s)
    return f"r:{second}", f"t:{second}", f"m:{second // DAY_S}"


class Standing:
    """How one key stands, for people and for headers."""

    def __init__(self, quota: Quota, reserved: Reserved) -> None:
        self._quota = quota
        self._now_s = reserved.now_s
        self._slots = {
            kind: sorted(
                (int(field[2:]), used) for field, used in reserved.fields.items() if field.startswith(kind) and used > 0
            )
            for kind in _KINDS
        }

    def used(self, kind: str) -> int:
        return sum(used for _, used in self._slots[kind])

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` as OpenAI names them; for limits that there are."""
        found = {}
        for kind, name, limit in (("r", "requests", self._quota.requests), ("t", "tokens", self._quota.tokens)):
            if limit is not None:
                last = self._slots[kind][-1][0] if self._slots[kind] else None
                found[f"x-ratelimit-limit-{name}"] = str(limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - self.used(kind)))
                found[f"x-ratelimit-reset-{name}"] = f"{0 if last is None else self._left_s(last)}s"
        return found

    def find_lack(self, amount: Amount) -> str | None:
        """The first of "r", "t" and "m" that has no room for `amount`."""
        for kind, limit, asked in zip(_KINDS, self._quota, amount):
            if limit is not None and self.used(kind) + asked > limit:
                return kind
        return None

    def retry_after_s(self, kind: str, asked: int) -> int | None:
        """When there is room for `asked`, in whole seconds, if nobody else comes; None: never."""
        limit = self._quota[_KINDS.index(kind)]
        if limit is None or asked > limit:
            return None
        if kind == "m":
            return max(1, math.ceil(DAY_S - self._now_s % DAY_S))
        used = self.used(kind)
        for second, amount in self._slots[kind]:
            used -= amount
            if used + asked <= limit:
                return self._left_s(second)
        return 1

    def _left_s(self, second: int) -> int:
        return max(1, math.ceil(second + WINDOW_S + 1 - self._now_s))


class MemoryLedger:
    """For one process and one event loop: nothing is awaited within a call, so each is atomic."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._clock = clock
        self._accounts: dict[str, dict[str, int]] = {}  # one for each key that was used

    async def reserve(self, account: str, quota: Quota, amount: Amount) -> Reserved:
        now_s = self._clock()
        fields = {
            field: used for field, used in self._accounts.get(account, {}).items() if used and is_live(field, now_s)
        }
        lack = Standing(quota, Reserved(False, now_s, fields)).find_lack(amount)
        if lack is None:
            for field, part in zip(fields_at(now_s), amount):
                if part:
                    fields[field] = fields.get(field, 0) + part
        self._accounts[account] = fields
        return Reserved(lack is None, now_s, dict(fields))

    async def settle(self, account: str, reserved: Reserved, change: Amount) -> None:
        fields = self._accounts.get(account, {})
        for field, part in zip(fields_at(reserved.now_s), change):
            if field in fields:
                fields[field] = max(0, fields[field] + part)

    def adopt(self, account: str, fields: Fields) -> None:
        """From now on this is what is used."""
        self._accounts[account] = dict(fields)

    async def close(self) -> None:
        pass
