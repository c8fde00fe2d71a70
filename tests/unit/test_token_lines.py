"""Tokens by lines: what an engine's step brought reaches its requests, whoever else comes, goes, hangs or fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from orchestrator import contracts, token_lines
from orchestrator.engines import Chunk, EngineRequest
from orchestrator.errors import EngineError
from orchestrator.infer_streams import InferStream
from orchestrator.local_socket import socket_of
from orchestrator.token_lines import Subscribers, TokenLines
from orchestrator.triton.engine_client import GrpcEngineClient
from orchestrator.wire import error_response, mark_end

URL = "127.0.0.1:4711"
MODEL = "llm_small"


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"{tmp_path}/s-"


def path_of(prefix: str, instance: int = 0, model: str = MODEL) -> str:
    return socket_of(prefix, URL, model, f"{model}_0_{instance}")


@contextlib.contextmanager
def subscribers(path: str) -> Iterator[Subscribers]:
    listening = Subscribers(path)
    try:
        yield listening
    finally:
        listening.close()


def run(scenario: Awaitable[None]) -> None:
    uvloop.run(asyncio.wait_for(scenario, 20))  # as the orchestrator does


async def drain(queue: asyncio.Queue[Chunk]) -> list[Chunk]:
    chunks = [await queue.get()]
    while not chunks[-1].finished:
        chunks.append(await queue.get())
    return chunks


def say(listening: Subscribers, subscriber_id: str, **chunks: Chunk) -> None:
    """What one step brought."""
    subscriber = listening.find(subscriber_id)
    assert subscriber is not None
    for request_id, chunk in chunks.items():
        subscriber.put(request_id, chunk)
    listening.flush()


# --- both ends -----------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=3)
STEPS = st.lists(st.dictionaries(st.sampled_from("abcdef"), TOKENS), max_size=9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(steps=STEPS)
def test_every_request_gets_its_own_tokens_in_order(prefix: str, steps: list[dict[str, list[int]]]) -> None:
    async def scenario() -> None:
        lines = TokenLines(socket_of(prefix, URL, "{model}"))
        subscriber_id = await lines.join(MODEL)
        assert subscriber_id is not None
        ids = sorted({request_id for step in steps for request_id in step})
        with contextlib.ExitStack() as stack:
            queues = {each: stack.enter_context(lines.receive(MODEL, each)) for each in ids}
            for step in steps:
                say(listening, subscriber_id, **{each: Chunk(token_ids) for each, token_ids in step.items()})
            say(listening, subscriber_id, **{each: Chunk([], finished=True, log_probs=[-0.5]) for each in ids})
            for each, queue in queues.items():
                *chunks, last = await drain(queue)
                assert [chunk.token_ids for chunk in chunks] == [step[each] for step in steps if each in step]
                assert last == Chunk([], True, None, [-0.5])
        await lines.close()

    with subscribers(path_of(prefix)) as listening:
        run(scenario())


def test_nobody_else_may_listen(prefix: str) -> None:
    with subscribers(path_of(prefix)):
        assert stat.S_IMODE(Path(path_of(prefix)).stat().st_mode) == 0o600
    assert not Path(path_of(prefix)).exists()


def test_a_model_without_lines(prefix: str) -> None:
    async def scenario() -> None:
        assert await TokenLines(socket_of(prefix, URL, "{model}")).join("llm") is None

    with subscribers(path_of(prefix)):  # of a model whose name begins with it
        run(scenario())


def test_all_instances_are_joined(prefix: str) -> None:
    async def scenario() -> None:
        lines = TokenLines(socket_of(prefix, URL, "{model}"))
        joined = await asyncio.gather(*(lines.join(MODEL) for _ in range(20)))
        assert len(set(joined)) == 1 and joined[0] is not None
        with lines.receive(MODEL, "a") as a, lines.receive(MODEL, "b") as b:
            say(first, joined[0], a=Chunk([1], finished=True))
            say(second, joined[0], b=Chunk([2], finished=True))
            assert [await drain(a), await drain(b)] == [[Chunk([1], True)], [Chunk([2], True)]]
        await lines.close()

    with subscribers(path_of(prefix, 0)) as first, subscribers(path_of(prefix, 1)) as second:
        run(scenario())


def test_one_that_leaves_disturbs_nobody(prefix: str) -> None:
    async def scenario() -> None:
        pattern = socket_of(prefix, URL, "{model}")
        stays, leaves = TokenLines(pattern), TokenLines(pattern)
        staying, leaving = await stays.join(MODEL), await leaves.join(MODEL)
        assert staying is not None and leaving is not None
        gone = listening.find(leaving)
        assert gone is not None
        await leaves.close()
        with stays.receive(MODEL, "a") as queue:
            for token in range(5):
                gone.put("b", Chunk([token]))
                say(listening, staying, a=Chunk([token], finished=token == 4))
            assert [chunk.token_ids for chunk in await drain(queue)] == [[0], [1], [2], [3], [4]]
        assert listening.find(leaving) is None and listening.find(staying) is not None
        await stays.close()

    with subscribers(path_of(prefix)) as listening:
        run(scenario())


def test_one_that_does_not_read_is_dropped(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_lines, "MAX_UNREAD_BYTES", 1 << 20)
    with subscribers(path_of(prefix)) as listening, socket.socket(socket.AF_UNIX) as hung:
        hung.connect(path_of(prefix))
        hung.sendall(b"hung\n")
        assert hung.recv(9) == b"{}\n"
        for _ in range(100):  # 100 KB each
            if listening.find("hung") is None:
                break
            say(listening, "hung", a=Chunk([7] * 50_000))
        assert listening.find("hung") is None
    assert "subscriber_dropped" in caplog.text


def test_one_that_is_held_up_loses_nothing_and_holds_nobody_up(prefix: str) -> None:
    """An orchestrator whose loop is busy for however long; the engine goes on, for the others too."""

    def read_until(reader: Any, token: int) -> list[int]:
        got: list[int] = []
        while not got or got[-1] != token:
            fields = json.loads(reader.readline())
            got += [chunk[0][0] for chunk in fields.values()]
        return got

    with (
        subscribers(path_of(prefix)) as listening,
        socket.socket(socket.AF_UNIX) as held_up,
        socket.socket(socket.AF_UNIX) as other,
    ):
        for each, name in ((held_up, b"held_up\n"), (other, b"other\n")):
            each.connect(path_of(prefix))
            each.sendall(name)
            assert each.recv(9) == b"{}\n"
        with held_up.makefile("rb") as reader, other.makefile("rb") as other_reader:
            for lap in range(3):  # it comes back, and is held up again
                tokens = range(lap * 100, lap * 100 + 100)
                for token in tokens:  # 100 KB each, of which the kernel holds some two
                    say(listening, "held_up", a=Chunk([token, *[7] * 50_000]))
                    say(listening, "other", b=Chunk([token]))
                    assert read_until(other_reader, token) == [token]
                assert read_until(reader, tokens[-1]) == list(tokens)


def test_one_that_says_nothing_keeps_nobody_waiting_for_long(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_lines, "TIMEOUT_S", 0.05)

    async def scenario() -> None:
        with contextlib.suppress(EngineError):  # it may wait for as long as the silent one
            await TokenLines(socket_of(prefix, URL, "{model}")).join(MODEL)
        assert await TokenLines(socket_of(prefix, URL, "{model}")).join(MODEL) is not None

    with subscribers(path_of(prefix)), socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path_of(prefix))
        run(scenario())


def test_when_the_engine_model_ends_so_do_its_requests_and_the_next_joins_anew(prefix: str) -> None:
    async def scenario() -> None:
        lines = TokenLines(socket_of(prefix, URL, "{model}"))
        listening = Subscribers(path_of(prefix))
        before = await lines.join(MODEL)
        with lines.receive(MODEL, "a") as queue, lines.receive("other", "b") as other:
            await asyncio.to_thread(listening.close)
            lost = await queue.get()
            assert isinstance(lost, EngineError) and "it ended, or more than 67108864 bytes" in lost.message
            assert queue.empty() and other.empty()
        with subscribers(path_of(prefix)) as again:
            after = await lines.join(MODEL)
            assert after is not None and after != before
            with lines.receive(MODEL, "c") as queue:
                say(again, after, c=Chunk([1], finished=True))
                assert await drain(queue) == [Chunk([1], True)]
            await lines.close()

    run(scenario())


def test_a_socket_where_nobody_listens_is_an_error(prefix: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path_of(prefix))  # as by a process that was killed

        async def scenario() -> None:
            with pytest.raises(EngineError, match="llm_small cannot be reached: ConnectionRefusedError"):
                await TokenLines(socket_of(prefix, URL, "{model}")).join(MODEL)

    run(scenario())


# --- with the requests, which go by Triton -------------------------------------------------------------------


class FakeTriton:
    """One stream to it: the test sees the requests, and says what comes back."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self.is_cancelled = False

    def respond(self, error: str = "") -> None:
        response = error_response("id", error) if error else service_pb2.ModelStreamInferResponse()
        mark_end(response, True)
        self._responses.put_nowait(response)

    def break_off(self) -> None:
        self._responses.put_nowait(aio.EOF)

    async def write(self, request: Any) -> None:
        self.requests.put_nowait(request)

    async def read(self) -> Any:
        return await self._responses.get()

    def done(self) -> bool:
        return False

    async def done_writing(self) -> None:
        pass

    def cancel(self) -> None:
        self.is_cancelled = True
        self.break_off()


