"""Whose call it is, and whether the quotas have room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.call import Call
from orchestrator.config import Tier
from orchestrator.errors import (
    ApiError,
    BudgetError,
    DeadlineError,
    LimitsUnavailableError,
    NotAllowedError,
    OverloadedError,
    RateLimitError,
    UnauthorizedError,
    shorten,
)
from orchestrator.limits.guarded_ledger import GuardedLedger
from orchestrator.limits.keys import EVERYBODY, Key, Keyring
from orchestrator.limits.ledger import WINDOW_S, Amount, Ledger, MemoryLedger, Quota, Reserved, Standing

AUTHORIZATION = "authorization"
_REFUSALS = (
    UnauthorizedError,
    NotAllowedError,
    RateLimitError,
    BudgetError,
    OverloadedError,
    DeadlineError,
    LimitsUnavailableError,
)
_NAMES = {"r": "requests", "t": "tokens"}


class Gate:
    """Without a keyring everybody is one tenant and may do everything. `refusals` are counted by their error's code."""

    def __init__(self, keyring: Keyring | None = None, ledger: Ledger | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self._keyring = keyring
        self._ledger = ledger or MemoryLedger()

    @property
    def num_store_errors(self) -> int:
        """What the shared store failed to do; 0 without one."""
        return self._ledger.num_errors if isinstance(self._ledger, GuardedLedger) else 0

    def identify(self, call: Call) -> Key:
        """By the header `authorization` and nothing else; raises `UnauthorizedError`."""
        return EVERYBODY if self._keyring is None else self._keyring.find(call.parameters.get(AUTHORIZATION))

    def may_keep_text(self, tenant: str) -> bool:
        """Whether a tenant's text may be kept, by the keys that it has now."""
        return EVERYBODY.keep_text if self._keyring is None else self._keyring.may_keep_text(tenant)

    def count(self, error: ApiError) -> None:
        """Note that a request ended with `error`, if it was for a limit."""
        if isinstance(error, _REFUSALS):
            self.refusals[error.code] += 1

    async def reserve(self, key: Key, amount: Amount) -> Permit:
        """Room for `amount`, the most that the request may take.

        Raises `RateLimitError` or `BudgetError`, with the headers that say when to come again, and
        `LimitsUnavailableError`.
        """
        _, permit = await self.reserve_first(key, [amount])
        return permit

    async def reserve_first(self, key: Key, amounts: Sequence[Amount]) -> tuple[int, Permit]:
        """Room for the first of `amounts`, from large to small, that there is room for, and which it is.

        Raises as `reserve` does, for the last one that was tried.
        """
        quota = Quota.of(key)
        if quota == Quota():
            return 0, Permit(None, key.id, amounts[0], None, {})
        for place, amount in enumerate(amounts):
            reserved = await self._ledger.reserve(key.id, quota, amount)
            standing = Standing(quota, reserved)
            if reserved.granted:
                return place, Permit(self._ledger, key.id, amount, reserved, standing.headers())
            # Of requests none of them asks for less.
            if place == len(amounts) - 1 or standing.find_lack(amount) == "r":
                raise _refusal(key, quota, standing, amount)
        raise ValueError("amounts: empty; at least one is needed")

    async def close(self) -> None:
        await self._ledger.close()


class Permit:
    """A granted reservation. `headers` are the answer's. Settled once; what comes after that changes nothing."""

    def __init__(
        self, ledger: Ledger | None, account: str, amount: Amount, reserved: Reserved | None, headers: Mapping[str, str]
    ) -> None:
        self.headers = headers
        self._ledger = ledger
        self._account = account
        self._amount = amount
        self._reserved = reserved

    async def settle(self, used: Amount) -> None:
        """What the request really took takes the reservation's place."""
        ledger, self._ledger = self._ledger, None
        change = used.minus(self._amount)
        if ledger is not None and self._reserved is not None and change != Amount():
            await ledger.settle(self._account, self._reserved, change)


class Price(NamedTuple):
    """Dollars for a million tokens, which are thousands of billionths for one."""

    input: float
    output: float

    def nano_usd(self, input_tokens: int, output_tokens: int) -> int:
        return round(1000 * (input_tokens * self.input + output_tokens * self.output))


def price_of(tier: Tier) -> Price:
    return Price(tier.input_price_per_million_tokens, tier.output_price_per_million_tokens)


def counts_tokens(key: Key) -> bool:
    """Whether a request's tokens have to be known before it runs."""
    return key.tokens_per_minute is not None or key.usd_per_day is not None


def may_use(key: Key, name: str) -> bool:
    """Whether the key allows the tier, "embedding", "ocr", "stt" or "tts"."""
    return key.tiers is None or name in key.tiers


def not_allowed(key: Key, name: str) -> NotAllowedError:
    return NotAllowedError(
        f"model: this key may not use {shorten(name)}; it may use {', '.join(key.tiers or ())}", param="model"
    )


def _refusal(key: Key, quota: Quota, standing: Standing, amount: Amount) -> RateLimitError | BudgetError:
    kind = standing.find_lack(amount) or "r"  # a store counts by its own clock: what lacked may be there by now
    asked = {"r": amount.requests, "t": amount.tokens, "m": amount.nano_usd}[kind]
    after_s = standing.retry_after_s(kind, asked)
    # What can never fit is not to be tried again at all; who does not know that header shall at least wait.
    retry = {} if after_s is not None else {"x-should-retry": "false"}
    headers = {"retry-after": str(after_s or WINDOW_S), **retry, **standing.headers()}
    if kind == "m":
        limit, spent = (quota.nano_usd or 0) / 1e9, standing.used("m") / 1e9
        return BudgetError(
            f"this key may spend {limit:g} USD a day; {spent:.6f} are spent or reserved, and this request may cost "
            f"{asked / 1e9:.6f}; " + ("wait for the next day (UTC)" if after_s else "ask for less"),
            headers={**headers, "x-should-retry": "false"},
        )
    limit = (quota.requests if kind == "r" else quota.tokens) or 0
    if after_s is None:
        return RateLimitError(
            f"this request may take {asked} tokens, and this key has {limit} in a minute; "
            "shorten the prompt or lower max_tokens",
            headers=headers,
        )
    return RateLimitError(
        f"this key has {limit} {_NAMES[kind]} in {WINDOW_S} s, {standing.used(kind)} are used or reserved, and this "
        f"request may take {asked}; try again in {after_s} s",
        headers=headers,
    )
