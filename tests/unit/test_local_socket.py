"""The Unix socket between gateway and orchestrator: what comes out is what Triton's gRPC would bring."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import contracts, local_socket
from orchestrator.call import Call
from orchestrator.errors import (
    EngineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    SlowReaderError,
    from_message,
)
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.limits.client import answer_headers_of
from orchestrator.local_socket import MAX_REQUEST_MESSAGE_BYTES, SOCKETS_VARIABLE, LocalSink, listen, socket_of
from orchestrator.wire import add_string, find_output, is_end, new_request, read_parameters, read_strings, read_texts

URL = "127.0.0.1:4711"
Answer = Callable[[Call, LocalSink], None]


class Orchestrator:
    """What `answer` makes of each call; a call that nobody answers runs until it is cancelled."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[Call] = []
        self.ids: dict[str, Call] = {}

    def receive(self, request: Any, sink: LocalSink) -> Call | None:
        parameters = read_parameters(request)
        if contracts.CANCEL_PARAMETER in parameters:
            self._ending = asyncio.ensure_future(self._cancel(request.id))
            sink.send(None, final=True)
            return None
        (body,) = read_texts(request)
        call = self.ids[request.id] = Call(body, parameters, sink)
        self.calls.append(call)
        self.answer(call, sink)
        return call

    async def _cancel(self, request_id: str) -> None:
        call = self.ids[request_id]
        await call.cancel()
        call.sink.fail(InvalidRequestError("it ends"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Orchestrator]:
    monkeypatch.setenv(SOCKETS_VARIABLE, f"{tmp_path}/s-")

    def run(answer: Answer, scenario: Callable[[InferStreams], Awaitable[None]]) -> Orchestrator:
        orchestrator = Orchestrator(answer)

        async def main() -> None:
            server = await listen(
                socket_of(f"{tmp_path}/s-", URL, "orchestrator", "orchestrator_0_0"), orchestrator.receive
            )
            streams = InferStreams(URL)
            await scenario(streams)
            await streams.close()
            server.close()

        # As gateway, front and orchestrator do. Cut short, it hangs in uvloop's `close`; so it has time, if others run.
        uvloop.run(asyncio.wait_for(main(), 120))
        return orchestrator

    return run


def ask(streams: InferStreams, body: bytes = b"{}", **parameters: str) -> Responses:
    request = new_request(contracts.ORCHESTRATOR_MODEL, f"id-{len(body)}")
    add_string(request, contracts.REQUEST, body)
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return Responses(streams, request)


def test_events_come_in_order_and_the_first_brings_the_headers(run: Callable[..., Orchestrator]) -> None:
    def answer(call: Call, sink: LocalSink) -> None:
        sink.announce({"x-ratelimit-limit-requests": "7"})
        for number in range(3):
            sink.send(f"{call.body.decode()} {number} ß", final=number == 2)

    async def scenario(streams: InferStreams) -> None:
        for body in (b"one", b"two"):  # on one connection
            got = [response async for response in ask(streams, body).read()]
            events = [read_strings(find_output(response, contracts.EVENT) or b"")[0].decode() for response in got]
            assert events == [f"{body.decode()} {number} ß" for number in range(3)]
            assert [is_end(response) for response in got] == [False, False, True]
            assert [answer_headers_of(response) for response in got] == [{"x-ratelimit-limit-requests": "7"}, {}, {}]

    calls = run(answer, scenario).calls
    assert [call.parameters[contracts.SAYS_CANCELS_PARAMETER] for call in calls] == ["True", "True"]


def test_an_error_is_the_one_that_was_told(run: Callable[..., Orchestrator]) -> None:
    async def scenario(streams: InferStreams) -> None:
        (response,) = [response async for response in ask(streams).read()]
        error = from_message(response.error_message)
        assert (type(error), error.message, error.param) == (InvalidRequestError, "no", "model")

    run(lambda call, sink: sink.fail(InvalidRequestError("no", param="model")), scenario)


def test_a_whole_answer_may_be_longer_than_any_request(run: Callable[..., Orchestrator]) -> None:
    answer = "ß" * MAX_REQUEST_MESSAGE_BYTES

    async def scenario(streams: InferStreams) -> None:
        (response,) = [response async for response in ask(streams).read()]
        assert read_strings(find_output(response, contracts.EVENT) or b"") == [answer.encode()]

    run(lambda call, sink: sink.send(answer, final=True), scenario)


def test_a_request_that_is_too_long_is_not_read_and_the_log_says_why(
    run: Callable[..., Orchestrator], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(streams: InferStreams) -> None:
        with pytest.raises(EngineError, match="the orchestrator closed it|Broken pipe|Connection reset"):
            await anext(ask(streams, bytes(MAX_REQUEST_MESSAGE_BYTES)).read())

    assert run(lambda call, sink: None, scenario).calls == []
    (record,) = caplog.records
    assert record.message.startswith("a connection to the orchestrator was closed: a message of 4194")


# --- readers that do not read ------------------------------------------------------------------------------

EVENT = "x" * 1000


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "MAX_BEHIND_BYTES", 100_000)
    monkeypatch.setattr(local_socket, "BEHIND_TIMEOUT_S", 0.1)


class Talk:
    """Says `EVENT` forever, to whoever calls, until the sink refuses."""

    def __init__(self) -> None:
        self.num_said = 0
        self.refused = asyncio.Event()

    def __call__(self, call: Call, sink: LocalSink) -> None:
        self._sink = sink
        self._task = asyncio.ensure_future(self._say(call, sink))

    async def _say(self, call: Call, sink: LocalSink) -> None:
        try:
            while not call.is_cancelled:
                sink.send(EVENT, final=False)
                self.num_said += 1
                await asyncio.sleep(0.001)
        except SlowReaderError as error:
            sink.fail(error)
            self.refused.set()

    @property
    def num_bytes_held(self) -> int:
        return self._sink._writer.transport.get_write_buffer_size()


@pytest.mark.usefixtures("little_patience")
def test_a_reader_that_stalls_is_ended_and_told_after_all_that_was_said(run: Callable[..., Orchestrator]) -> None:
    talk = Talk()

    async def scenario(streams: InferStreams) -> None:
        reading = ask(streams).read()
        await anext(reading)
        await talk.refused.wait()
        assert 100_000 < talk.num_bytes_held < 400_000  # the bound, and what 0.1 s brought beside it
        *events, last = [response async for response in reading]
        assert len(events) == talk.num_said - 1
        error = from_message(last.error_message)
        assert isinstance(error, SlowReaderError)
        assert error.message.startswith(
            "more than 100000 bytes of the stream were not read for 0.1 s; read it as it comes"
        )

    run(talk, scenario)


@pytest.mark.usefixtures("little_patience")
def test_a_reader_that_catches_up_is_not_ended(run: Callable[..., Orchestrator]) -> None:
    """Of much that came at once, such as an answer that another caller has had."""
    talk = Talk()

    def answer(call: Call, sink: LocalSink) -> None:
        for _ in range(2000):
            sink.send(EVENT, final=False)
        talk(call, sink)

    async def scenario(streams: InferStreams) -> None:
        reading = ask(streams).read()
        num_read = 0
        async for response in reading:
            assert not response.error_message
            num_read += 1
            if num_read > 2000 and talk.num_said > 300:
                break
        await reading.aclose()

    run(answer, scenario)


# --- faults ------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_named_and_logged_and_ends_its_request_alone(
    run: Callable[..., Orchestrator], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(call: Call, sink: LocalSink) -> None:
        if call.body == b"wrong":
            raise KeyError("planted")
        sink.send("done", final=call.body == b"right")

    async def scenario(streams: InferStreams) -> None:
        runs = ask(streams, b"runs").read()
        await anext(runs)
        (failed,) = [response async for response in ask(streams, b"wrong").read()]
        error = from_message(failed.error_message)
        assert (type(error), error.message) == (InternalError, "the orchestrator failed: KeyError")
        assert len([response async for response in ask(streams, b"right").read()]) == 1
        await runs.aclose()

    calls = run(answer, scenario).calls
    assert [(call.body, call.is_cancelled) for call in calls] == [(b"runs", True), (b"wrong", False), (b"right", False)]
    (record,) = caplog.records
    assert (record.message, str(record.exc_info and record.exc_info[1])) == (
        "a request failed before it began",
        "'planted'",
    )


def test_a_cancel_gets_through_and_the_stream_serves_the_next(run: Callable[..., Orchestrator]) -> None:
    def answer(call: Call, sink: LocalSink) -> None:
        if call.body == b"quick":
            sink.send("done", final=True)
        else:
            sink.send("begun", final=False)

    async def scenario(streams: InferStreams) -> None:
        reading = ask(streams, b"forever").read()
        await anext(reading)
        await reading.aclose()
        assert len([response async for response in ask(streams, b"quick").read()]) == 1

    calls = run(answer, scenario).calls
    assert [call.is_cancelled for call in calls] == [True, False]


def test_a_connection_that_breaks_ends_what_runs_on_it_alone(run: Callable[..., Orchestrator]) -> None:
    def answer(call: Call, sink: LocalSink) -> None:
        sink.send("begun", final=call.body == b"over")

    async def scenario(streams: InferStreams) -> None:
        stream = streams.borrow(contracts.ORCHESTRATOR_MODEL)
        for body in (b"over", b"runs"):
            request = new_request(contracts.ORCHESTRATOR_MODEL, body.decode())
            add_string(request, contracts.REQUEST, body)
            await stream.send(request)
            await stream.receive()
        stream.give_up()
        with pytest.raises(EngineError, match="the stream to Triton broke: the orchestrator closed it"):
            await stream.receive()
        await asyncio.sleep(0.05)

    calls = run(answer, scenario).calls
    assert [(call.body, call.is_cancelled) for call in calls] == [(b"over", False), (b"runs", True)]


def test_where_nobody_listens_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKETS_VARIABLE, f"{tmp_path}/none-")

    async def scenario() -> None:
        with pytest.raises(EngineError, match="no orchestrator listens"):
            await anext(ask(InferStreams(URL)).read())

    asyncio.run(scenario())