class Setting:
    """An engine client with lines, and both that it talks to."""

    def __init__(self, prefix: str, listening: Subscribers, replicated: tuple[str, ...] = ()) -> None:
        self.triton = FakeTriton()
        self.listening = listening
        self.client = GrpcEngineClient(URL, replicated, lines=TokenLines(socket_of(prefix, URL, "{model}")))
        self.client._streams.borrow = lambda model: InferStream(self.triton)  # type: ignore[method-assign]
        self.got: list[Chunk] = []

    async def ask(self) -> None:
        async for chunk in self.client.stream(MODEL, EngineRequest("id", [1, 2], 9)):
            self.got.append(chunk)

    async def request(self) -> str:
        """The next request of Triton: the id in it for lines, or "stop"."""
        request = await self.triton.requests.get()
        if any(tensor.name == contracts.STOP.name for tensor in request.inputs):
            return "stop"
        return str(request.parameters[contracts.TOKEN_LINES_PARAMETER].string_param)


def play(prefix: str, scenario: Callable[[Setting], Awaitable[None]], *replicated: str) -> None:
    async def main() -> None:
        setting = Setting(prefix, listening, replicated)
        await scenario(setting)
        assert setting.client._lines is not None
        await setting.client._lines.close()

    with subscribers(path_of(prefix)) as listening:
        run(main())


