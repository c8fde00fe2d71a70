"""Single flight: one answer in the making, and all who asked for the same at the same time.

Everything here happens on one event loop, and nothing is awaited between two callers' turns: whoever comes late is
sent what the others have, and is with them from then on. The text is kept once. A sink never waits for its reader, so a
slow one holds nobody up.

A token costs its way once for each caller, so a crowd costs more than its answer: with many callers tokens wait for one
another, and go as one event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from functools import partial

from orchestrator.answer import Answer, CallerOutput
from orchestrator.cache.stage import Hit
from orchestrator.call import Waited
from orchestrator.errors import CancelledError
from orchestrator.latencies import TokenGaps
from orchestrator.stages import Stage
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.text import Piece, join

# What one event loop may have to write for callers who share: an event takes 20 to 70 us of it (`perf token-path`).
MAX_SHARED_EVENTS_PER_S = 10_000

log = logging.getLogger("orchestrator.requests")


class Crowd:
    """All the callers of one event loop."""

    def __init__(self) -> None:
        self.num = 0

    @property
    def pause_s(self) -> float:
        """Between two events of one answer that several listen to."""
        return self.num / MAX_SHARED_EVENTS_PER_S


class Flight(Waited):
    """An `Output` for any number of callers. It is cancelled when the last of them leaves."""

    def __init__(self, crowd: Crowd | None = None, *, keeps_pieces: bool = True) -> None:
        """Without its pieces nobody can join late, nor can the answer be stored."""
        super().__init__()
        self._crowd = Crowd() if crowd is None else crowd
        self._keeps_pieces = keeps_pieces
        self.hit: Hit | None = None  # what is served, if it is a stored answer
        self.pieces: list[tuple[Choice, Piece | None]] = []  # None: the choice ends
        self.answer: Answer | None = None
        self.gaps = TokenGaps()  # of what is generated
        self.is_timed = False  # the deadline of whoever it is made for may refuse it
        self.oldest_s = math.inf  # a stored answer of another question may be as old as that
        self.payer: CallerOutput | None = None  # who pays for it: of those who heard its end, the first
        self._callers: dict[CallerOutput, asyncio.Future[None]] = {}
        self._num_sent = 0  # of `pieces`, to all callers
        self._sent_s = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._stage: Stage | None = None
        self._is_finished = False
        self._has_failed = False

    # --- the callers' side ---

    @property
    def takes_callers(self) -> bool:
        return not self.is_cancelled and not self._has_failed

    async def listen(self, output: CallerOutput) -> None:
        """Until the final event was sent. Raises what ended the answer, or `CancelledError` when the caller left."""
        if self._stage is not None:
            output.call.stages.enter(self._stage)
        if self.answer is not None:
            self._catch_up(output, self.answer)
            if self._is_finished:
                return
        ended = self._callers[output] = asyncio.get_running_loop().create_future()
        self._crowd.num += 1
        try:
            output.call.on_cancel(partial(self._leave, output))
            await ended
        except CancelledError:
            output.call.raise_if_cancelled()  # for a reason of its own, such as a deadline
            raise
        finally:
            self._crowd.num -= 1
            self._callers.pop(output, None)
            if not self._callers and not self._is_finished:
                self.payer = output  # also if he left because he did not read
                await self.cancel()

    def _catch_up(self, output: CallerOutput, answer: Answer) -> None:
        output.begin(answer, uuid.uuid4().hex)
        for choice, piece in _join(self.pieces[: self._num_sent]):
            if piece is None:
                output.end_choice(choice)
            else:
                output.emit(choice, piece)
        if self._is_finished:
            output.finish()

    async def _leave(self, output: CallerOutput) -> None:
        ended = self._callers.get(output)
        if ended is None or ended.done():
            return
        if len(self._callers) == 1:
            await self.cancel()  # how it ends, this caller then hears like any other
        else:
            del self._callers[output]
            ended.set_exception(CancelledError("the caller left"))

    # --- the generation's side ---

    async def run(self, make: Callable[[Flight], Awaitable[None]]) -> None:
        """Have `make` fill this flight; whatever it raises, all callers hear."""
        try:
            await make(self)
        except BaseException as error:
            self._has_failed = True
            self._send_new()
            self.payer = next(iter(self._callers), self.payer)
            if self._is_finished:
                log.exception("after an answer was finished")
            for ended in self._callers.values():
                if not ended.done():
                    ended.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def enter(self, stage: Stage) -> None:
        self._stage = stage
        for output in self._callers:
            output.call.stages.enter(stage)

    def begin(self, answer: Answer, answer_id: str) -> None:
        """The first caller's answer is called like the engine's request, the others' get names of their own."""
        answer.choices = [Choice(index) for index in range(answer.request.num_choices)]
        self.answer = answer
        names = [answer_id, *(uuid.uuid4().hex for _ in range(len(self._callers) - 1))]
        for name, output in zip(names, list(self._callers)):
            self._send(output, partial(output.begin, answer, name))

    def emit(self, choice: Choice, piece: Piece) -> None:
        assert self.answer is not None
        is_sent = self.answer.request.stream and not self._keeps_pieces  # and not wanted again
        choice.add(piece.text, piece.calls, None if is_sent else piece.log_probs)
        if piece.text or piece.calls or piece.log_probs:
            self._pass_on(choice, piece)
            if self.hit is None:
                self.gaps.note(choice)

    def end_choice(self, choice: Choice, finish_reason: str) -> None:
        choice.finish_reason = finish_reason
        self._pass_on(choice, None)

    def finish(self) -> None:
        self._send_new()
        self._is_finished = True
        self.payer = next(iter(self._callers), self.payer)
        if self.payer is not None:
            self.payer.is_payer = True
        for output, ended in list(self._callers.items()):
            self._send(output, output.finish)
            if not ended.done():
                ended.set_result(None)

    def _pass_on(self, choice: Choice, piece: Piece | None) -> None:
        """Now, or with what follows it."""
        if not self._keeps_pieces:  # one caller
            self._send_all(choice, piece)
            return
        self.pieces.append((choice, piece))
        if len(self._callers) < 2:
            self._send_new()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            wait_s = self._sent_s + self._crowd.pause_s - loop.time()
            if wait_s <= 0:
                self._send_new()
            else:
                self._timer = loop.call_later(wait_s, self._send_new)

    def _send_new(self) -> None:
        """To all callers what they have not got yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        new, self._num_sent = self.pieces[self._num_sent :], len(self.pieces)
        if len(self._callers) > 1:
            self._sent_s = asyncio.get_running_loop().time()
        for choice, piece in _join(new):
            self._send_all(choice, piece)

    def _send_all(self, choice: Choice, piece: Piece | None) -> None:
        for output in list(self._callers):
            if piece is None:
                self._send(output, partial(output.end_choice, choice))
            else:
                self._send(output, partial(output.emit, choice, piece))

    def _send(self, output: CallerOutput, send: Callable[[], None]) -> None:
        """One caller's sink that fails is not the others' concern."""
        ended = self._callers[output]
        if ended.done():
            return
        try:
            send()
        except Exception as error:
            ended.set_exception(error)


def _join(pieces: Sequence[tuple[Choice, Piece | None]]) -> Iterator[tuple[Choice, Piece | None]]:
    """The same, a choice's pieces as one."""
    if len(pieces) < 2:
        yield from pieces
        return
    new: dict[int, list[Piece]] = {}
    ends = {choice.index for choice, piece in pieces if piece is None}
    choices = {choice.index: choice for choice, _ in pieces}
    for choice, piece in pieces:
        if piece is not None:
            new.setdefault(choice.index, []).append(piece)
    for index, choice in choices.items():
        if index in new:
            yield choice, join(new[index])
        if index in ends:
            yield choice, None


class Flights:
    """What is in the air. For one event loop."""

    def __init__(self) -> None:
        self._crowd = Crowd()
        self._open: dict[Hashable, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, key: Hashable) -> Flight | None:
        flight = self._open.get(key)
        return flight if flight is not None and flight.takes_callers else None

    def start(
        self, key: Hashable | None, make: Callable[[Flight], Awaitable[None]], *, keeps_pieces: bool = True
    ) -> Flight:
        """A flight that `make` fills; others find it by `key`, until `make` returns. With None nobody does."""
        flight = Flight(self._crowd, keeps_pieces=keeps_pieces)
        if key is not None:
            self._open[key] = flight
        task = asyncio.get_running_loop().create_task(flight.run(make))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if key is not None and self._open.get(key) is flight:
                del self._open[key]

        task.add_done_callback(end)
        return flight

    async def finish(self) -> None:
        """Until all have landed, what comes after their final event too."""
        while self._tasks:
            await asyncio.wait(self._tasks)
