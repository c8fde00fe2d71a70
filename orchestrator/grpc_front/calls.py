"""gRPC's server with limits on what one caller may cost.

grpc.aio's own waits for a message for as long as its caller likes, keeps an answer until it is taken, and knows one
limit alone: a number of RPCs, whoever holds them. Nor can it end an RPC whose bytes are not taken: the status waits
behind them. gRPC's core ends what nobody refers to any more (`grpc_call_unref` in its call.cc), so here each RPC is a
task of ours, and is over when that task is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

import grpc
from grpc import aio
from grpc._cython import cygrpc

from orchestrator.unread import Unread

log = logging.getLogger("orchestrator.grpc_front")

# From the headers to the whole first message, as over HTTP (`gateway.protocol`).
READ_TIMEOUT_S = 30.0
# How long a stream with nothing running may stay silent, as a connection without RPCs.
IDLE_TIMEOUT_S = 600.0
# How long a status may wait until the caller takes what comes before it; the short one is of callers who must go.
STATUS_TIMEOUT_S = 30.0
_SHORT_STATUS_TIMEOUT_S = 1.0
# A message below the usual window of a stream is not counted as unread, unless it waits behind another one.
_SMALL_BYTES = 64 << 10

Handler = Callable[["Call"], Awaitable[None]]
Options = Sequence[tuple[str, int]]


class Places:
    """How many RPCs there may be, in all and of one peer.

    An RPC for which nothing runs here is idle: it has sent no message yet, has had all its answers, or does not take
    the last one. Where places are short, or the idle ones too many (each may hold a half-sent message), one of them
    is ended: the one that is idle for longest, of the peer who has most.
    """

    def __init__(self, max_rpcs: int, max_per_peer: int, max_idle: int) -> None:
        self._max_rpcs = max_rpcs
        self._max_per_peer = max_per_peer
        self._max_idle = max_idle
        self._held: set[Call] = set()
        self._num_held: Counter[str] = Counter()  # by peer
        self._idle: dict[Call, None] = {}  # the one that is idle for longest comes first

    def enter(self, call: Call) -> str | None:
        """Give `call` a place; returns what to tell its caller when there is none."""
        if self._num_held[call.peer] >= self._max_per_peer and not self._give_way(call.peer):
            return f"{self._max_per_peer} RPCs of your address run, which is the limit"
        if len(self._held) >= self._max_rpcs and not self._give_way():
            return f"{self._max_rpcs} RPCs run, which is the limit"
        self._held.add(call)
        self._num_held[call.peer] += 1
        return None

    def leave(self, call: Call) -> None:
        self._idle.pop(call, None)
        if call in self._held:
            self._held.remove(call)
            self._num_held[call.peer] -= 1
            if not self._num_held[call.peer]:
                del self._num_held[call.peer]

    def note_idle(self, call: Call) -> None:
        if call in self._held:
            self._idle[call] = None
            if len(self._idle) > self._max_idle:
                self._give_way()

    def note_busy(self, call: Call) -> None:
        self._idle.pop(call, None)

    def _give_way(self, peer: str | None = None) -> bool:
        """End an idle RPC, of `peer` if one is given; whether there was any."""
        if peer is None and self._idle:
            ((peer, _),) = Counter(call.peer for call in self._idle).most_common(1)
        for call in self._idle:
            if call.peer == peer:
                call.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "ended while it was idle: others need its place")
                return True
        return False


class Call:
    """One RPC, and all that a handler needs of it. `state` is gRPC's, which ends with its last reference."""

    def __init__(self, state: Any, places: Places, unread: Unread[Call]) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._context = cygrpc._ServicerContext(state, None, None, self._loop)
        self._places = places
        self._unread = unread
        self.peer = _address(self._context.peer())
        self.is_ended = False  # by us, before its handler had done
        self._has_begun = False  # to answer
        self._status: tuple[grpc.StatusCode, str, float] | None = None
        self._timer: TimerHandle | None = None
        self._work: asyncio.Task[bool] | None = None

    @property
    def metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._context.invocation_metadata() or ()

    async def read(self) -> Any:
        """The next message as bytes, or `aio.EOF` when the caller has said all, or left."""
        return await self._context.read()

    async def write(self, data: bytes) -> None:
        """Until the caller's windows have taken it. Raises `aio.InternalError` when he has left."""
        if not self._has_begun:
            await self._begin()
        if len(data) <= _SMALL_BYTES:
            await self._context.write(data)
            return
        self._unread.add(self, len(data))
        await self._context.write(data)
        self._unread.remove(self, len(data))  # of one that is cancelled gRPC keeps the bytes, until the RPC is over

    def keep(self, num_bytes: int) -> None:
        """So much waits for a caller who does not take what comes before it, until `let_go`."""
        self._unread.add(self, num_bytes)

    def let_go(self, num_bytes: int) -> None:
        self._unread.remove(self, num_bytes)

    async def abort(self, code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str], ...] = ()) -> NoReturn:
        """Tell the caller, who may still have to take what comes before; raises what ends the handler."""
        await asyncio.wait_for(self._context.abort(code, text, trailers), STATUS_TIMEOUT_S)
        raise AssertionError("abort raises")

    def end(self, code: grpc.StatusCode, text: str, status_timeout_s: float = _SHORT_STATUS_TIMEOUT_S) -> None:
        """Cancel the handler and tell the caller why, if he takes what comes before within `status_timeout_s`."""
        self._places.leave(self)
        self._stop_timer()
        self.is_ended = True
        self._status = self._status or (code, text, status_timeout_s)
        if self._work is not None:
            self._work.cancel()

    def be_idle(self, timeout_s: float, text: str, status_timeout_s: float = _SHORT_STATUS_TIMEOUT_S) -> None:
        """Until `be_busy` nothing runs for this caller, or he does not read; after `timeout_s` that is his end."""
        if not self.is_ended:
            self._stop_timer()
            reason = grpc.StatusCode.DEADLINE_EXCEEDED, text, status_timeout_s
            self._timer = self._loop.call_later(timeout_s, self.end, *reason)
            self._places.note_idle(self)

    def be_busy(self) -> None:
        self._stop_timer()
        self._places.note_busy(self)

    async def run(self, handler: Handler) -> None:
        """Until the caller has his status, or does not take it, or has left."""
        closed = asyncio.create_task(_wait_until_closed(self._state, self._loop))
        self._work = asyncio.create_task(self._answer(handler))
        try:
            await asyncio.wait((closed, self._work), return_when=asyncio.FIRST_COMPLETED)
            self._places.leave(self)
            if self._work.done() and self._work.result():
                await asyncio.wait((closed,), timeout=STATUS_TIMEOUT_S)
        finally:
            self._work.cancel()
            closed.cancel()
            await asyncio.wait((closed, self._work))
            self._places.leave(self)
            self._unread.forget(self)
            self._stop_timer()

    async def _answer(self, handler: Handler) -> bool:
        """Whether the caller got a status."""
        try:
            try:
                if (refusal := self._places.enter(self)) is not None:
                    await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
                self.be_idle(READ_TIMEOUT_S, f"no whole message came within {READ_TIMEOUT_S:g} s")
                await handler(self)
                await self._finish()
                return True
            except asyncio.CancelledError:
                if self._status is None:
                    raise  # the caller has left
                code, text, timeout_s = self._status
                await asyncio.wait_for(self._context.abort(code, text), timeout_s)
            except aio.BaseError:
                raise
            except Exception:
                log.exception("an RPC failed")
                await self.abort(grpc.StatusCode.INTERNAL, "the gRPC front failed")
        except aio.AbortError as error:
            error.with_traceback(None)  # it is kept by the RPC, which its frames keep
            return True
        except (aio.BaseError, asyncio.TimeoutError) as error:
            log.debug("a caller did not get the status of an RPC: %r", error)
        return False

    async def _begin(self) -> None:
        """Headers go by themselves: after a message that is not taken gRPC would not know that they were sent."""
        self._has_begun = True
        await self._context.send_initial_metadata(())

    async def _finish(self) -> None:
        """With the status OK, for which grpc.aio's context has no method."""
        if not self._has_begun:
            await self._begin()
        status = cygrpc.SendStatusFromServerOperation((), cygrpc.StatusCode.ok, "", 0)
        await cygrpc.execute_batch(self._state, (status,), self._loop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _end_unread(call: Call) -> None:
    call.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer was not read, and others need its memory")


async def _wait_until_closed(state: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Until the RPC is over: its caller has left, or has his status."""
    await cygrpc.execute_batch(state, (cygrpc.ReceiveCloseOnServerOperation(0),), loop)


class Method(NamedTuple):
    handler: Handler
    places: Places


class Server(cygrpc.AioServer):  # type: ignore[misc]
    """Serves `methods`, by path; calls of all others get `unknown`.

    The original decodes the path of a call of an unknown method as UTF-8 inside its accepting loop: one path of other
    bytes, from anybody, and it serves nobody any more (grpcio 1.85; there is no public way around it). Here it is
    never looked at.
    """

    def __init__(self, methods: Mapping[str, Method], unknown: Method, options: Options) -> None:
        super().__init__(asyncio.get_running_loop(), None, (), (), options, None)
        self.add_registered_method_handlers(dict.fromkeys(methods))
        self._methods = {path.encode(): method for path, method in methods.items()}
        self._unknown = unknown
        self._unread: Unread[Call] = Unread(lambda call: call.peer, _end_unread)
        self._running: set[asyncio.Task[None]] = set()

    async def _request_registered_call(self, path: bytes) -> Any:
        while True:
            self._serve(await super()._request_registered_call(path), self._methods[path])

    async def _request_call(self) -> Any:
        while True:
            self._serve(await super()._request_call(), self._unknown)

    def _serve(self, state: Any, method: Method) -> None:
        task = asyncio.create_task(Call(state, method.places, self._unread).run(method.handler))
        self._running.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._running.discard)


def _address(peer: str) -> str:
    """Of gRPC's `ipv4:127.0.0.1:4711` what its owner cannot change at will; of `ipv6:%5B::1%5D:4711` the /64."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind != "ipv6":
        return host
    address = ipaddress.IPv6Address(host)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