def test_tokens_by_lines_and_the_end_by_triton(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        subscriber_id = await setting.request()
        say(setting.listening, subscriber_id, id=Chunk([5], log_probs=[-1.0]))
        say(setting.listening, subscriber_id, id=Chunk([6], finished=True))
        while len(setting.got) < 2:
            await asyncio.sleep(0)
        assert not asking.done()  # Triton has not ended it yet
        setting.triton.respond()
        await asking
        assert setting.got == [Chunk([5], log_probs=[-1.0]), Chunk([6], True)]

    play(prefix, scenario)


def test_tritons_end_may_come_first(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        subscriber_id = await setting.request()
        setting.triton.respond()
        await asyncio.sleep(0.02)
        say(setting.listening, subscriber_id, id=Chunk([6], finished=True))
        await asking
        assert setting.got == [Chunk([6], True)]

    play(prefix, scenario)


def test_a_refusal_by_triton_is_heard(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        await setting.request()
        setting.triton.respond("input_ids: no")
        with pytest.raises(EngineError, match="input_ids: no"):
            await asking

    play(prefix, scenario)


def test_an_engines_error_comes_after_the_tokens(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        subscriber_id = await setting.request()
        say(setting.listening, subscriber_id, id=Chunk([5]))
        say(setting.listening, subscriber_id, id=Chunk([], finished=True, error="out of memory"))
        setting.triton.respond()
        with pytest.raises(EngineError, match="out of memory"):
            await asking
        assert setting.got == [Chunk([5])]

    play(prefix, scenario)


def test_a_triton_that_is_lost_ends_the_request(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        await setting.request()
        setting.triton.break_off()
        with pytest.raises(EngineError, match="Triton closed it"):
            await asking

    play(prefix, scenario)


def test_who_leaves_waits_until_the_engine_has_let_go(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        chunks = setting.client.stream(MODEL, EngineRequest("id", [1, 2], 9))
        asking = asyncio.ensure_future(anext(chunks))
        subscriber_id = await setting.request()
        say(setting.listening, subscriber_id, id=Chunk([5]))
        assert await asking == Chunk([5])
        leaving = asyncio.ensure_future(chunks.aclose())
        assert await setting.request() == "stop"
        setting.triton.respond()  # of the stop
        await asyncio.sleep(0.02)
        assert not leaving.done()
        say(setting.listening, subscriber_id, id=Chunk([], finished=True))  # which nobody reads
        setting.triton.respond()  # of the request
        await leaving

    play(prefix, scenario)


def test_when_lines_are_lost_the_engine_is_stopped_at_once(prefix: str) -> None:
    """It goes on with what nobody hears: an orchestrator that was held up is cut off, and the request is not over."""

    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        subscriber = setting.listening.find(await setting.request())
        assert subscriber is not None
        subscriber.close()
        assert await setting.request() == "stop"
        setting.triton.respond()  # of the stop
        setting.triton.respond()  # of the request
        with pytest.raises(EngineError, match="the engine model hung up"):
            await asking

    play(prefix, scenario)


def test_who_gives_up_on_an_engine_that_hangs_does_not_wait_for_it(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(setting.ask(), 0.05)
        assert setting.triton.is_cancelled

    play(prefix, scenario)


def test_a_stop_that_went_to_another_instance_is_given_up(prefix: str) -> None:
    async def scenario(setting: Setting) -> None:
        asking = asyncio.create_task(setting.ask())
        subscriber_id = await setting.request()
        say(setting.listening, subscriber_id, id=Chunk([5]))
        await setting.client.stop(MODEL, "id")
        await asking  # as a stopped engine ends
        assert setting.got == [Chunk([5])]

    play(prefix, scenario, MODEL)
