"""What a flight keeps of an answer, as much as is wanted again; and how it goes to many callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.answer import Answer
from orchestrator.errors import EngineError, SlowReaderError
from orchestrator.flight import MAX_SHARED_EVENTS_PER_S, Crowd, Flight
from orchestrator.request import parse_request
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.text import Piece

PIECES = [Piece("a", log_probs=[TokenLogProb("a", -0.5)]), Piece("b", log_probs=[TokenLogProb("b", -1.5)])]


@pytest.mark.parametrize(
    ("stream", "keeps_pieces", "num_pieces", "num_log_probs"),
    [(True, True, 3, 2), (True, False, 0, None), (False, True, 3, 2), (False, False, 0, 2)],
)
def test_what_is_sent_and_not_wanted_again_is_not_kept(
    stream: bool, keeps_pieces: bool, num_pieces: int, num_log_probs: int | None
) -> None:
    request = parse_request(
        b'{"messages": [{"role": "user", "content": "Hi"}], "stream": %s}' % str(stream).lower().encode()
    )
    tier: Any = SimpleNamespace(model="m")
    flight = Flight(keeps_pieces=keeps_pieces)
    flight.begin(Answer(request, tier), "id")
    assert flight.answer is not None
    (choice,) = flight.answer.choices
    for piece in PIECES:
        flight.emit(choice, piece)
    flight.end_choice(choice, "stop")
    assert (choice.text, choice.finish_reason) == ("ab", "stop")  # for the filters, and quality
    assert len(flight.pieces) == num_pieces
    assert (choice.log_probs and len(choice.log_probs)) == num_log_probs


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class FakeOutput:
    """A caller's output that keeps what it is given."""

    def __init__(self) -> None:
        self.call = SimpleNamespace(on_cancel=lambda stop: None, raise_if_cancelled=lambda: None)
        self.texts: list[str] = []
        self.by_choice: dict[int, str] = {}

    def begin(self, answer: Answer, answer_id: str) -> None:
        self.texts.append("(")

    def emit(self, choice: Choice, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.by_choice[choice.index] = self.by_choice.get(choice.index, "") + piece.text

    def end_choice(self, choice: Choice) -> None:
        self.texts.append(f".{choice.index}")
        self.by_choice[choice.index] = self.by_choice.get(choice.index, "") + "."

    def finish(self) -> None:
        self.texts.append(")")


def make_crowd(pause_s: float) -> Crowd:
    """Others' callers, so many that events are so far apart."""
    crowd = Crowd()
    crowd.num = round(pause_s * MAX_SHARED_EVENTS_PER_S)
    assert crowd.pause_s == pause_s
    return crowd


async def board(flight: Flight, num: int) -> tuple[list[FakeOutput], list[asyncio.Task[None]]]:
    outputs: Any = [FakeOutput() for _ in range(num)]
    tasks = [asyncio.create_task(flight.listen(output)) for output in outputs]
    await asyncio.sleep(0)
    return outputs, tasks


def begin(flight: Flight, num_choices: int = 1) -> list[Choice]:
    request: Any = SimpleNamespace(num_choices=num_choices, stream=True)
    answer = Answer(request, SimpleNamespace(model="m"))  # type: ignore[arg-type]
    flight.begin(answer, "id")
    return answer.choices


@in_a_loop
async def test_tokens_wait_for_one_another_when_many_listen_and_none_is_lost() -> None:
    crowd = make_crowd(pause_s=100)
    flight = Flight(crowd)
    outputs, tasks = await board(flight, 2)
    (choice,) = begin(flight)
    for text in "abcd":
        flight.emit(choice, Piece(text))
    assert [each.texts for each in outputs] == [["(", "a"]] * 2  # the first at once
    late, late_tasks = await board(flight, 1)
    flight.end_choice(choice, "stop")
    flight.finish()
    await asyncio.gather(*tasks, *late_tasks)
    assert [each.texts for each in [*outputs, *late]] == [["(", "a", "bcd", ".0", ")"]] * 3
    assert crowd.num == 100 * MAX_SHARED_EVENTS_PER_S


@in_a_loop
async def test_what_waits_goes_when_its_time_has_come() -> None:
    flight = Flight(make_crowd(pause_s=0.01))
    outputs, tasks = await board(flight, 2)
    (choice,) = begin(flight)
    for text in "abc":
        flight.emit(choice, Piece(text))
    while len(outputs[1].texts) < 3:
        await asyncio.sleep(0.001)
    assert [each.texts for each in outputs] == [["(", "a", "bc"]] * 2
    flight.finish()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_one_caller_gets_each_token_by_itself_however_many_others_there_are() -> None:
    flight = Flight(make_crowd(pause_s=100))
    (output,), tasks = await board(flight, 1)
    (choice,) = begin(flight)
    for text in "abc":
        flight.emit(choice, Piece(text))
    assert output.texts == ["(", "a", "b", "c"]
    flight.finish()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_what_came_before_an_error_is_sent_before_it() -> None:
    flight = Flight(make_crowd(pause_s=100))
    outputs, tasks = await board(flight, 2)

    async def make(flight: Flight) -> None:
        (choice,) = begin(flight)
        for text in "abc":
            flight.emit(choice, Piece(text))
        raise EngineError("gone")

    await flight.run(make)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, EngineError) for each in ended)
    assert [each.texts for each in outputs] == [["(", "a", "bc"]] * 2


@in_a_loop
async def test_who_is_the_last_to_go_pays_though_his_sink_has_failed() -> None:
    flight = Flight()
    (output,), tasks = await board(flight, 1)

    def refuse(choice: Choice, piece: Piece) -> None:
        raise SlowReaderError("behind")

    output.emit = refuse  # type: ignore[method-assign]

    async def make(flight: Flight) -> None:
        (choice,) = begin(flight)
        while not flight.is_cancelled:
            flight.emit(choice, Piece("a"))
            await asyncio.sleep(0)
        flight.raise_if_cancelled()

    await flight.run(make)
    assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [SlowReaderError]
    assert flight.payer is output


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.text("xyz", min_size=1, max_size=3)), max_size=20))
def test_each_choice_has_its_text_and_then_its_end(steps: list[tuple[int, str]]) -> None:
    async def fly() -> None:
        flight = Flight(make_crowd(pause_s=100))
        outputs, tasks = await board(flight, 2)
        choices = begin(flight, 3)
        for index, text in steps:
            flight.emit(choices[index], Piece(text))
        for index in (1, 0, 2):
            flight.end_choice(choices[index], "stop")
        flight.finish()
        await asyncio.gather(*tasks)
        whole = {index: "".join(text for at, text in steps if at == index) + "." for index in range(3)}
        assert [output.by_choice for output in outputs] == [whole] * 2
        assert outputs[0].texts[-1] == ")"

    asyncio.run(fly())
