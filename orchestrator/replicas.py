"""The Tritons behind a front: which of them a request goes to, and which are well.

A conversation goes where its beginning is in the prefix cache: its key chooses an order of the replicas (rendezvous
hashing: with one more or less, only the keys of that one move), and the first that is not full takes it. Full is who
has 1.25 times the mean, by "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam, 2018). Everything
else goes to who has least to do.

A replica is well until a request is lost there, or it answers three probes badly; it is well again when it answers one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator.config import ConfigError
from orchestrator.contracts import ORCHESTRATOR_MODEL
from orchestrator.errors import ConnectionLostError
from orchestrator.infer_streams import InferStreams
from orchestrator.limits.client import Headers, LimitsClient, Place
from orchestrator.readiness import find_not_ready
from orchestrator.replica_set import FOLLOW_PERIOD_S, Address, ReplicaSet

log = logging.getLogger("orchestrator.replicas")

T = TypeVar("T")

# How far above the mean a replica may be before a conversation goes elsewhere.
LOAD_FACTOR = 1.25
PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 2.0
# A busy machine may answer late; one that is gone says so at once.
MAX_FAILURES = 3


class Replica:
    """One Triton, as this process knows it."""

    def __init__(self, address: Address, *, with_keys: bool) -> None:
        self.address = address
        self.streams = InferStreams(address.grpc_url, self.lose)
        self.limits = LimitsClient(self.streams, with_keys=with_keys)
        self.is_up = True
        self.on_change: Callable[[], None] = lambda: None
        self._num_failures = 0
        self._seed = hashlib.blake2b(address.name.encode(), digest_size=16).digest()

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def num_live(self) -> int:
        return self.streams.num_live

    def rank(self, key: bytes) -> bytes:
        """The higher, the sooner a request of `key` comes here."""
        return hashlib.blake2b(key, key=self._seed, digest_size=8).digest()

    def lose(self) -> None:
        """Somebody's connection broke, or could not be made: nothing new until a probe has succeeded."""
        self._tell(is_up=False)

    async def probe(self, engines: Mapping[str, str]) -> None:
        """Ask it, and its engines (as for `find_not_ready`), whether it is well."""
        stub = self.streams.stub
        try:
            request = service_pb2.ModelReadyRequest(name=ORCHESTRATOR_MODEL)
            is_ready = bool((await stub.ModelReady(request, timeout=PROBE_TIMEOUT_S)).ready)
            is_ready = is_ready and not await find_not_ready(stub, engines, ())
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._num_failures = MAX_FAILURES
            is_ready = False
        self._num_failures = 0 if is_ready else self._num_failures + 1
        if is_ready or self._num_failures >= MAX_FAILURES:
            self._tell(is_up=is_ready)

    def _tell(self, *, is_up: bool) -> None:
        if is_up != self.is_up:
            self.is_up = is_up
            log.warning("replica %s is %s", self.name, "well again" if is_up else "not well: it is asked nothing new")
            self.on_change()


