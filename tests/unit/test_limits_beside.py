"""Requests that do not pass the orchestrator: what they may, what they pay, their turn, their deadline, their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits_loopback import Beside
from tritonclient.grpc import service_pb2

from orchestrator.config import Beside as Places
from orchestrator.config import Limits
from orchestrator.errors import (
    ApiError,
    CancelledError,
    DeadlineError,
    EngineError,
    InternalError,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    RateLimitError,
    UnauthorizedError,
)
from orchestrator.limits.client import MeteredResponses, Place
from orchestrator.limits.ledger import Amount

ONE = Limits(beside=Places(embedding=1, ocr=1))


def headers(name: str, **others: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {name}"), *((key.replace("_", "-"), value) for key, value in others.items())]


class Work:
    """What is done in a place: as long as the test says."""

    def __init__(self, place: Place, num_tokens: int | None = 0, error: ApiError | None = None) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self._place, self._num_tokens, self._error = place, num_tokens, error

    async def __call__(self) -> str:
        self.begun.set()
        await self.go.wait()
        self._place.num_tokens = self._num_tokens
        if self._error is not None:
            raise self._error
        return "done"


class Request:
    """One request to a model beside; it ends when `work.go` is set."""

    def __init__(
        self, beside: Beside, name: str = "", model: str = "embedding", lengths: Any = (), **given: Any
    ) -> None:
        self.place = Place()
        self.work = Work(self.place, given.pop("num_tokens", 0), given.pop("error", None))
        pairs = headers(name, **given) if name else [(key.replace("_", "-"), value) for key, value in given.items()]
        serving = beside.client.serve(self.place, model, lengths, pairs, self.work)
        self.task = asyncio.create_task(self.place.watch(serving))

    async def has_begun(self) -> bool:
        for _ in range(20):
            await asyncio.sleep(0)
        return self.work.begun.is_set()

    async def end(self) -> str:
        self.work.go.set()
        return await self.task


def run(scenario: Callable[[], Any]) -> None:
    logged: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(watched())
    assert logged == []


# --- what it pays ----------------------------------------------------------------------------------------------


def test_what_a_request_took_takes_the_place_of_what_it_might(tmp_path: Path) -> None:
    beside = Beside(tmp_path, embeds={"tokens_per_minute": 600, "requests_per_minute": 9})

    async def scenario() -> None:
        request = Request(beside, "embeds", lengths=[10, 5000], num_tokens=12)
        assert await request.has_begun()
        assert await beside.used("embeds") == Amount(1, 266)
        assert request.place.headers["x-ratelimit-remaining-tokens"] == "334"
        with pytest.raises(RateLimitError):
            await Request(beside, "embeds", lengths=[256, 256]).task
        assert await request.end() == "done"
        await beside.settled()
        assert await beside.used("embeds") == Amount(1, 12)
        await Request(beside, "embeds", "ocr").end()
        await Request(beside, "embeds", lengths=[20], num_tokens=None).end()  # nobody knows what it took
        await beside.settled()
        assert await beside.used("embeds") == Amount(3, 32)

    run(scenario)


@pytest.mark.parametrize(
    ("error", "used"), [(EngineError("no"), Amount()), (InvalidRequestError("input: no"), Amount(1)), (None, Amount(1))]
)
def test_what_fails_by_our_fault_is_no_request(tmp_path: Path, error: ApiError | None, used: Amount) -> None:
    beside = Beside(tmp_path, embeds={"requests_per_minute": 9, "tokens_per_minute": 600})

    async def scenario() -> None:
        request = Request(beside, "embeds", lengths=[10], error=error)
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            await request.end()
        await beside.settled()
        assert await beside.used("embeds") == used

    run(scenario)


def test_every_request_is_counted_by_its_end_and_has_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    beside = Beside(tmp_path, limits=ONE, embeds={}, chats={"tiers": ["simple"]})

    async def scenario() -> None:
        await Request(beside, "embeds", lengths=[10], num_tokens=7, x_request_id="a").end()
        with pytest.raises(EngineError):
            await Request(beside, "embeds", "ocr", error=EngineError("no"), x_request_id="b").end()
        with pytest.raises(NotAllowedError):
            await Request(beside, "chats", x_request_id="c").task
        first = Request(beside, "embeds", x_request_id="d")
        assert await first.has_begun()
        second = Request(beside, "embeds", x_request_id="e")
        assert not await second.has_begun()
        await second.place.cancel()  # in the queue
        await first.place.cancel()  # in its midst
        first.work.go.set()
        for request in (first, second):
            with pytest.raises(CancelledError):
                await request.task
        await beside.settled()

    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        run(scenario)
    logged = [line for line in map(json.loads, caplog.messages) if line["event"] == "request_beside"]
    lines = {line.pop("x_request_id"): line for line in logged}
    assert len(lines) == len(logged)
    assert {name: (line["model"], line["outcome"]) for name, line in lines.items()} == {
        "a": ("embedding", "ok"),
        "b": ("ocr", "engine_error"),
        "c": ("embedding", "not_allowed"),
        "d": ("embedding", "cancelled"),
        "e": ("embedding", "cancelled"),
    }
    assert lines["a"] == {
        "event": "request_beside",
        "model": "embedding",
        "outcome": "ok",
        "key": "embeds",
        "tenant": "embeds",
        "total_ms": lines["a"]["total_ms"],
        "input_tokens": 7,
    }
    assert beside.operations.outcomes == {
        ("embedding", "ok"): 1,
        ("ocr", "engine_error"): 1,
        ("embedding", "not_allowed"): 1,
        ("embedding", "cancelled"): 2,
    }


def test_who_may_what(tmp_path: Path) -> None:
    beside = Beside(tmp_path, embeds={"may_read_metrics": True}, chats={"tiers": ["simple"]})

    async def scenario() -> None:
        for name, model, refusal, says in (
            ("chats", "embedding", NotAllowedError, "may not use 'embedding'; it may use simple"),
            ("chats", "ocr", NotAllowedError, "may not use 'ocr'"),
            ("stranger", "tts", UnauthorizedError, "not a valid key"),
            ("embeds", "simple", InternalError, "admit"),  # the gateway and the front are ours
        ):
            with pytest.raises(refusal, match=says):
                await Request(beside, name, model).task
        with pytest.raises(InternalError):
            await Request(beside, "embeds", lengths=[-1]).task
        for name, right in (("chats", "models"), ("embeds", "metrics"), ("embeds", "ocr")):
            await beside.client.check(right, headers(name))
        for name, right in (("chats", "metrics"), ("chats", "ocr")):
            with pytest.raises(NotAllowedError):
                await beside.client.check(right, headers(name))
        with pytest.raises(InvalidRequestError, match="one of check, admit, settle"):
            await beside.client._ask("steal", {}, ())
        assert beside.gate.refusals == {"not_allowed": 4, "invalid_api_key": 1}

    run(scenario)


def test_without_keys_nobody_is_asked_who_he_is_but_waits_his_turn() -> None:
    beside = Beside(limits=ONE)

    async def scenario() -> None:
        await beside.client.check("metrics", ())
        assert beside.asked == []
        first, second = Request(beside), Request(beside)
        assert await first.has_begun() and not await second.has_begun()
        await first.end()
        assert await second.end() == "done" and second.place.headers == {}

    run(scenario)


# --- its turn ------------------------------------------------------------------------------------------------


def test_interactive_ones_go_first_and_each_model_has_its_own_queue(tmp_path: Path) -> None:
    beside = Beside(tmp_path, ONE.model_copy(update={"max_batch_waiting": 1}), a={}, b={"priority": "batch"})

    async def scenario() -> None:
        first = Request(beside, "a")
        assert await first.has_begun()
        batch, other, image = Request(beside, "b"), Request(beside, "a"), Request(beside, "a", "ocr")
        assert await image.has_begun() and not await other.has_begun()
        assert beside.operations.num_waiting() == {"interactive": 1, "batch": 1, "aside": 0}
        with pytest.raises(OverloadedError, match="1 batch requests wait already") as caught:
            await Request(beside, "b").task
        assert caught.value.headers["retry-after"] == "1"
        await first.end()
        assert await other.has_begun() and not await batch.has_begun()
        for request in (other, batch, image):
            await request.end()
        await beside.settled()
        assert await beside.used("b") == Amount()  # no quota, no account

    run(scenario)


def test_one_that_leaves_before_its_turn_takes_nothing(tmp_path: Path) -> None:
    beside = Beside(tmp_path, ONE, a={"requests_per_minute": 9})

    async def scenario() -> None:
        first, leaves, stays = (Request(beside, "a") for _ in range(3))
        assert await first.has_begun()
        await leaves.place.cancel()
        with pytest.raises(CancelledError):
            await leaves.task
        await first.end()
        assert await stays.has_begun() and not leaves.work.begun.is_set()
        await stays.end()
        await beside.settled()
        assert await beside.used("a") == Amount(2)

    run(scenario)


def test_one_that_leaves_later_keeps_its_place_until_what_was_begun_has_ended() -> None:
    beside = Beside(limits=ONE)

    async def scenario() -> None:
        leaves = Request(beside, num_tokens=5)
        assert await leaves.has_begun()
        waits = Request(beside)
        await leaves.place.cancel()
        with pytest.raises(CancelledError):
            await leaves.task
        assert not await waits.has_begun()
        leaves.work.go.set()
        assert await waits.end() == "done"

    run(scenario)


@pytest.mark.parametrize("how", ["vanishes", "is refused its settling"])
def test_a_gateway_that_fails_takes_no_place_with_it(tmp_path: Path, how: str) -> None:
    """What it had reserved stays reserved, which is never too little."""
    beside = Beside(tmp_path, ONE, a={"tokens_per_minute": 100})

    async def scenario() -> None:
        lost = Request(beside, "a", lengths=[20], num_tokens=2)
        assert await lost.has_begun()
        if how == "vanishes":
            (call,) = beside.calls.values()
            await call.cancel()  # as the watcher does
        else:
            beside.operations._operations["settle"] = beside.operations._check
            await lost.end()
        assert await Request(beside, "a").end() == "done"
        await beside.settled()
        assert (await beside.used("a")).tokens == 20
        lost.work.go.set()
        await asyncio.wait({lost.task})

    run(scenario)


# --- its deadline ----------------------------------------------------------------------------------------------


def test_one_that_is_not_expected_to_be_in_time_is_refused_at_once(tmp_path: Path) -> None:
    beside = Beside(tmp_path, ONE, a={"requests_per_minute": 9})

    async def scenario() -> None:
        request = Request(beside, "a", "ocr")
        assert await request.has_begun()
        await asyncio.sleep(0.05)
        await request.end()
        await beside.settled()
        with pytest.raises(OverloadedError, match="the deadline cannot be met") as caught:
            await Request(beside, "a", "ocr", x_deadline_ms="30").task
        assert caught.value.headers["retry-after"] == "30"
        assert await Request(beside, "a", "ocr", x_deadline_ms="20000").end() == "done"
        await beside.settled()
        assert await beside.used("a") == Amount(2)
        with pytest.raises(InvalidRequestError, match="x-deadline-ms: must be whole milliseconds"):
            await Request(beside, "a", "ocr", x_deadline_ms="soon").task
        await beside.settled()

    run(scenario)


def test_what_fails_or_is_left_says_nothing_of_how_long_answers_take() -> None:
    beside = Beside(limits=ONE)

    async def scenario() -> None:
        failing = Request(beside, error=EngineError("no"))
        failing.work.go.set()
        with pytest.raises(EngineError, match="no"):
            await failing.task
        await beside.settled()
        assert beside.operations._queues["embedding"].pace.predict_s() == 0.0

    run(scenario)


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_one_that_runs_over_ends_with_its_deadline(tmp_path: Path, where: str) -> None:
    beside = Beside(tmp_path, ONE, a={"deadline_ms": 30}, b={})

    async def scenario() -> None:
        before = Request(beside, "b") if where == "waiting" else None
        if before is not None:
            assert await before.has_begun()
        late = Request(beside, "a")
        with pytest.raises(DeadlineError, match="the deadline of 30 ms has passed"):
            await late.task
        assert late.work.begun.is_set() == (where == "running")
        for request in filter(None, (before, late)):
            request.work.go.set()
        await beside.settled()
        assert beside.gate.refusals == {"deadline_exceeded": 1}

    run(scenario)


def test_what_a_place_was_cancelled_for_is_what_its_request_fails_with() -> None:
    """Not what its work makes of being cancelled."""
    beside = Beside()

    async def scenario() -> None:
        request = Request(beside, error=CancelledError("the stream was cancelled"))
        assert await request.has_begun()
        serving = asyncio.create_task(beside.client.serve(place := Place(), "tts", (), (), work := Work(place)))
        await work.begun.wait()
        await place.cancel(DeadlineError("too late"))
        work.go.set()
        with pytest.raises(DeadlineError, match="too late"):
            await serving
        await request.place.cancel(EngineError("another input failed"))
        with pytest.raises(EngineError, match="another input failed"):
            await request.end()

    run(scenario)


# --- by the gRPC front -----------------------------------------------------------------------------------------


class FakeModel:
    """Of a request to `embedding`: one response, and its end."""

    def __init__(self, num_tokens: list[int] | None, error: str = "") -> None:
        self.go = asyncio.Event()
        self._response = service_pb2.ModelStreamInferResponse(error_message=error)
        if num_tokens is not None:
            self._response.infer_response.outputs.add(name="num_tokens", datatype="INT32", shape=(len(num_tokens), 1))
            self._response.infer_response.raw_output_contents.append(struct.pack(f"<{len(num_tokens)}i", *num_tokens))
        elif not error:
            self._response.infer_response.outputs.add(name="embedding", datatype="FP32", shape=(1, 384))
            self._response.infer_response.raw_output_contents.append(bytes(1536))

    async def ask(self) -> Any:
        await self.go.wait()
        return self._response


@pytest.mark.parametrize(
    ("num_tokens", "error", "used"),
    [([5, 7], "", Amount(1, 12)), (None, "", Amount(1, 30)), (None, "it failed", Amount())],
)
def test_the_response_brings_the_headers_and_says_what_was_used(
    num_tokens: list[int] | None, error: str, used: Amount, tmp_path: Path
) -> None:
    beside = Beside(tmp_path, a={"tokens_per_minute": 100})

    async def scenario() -> None:
        model = FakeModel(num_tokens, error)
        model.go.set()
        metered = MeteredResponses(beside.client.serve, model.ask, "embedding", [10, 20], headers("a"))
        (response,) = [response async for response in metered.read()]
        assert response.error_message == error
        names = (
            [] if error else ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"]
        )
        assert sorted(response.infer_response.parameters) == names
        await beside.settled()
        assert await beside.used("a") == used
        assert (beside.operations._queues["embedding"].pace.predict_s() == 0.0) == bool(error)

    run(scenario)


def test_a_caller_that_cancels_hears_it_at_once_and_what_was_begun_ends() -> None:
    beside = Beside(limits=ONE)

    async def scenario() -> None:
        model = FakeModel([3])
        metered = MeteredResponses(beside.client.serve, model.ask, "embedding", [9], ())
        reading = asyncio.create_task(anext(metered.read()))
        while not beside.num_running["embedding"]:
            await asyncio.sleep(0.001)
        await metered.cancel()
        with pytest.raises(CancelledError):
            await reading
        assert beside.num_running["embedding"] == 1
        model.go.set()
        await beside.settled()

    run(scenario)