def test_an_orchestrator_that_does_not_come_to_take_more_is_overloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, so nobody shall think that it is lost."""
    monkeypatch.setenv(SOCKETS_VARIABLE, f"{tmp_path}/s-")
    monkeypatch.setattr(local_socket, "_CONNECT_TIMEOUT_S", 0.05)

    async def main() -> None:
        streams = InferStreams(URL, on_lost=lambda: pytest.fail("it was taken for lost"))
        with pytest.raises(OverloadedError, match="as many requests waiting as it takes") as refused:
            await anext(ask(streams).read())
        assert refused.value.headers == {"retry-after": "1"}
        await streams.close()

    path = socket_of(f"{tmp_path}/s-", URL, "orchestrator", "orchestrator_0_0")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as before:
        busy.bind(path)
        busy.listen(0)
        before.connect(path)
        uvloop.run(main())


def test_many_connect_at_once(run: Callable[..., Orchestrator]) -> None:
    """More than the kernel keeps waiting: it refuses them at once, which no caller shall hear of."""

    async def scenario(streams: InferStreams) -> None:
        async def one(number: int) -> int:
            return len([response async for response in ask(streams, b"%d" % number).read()])

        assert await asyncio.gather(*map(one, range(1500))) == [1] * 1500

    run(lambda call, sink: sink.send("done", final=True), scenario)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_a_stranger_to_the_protocol_ends_his_own_connection(tmp_path: Path, data: bytes) -> None:
    async def scenario() -> None:
        path = f"{tmp_path}/fuzz.sock"
        server = await listen(path, lambda request, sink: None)
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        too_much = (MAX_REQUEST_MESSAGE_BYTES + 1).to_bytes(4, "little")
        for message in (data, len(data).to_bytes(4, "little") + data, too_much):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(message)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