class Replicas:
    """For one event loop; `close` it there."""

    def __init__(self, known: ReplicaSet, *, with_keys: bool = True) -> None:
        """`with_keys` says that the orchestrator has keys."""
        self.with_keys = with_keys
        self.engines: Mapping[str, str] = {}  # that a replica which is well answers with
        self._all: dict[str, Replica] = {}  # by address: another process in a replica's place is another one
        self._left: list[Replica] = []  # are in no set any more, and have not ended all they had
        self._probe_now = asyncio.Event()
        self._is_ending = False
        self._turn = itertools.count()
        self.update(known)

    def update(self, known: ReplicaSet) -> None:
        """From now on these are there, of which at least one serves or is about to."""
        self.known = known
        old, self._all = self._all, {}
        for address in known.replicas:
            replica = old.pop(address.grpc_url, None)
            if replica is None or (replica.address.state == "down" and address.state == "serving"):
                if replica is not None:  # started again where it was
                    self._left.append(replica)
                replica = Replica(address, with_keys=self.with_keys)
                replica.on_change = self._probe_now.set
            replica.address = address
            self._all[address.grpc_url] = replica
        self._left += old.values()
        self._serving = [replica for replica in self._all.values() if replica.address.state == "serving"]
        self._serving = self._serving or list(self._all.values())

    @property
    def serving(self) -> Sequence[Replica]:
        """Those that take requests, whether or not they are well; if none does, all."""
        return self._serving

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all.values())

    def choose(self, key: bytes | None = None, without: Replica | None = None) -> Replica:
        """For one request, that begins at once: with a `key` as the key says, else the one with least to do.

        If none is well, one that is not: it may be by now, and says best what is wrong.
        """
        if len(self._serving) == 1:
            return self._serving[0]
        able = [replica for replica in self._serving if replica.is_up and replica is not without]
        able = able or [replica for replica in self._serving if replica is not without]
        if key is None:
            first = next(self._turn) % len(able)  # of equals each in turn
            return min(able[first:] + able[:first], key=lambda replica: replica.num_live)
        num_live = 1 + sum(replica.num_live for replica in able)
        most = math.ceil(LOAD_FACTOR * num_live / len(able))
        free = (replica for replica in able if replica.num_live < most)
        return max(free, key=lambda replica: replica.rank(key))

    def another(self, lost: Replica, key: bytes | None = None) -> Replica | None:
        """For a request that `lost` cannot answer; None when there is no other that is well."""
        if len(self._serving) == 1 and self._serving[0] is lost:
            return None
        other = self.choose(key, without=lost)
        return other if other.is_up and other is not lost else None

    async def serve(
        self,
        place: Place,
        model: str,
        lengths: Sequence[int],
        headers: Headers,
        work: Callable[[Replica], Coroutine[Any, Any, T]],
    ) -> T:
        """As `LimitsClient.serve`, with place and `work` at one replica: at another one where the first is lost
        before the request's turn has come, when nothing was begun for it.
        """
        replica, has_begun = self.choose(), False

        async def begin(replica: Replica) -> T:
            nonlocal has_begun
            has_begun = True
            return await work(replica)

        headers = list(headers)
        try:
            return await replica.limits.serve(place, model, lengths, headers, partial(begin, replica))
        except ConnectionLostError:
            other = None if has_begun or place.reason is not None else self.another(replica)
            if other is None:
                raise
            place.outcome = "ok"
        return await other.limits.serve(place, model, lengths, headers, partial(begin, other))

    async def check(self, right: str, headers: Headers) -> None:
        """As `LimitsClient.check`."""
        replica = self.choose()
        headers = list(headers)
        try:
            await replica.limits.check(right, headers)
        except ConnectionLostError:
            other = self.another(replica)
            if other is None:
                raise
            await other.limits.check(right, headers)

    async def run(self, follow: Path | None = None, on_change: Callable[[Replicas], None] = lambda _: None) -> None:
        """Probe those that need it and, with a file to `follow`, update by it; until it is cancelled.

        `on_change` is called every `FOLLOW_PERIOD_S`, with what is there then.
        """
        probing = asyncio.create_task(self._probe())
        seen: object = None
        try:
            while True:
                if follow is not None and (stamp := _stamp(follow)) != seen:
                    seen = stamp
                    self._read(follow)
                for replica in self._all.values():
                    if replica.address.state != "serving":
                        await replica.streams.end_idle()
                for replica in [each for each in self._left if not each.num_live]:
                    self._left.remove(replica)
                    await replica.streams.close()
                on_change(self)
                await asyncio.sleep(FOLLOW_PERIOD_S)
        finally:
            # A probe that runs is waited for: Triton leaks a request that is cancelled as it ends.
            self._is_ending = True
            self._probe_now.set()
            await asyncio.wait([probing])

    def _read(self, path: Path) -> None:
        try:
            known = ReplicaSet.read(path)
        except (ConfigError, OSError) as error:  # what is known stays
            log.error("the set of replicas cannot be read: %s", error)
            return
        if known != self.known:
            self.update(known)

    async def _probe(self) -> None:
        """One alone that is well is left in peace: it gets every request anyway."""
        while not self._is_ending:
            if len(self._serving) > 1 or not self._serving[0].is_up:
                await asyncio.gather(*(replica.probe(self.engines) for replica in self._serving))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._probe_now.wait(), PROBE_PERIOD_S)
            self._probe_now.clear()

    async def close(self) -> None:
        for replica in (*self._all.values(), *self._left):
            await replica.streams.close()


def _stamp(path: Path) -> object:
    """What is another one when the file was replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
