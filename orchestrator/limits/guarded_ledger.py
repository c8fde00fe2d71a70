"""A shared ledger that may be gone: bounded, counted, and with a rule for every quota.

* A key with a daily sum of money is refused (503): money that was spent twice does not come back.
* What a request did not take is refunded when the store is back, if that is soon.
* All others go on against a ledger in this process, from what the store said last: a minute's quota is then each
  orchestrator's own, at worst as many times the limit as there are orchestrators, and answers do not need the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from orchestrator.errors import LimitsUnavailableError
from orchestrator.limits.ledger import Amount, Ledger, MemoryLedger, Quota, Reserved

log = logging.getLogger("orchestrator.limits")
T = TypeVar("T")

# A thousand times what a script takes on a local network: a busy machine must not look like a dead store. One that is
# really dead refuses at once.
STORE_TIMEOUT_S = 1.0
# After a failure the store is left alone for so long, so that a dead one costs a request now and then the timeout.
PAUSE_S = 1.0
# So many settlements wait for the store, each for so long; what is given up stays as it was reserved.
MAX_UNSETTLED = 10_000
SETTLE_WITHIN_S = 60.0


class _Unsettled(NamedTuple):
    account: str
    reserved: Reserved
    change: Amount
    ends_at_s: float


class GuardedLedger:
    """`num_errors` counts what the store failed to do."""

    def __init__(
        self, store: Ledger, *, timeout_s: float = STORE_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_errors = 0
        self._store = store
        self._local = MemoryLedger()
        self._timeout_s = timeout_s
        self._clock = clock
        self._paused_until_s = 0.0
        self._unsettled: deque[_Unsettled] = deque(maxlen=MAX_UNSETTLED)
        self._settling: asyncio.Task[None] | None = None

    async def reserve(self, account: str, quota: Quota, amount: Amount) -> Reserved:
        """Raises `LimitsUnavailableError` when the store is gone and money would have to be counted."""
        reserved = await self._ask(lambda: self._store.reserve(account, quota, amount))
        if reserved is not None:
            self._local.adopt(account, reserved.fields)
            return reserved
        if quota.nano_usd is not None:
            raise LimitsUnavailableError(
                "the store of limits cannot be reached, and this key's budget is counted there; try again later",
                headers={"retry-after": "1"},
            )
        return (await self._local.reserve(account, quota, amount))._replace(is_local=True)

    async def settle(self, account: str, reserved: Reserved, change: Amount) -> None:
        """What cannot be said to the store now is said later; until then it stays as reserved, never too little."""
        if reserved.is_local:
            await self._local.settle(account, reserved, change)
            return
        settlement = _Unsettled(account, reserved, change, self._clock() + SETTLE_WITHIN_S)
        if not await self._tell(settlement):
            self._unsettled.append(settlement)
            if self._settling is None or self._settling.done():
                self._settling = asyncio.create_task(self._settle_rest())

    async def close(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait({self._settling})
        await self._store.close()

    async def _settle_rest(self) -> None:
        while self._unsettled:
            await asyncio.sleep(PAUSE_S)
            while self._unsettled:
                settlement = self._unsettled.popleft()
                if settlement.ends_at_s >= self._clock() and not await self._tell(settlement):
                    self._unsettled.appendleft(settlement)
                    break

    async def _tell(self, settlement: _Unsettled) -> bool:
        account, reserved, change, _ = settlement

        async def settle() -> bool:
            await self._store.settle(account, reserved, change)
            return True

        return await self._ask(settle) or False

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """None when the store does not answer."""
        if self._clock() < self._paused_until_s:
            return None
        try:
            return await asyncio.wait_for(ask(), self._timeout_s)
        except Exception as error:  # whatever a client raises about its connection
            self.num_errors += 1
            self._paused_until_s = self._clock() + PAUSE_S
            log.error("the store of limits failed: %s", type(error).__name__)  # its text may hold the store's address
            return None
