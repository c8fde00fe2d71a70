"""The gRPC front between real gRPC clients and a fake Triton, all in this process."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.grpc_front.__main__ import run
from orchestrator.grpc_front.calls import Server
from orchestrator.grpc_front.server import Front, Served
from orchestrator.local_socket import SOCKETS_VARIABLE, LocalSink, listen, socket_of
from orchestrator.replica_set import find_replicas
from orchestrator.replicas import Replicas
from orchestrator.wire import ASK_FOR_END, add_string, new_request

Answer = Callable[[Any, Any], Awaitable[None]]

# gRPC's asyncio part ends with its last object, whenever the garbage collector finds that, and then may wait forever
# for its own thread. Begun once more than it is ended, it stays.
aio.init_grpc_aio()


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each request of a stream by `answer(request, context)`; keeps what it was sent."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_ready = True
        self.requests: list[Any] = []
        self.cancelled: list[str] = []

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.is_ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.is_ready)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> None:
        live: dict[str, asyncio.Task[None]] = {}
        try:
            async for request in requests:
                if contracts.CANCEL_PARAMETER in request.parameters:
                    self.cancelled.append(request.id)
                    await context.write(response(request, end=True))
                    live[request.id].cancel()
                    await context.write(response(request, end=True))
                    continue
                self.requests.append(request)
                live[request.id] = asyncio.create_task(self.answer(request, context))
        finally:  # also of one that broke the stream
            await asyncio.gather(*live.values(), return_exceptions=True)


def response(request: Any, payload: bytes | None = None, *, end: bool = False) -> Any:
    """As Triton answers `request`."""
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.id = request.id
    message.infer_response.parameters["triton_final_response"].bool_param = end
    if payload is not None:
        message.infer_response.outputs.add(name="event", datatype="BYTES", shape=[1])
        message.infer_response.raw_output_contents.append(payload)
    return message


def make(request_id: str = "mine", *, asks_for_end: bool = True) -> Any:
    request = new_request(contracts.ORCHESTRATOR_MODEL, request_id)
    add_string(request, contracts.REQUEST, b"{}")
    if not asks_for_end:
        del request.parameters[ASK_FOR_END]
    return request


@asynccontextmanager
async def fronted(answer: Answer, engines: Sequence[str] = ()) -> AsyncIterator[tuple[FakeTriton, Any, Front]]:
    """A fake Triton, a stub that talks to it through the front, and the front."""
    fake = FakeTriton(answer)
    triton = aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, triton)
    port = triton.add_insecure_port("127.0.0.1:0")
    await triton.start()
    try:
        replicas = Replicas(find_replicas(None, Path(), f"127.0.0.1:{port}"))
        front = Front(replicas, Served(dict.fromkeys(engines, "engine"), max_batch=8))
        server = front.new_server()
        front_port = server.add_insecure_port(b"127.0.0.1:0")
        await server.start()
        front.port = front_port  # type: ignore[attr-defined]
        try:
            any_size = (("grpc.max_receive_message_length", -1),)  # as `tritonclient` has it
            async with aio.insecure_channel(f"127.0.0.1:{front_port}", any_size) as to_front:
                yield fake, service_pb2_grpc.GRPCInferenceServiceStub(to_front), front
        finally:
            await server.shutdown(None)
            await replicas.close()
    finally:
        await triton.stop(None)


async def wait_for(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), timeout_s)


async def one_event_then_the_end(request: Any, context: Any) -> None:
    await context.write(response(request, b"event"))
    await context.write(response(request, end=True))


def test_ids_are_ours_on_the_way_in_and_theirs_on_the_way_out() -> None:
    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (fake, stub, _):
            responses = [got async for got in stub.ModelStreamInfer(iter((make("same"), make("same"), make(""))))]
            assert sorted(got.infer_response.id for got in responses) == ["", "", *["same"] * 4]
            ids = [request.id for request in fake.requests]
            assert len(set(ids)) == 3 and all(len(request_id) == 32 for request_id in ids)

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_who_has_said_all_still_hears_all(call: str) -> None:
    """gRPC ends the caller's side with his last message, of a unary call with its only one."""

    async def late(request: Any, context: Any) -> None:
        await asyncio.sleep(0.1)
        await one_event_then_the_end(request, context)

    async def scenario() -> None:
        async with fronted(late) as (fake, stub, _):
            if call == "ModelInfer":
                outputs = [(await stub.ModelInfer(make())).raw_output_contents]
            else:
                stream = stub.ModelStreamInfer()
                await stream.write(make(asks_for_end=False))
                await stream.done_writing()
                outputs = [got.infer_response.raw_output_contents async for got in stream]
            assert outputs == [[b"event"]] and fake.cancelled == []

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_a_whole_answer_may_be_longer_than_grpc_has_it(call: str) -> None:
    answer = bytes(5 << 20)  # gRPC's limit is 4 MiB

    async def long(request: Any, context: Any) -> None:
        await context.write(response(request, answer, end=True))

    async def scenario() -> None:
        async with fronted(long) as (_, stub, _):
            if call == "ModelInfer":
                outputs = [(await stub.ModelInfer(make())).raw_output_contents]
            else:
                outputs = [
                    got.infer_response.raw_output_contents async for got in stub.ModelStreamInfer(iter((make(),)))
                ]
            assert outputs == [[answer]]

    asyncio.run(scenario())


@pytest.mark.parametrize("asks", [True, False])
def test_an_empty_end_is_for_those_who_ask(asks: bool) -> None:
    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (fake, stub, _):
            responses = [got async for got in stub.ModelStreamInfer(iter((make(asks_for_end=asks),)))]
            assert len(responses) == (2 if asks else 1)
            assert fake.requests[0].parameters[ASK_FOR_END].bool_param

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_headers_arrive_as_triton_forwards_them(call: str) -> None:
    """As string parameters, exactly those of the contract; one of both wins as in Triton: the header."""

    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (fake, stub, _):
            request = make()
            request.parameters["x-deadline-ms"].string_param = "100"
            request.parameters["traceparent"].string_param = "parameter"
            metadata = (
                ("x-deadline-ms", "500"),
                ("authorization", "Bearer k"),
                ("cookie", "c"),
                ("x-bin-bin", b"\xff"),
            )
            if call == "ModelInfer":
                await stub.ModelInfer(request, metadata=metadata)
            else:
                async for _ in stub.ModelStreamInfer(iter((request,)), metadata=metadata):
                    pass
            got = {name: value.string_param for name, value in fake.requests[0].parameters.items()}
            del got[ASK_FOR_END], got[contracts.SAYS_CANCELS_PARAMETER]
            assert got == {"x-deadline-ms": "500", "authorization": "Bearer k", "traceparent": "parameter"}

    asyncio.run(scenario())


@pytest.mark.parametrize("name", contracts.SINGLE_HEADERS)
def test_a_header_that_came_twice_is_refused(name: str) -> None:
    """As over HTTP; lists are joined."""

    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (fake, stub, _):
            metadata = ((name, "1"), (name, "1"))
            with pytest.raises(aio.AioRpcError) as caught:
                await stub.ModelInfer(make(), metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            (got,) = [got async for got in stub.ModelStreamInfer(iter((make(),)), metadata=metadata)]
            for message in (str(caught.value.details()), got.error_message):
                error = json.loads(message)["error"]
                assert error["message"] == f"{name}: sent twice in the metadata; once is allowed"
                assert error["param"] == name
            assert fake.requests == []
            lists = (("cache-control", "no-store"), ("tracestate", "a=1"), ("cache-control", "no-cache"))
            await stub.ModelInfer(make(), metadata=lists)
            parameters = fake.requests[0].parameters
            got_lists = {each: parameters[each].string_param for each in contracts.LIST_HEADERS}
            assert got_lists == {"cache-control": "no-store, no-cache", "tracestate": "a=1"}

    asyncio.run(scenario())


def test_a_caller_that_leaves_is_told_to_triton_at_once() -> None:
    async def never_ends(request: Any, context: Any) -> None:
        await context.write(response(request, b"event"))
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with fronted(never_ends) as (fake, stub, _):
            stream = stub.ModelStreamInfer()
            for request_id in ("a", "b"):
                await stream.write(make(request_id))
            await stream.read(), await stream.read()
            stream.cancel()
            await wait_for(lambda: len(fake.cancelled) == 2, 1.0)
            assert sorted(fake.cancelled) == sorted(request.id for request in fake.requests)
            with pytest.raises(aio.AioRpcError):
                await stub.ModelInfer(make(), timeout=0.2)
            await wait_for(lambda: len(fake.cancelled) == 3, 1.0)

    asyncio.run(scenario())


def _has_relays(front: Front, count: int) -> bool:
    return len(front._relays) == count


def test_no_more_rpcs_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one connection they wait their turn; beyond all connections' limit the idle ones give way."""
    monkeypatch.setattr("orchestrator.grpc_front.server._MAX_RPCS", 130)

    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (_, stub, front):
            streams = [stub.ModelStreamInfer() for _ in range(135)]
            await wait_for(lambda: len(front._relays) == 128)
            await asyncio.sleep(0.2)
            assert len(front._relays) == 128
            for stream in streams:
                stream.cancel()
            await wait_for(lambda: not front._relays)
            monkeypatch.undo()

    asyncio.run(scenario())

    async def crowd() -> None:
        monkeypatch.setattr("orchestrator.grpc_front.server._MAX_RPCS", 3)
        async with fronted(one_event_then_the_end) as (_, stub, front):
            streams = []
            for count in (1, 2, 3):  # the order in which they arrive is gRPC's
                streams.append(stub.ModelStreamInfer())
                await wait_for(partial(_has_relays, front, count))
            assert (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
            await stub.ModelStreamInfer(iter((make(),))).read()  # in the place of the one that is idle for longest
            with pytest.raises(aio.AioRpcError) as caught:
                await streams[0].read()
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            await wait_for(lambda: len(front._relays) == 2)

    asyncio.run(crowd())


def test_a_server_that_ends_by_itself_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, artifact: Callable[[str], Path]
) -> None:
    async def ends(self: Server, timeout_s: float | None) -> None:
        return None

    monkeypatch.setattr(Server, "wait_for_termination", ends)
    args = argparse.Namespace(
        replicas=None, triton_grpc="127.0.0.1:1", host="127.0.0.1", port=0, cert=None, drain_timeout_s=1
    )
    args.artifact = artifact("scripted")
    with pytest.raises(SystemExit, match="ended by itself"):
        asyncio.run(run(args))


def test_what_the_front_knows_of_the_artifact(artifact: Callable[[str], Path]) -> None:
    without_ocr = ("orchestrator", "embedding")
    engines = {"llm_small": "engine"}
    assert Served.read(artifact("scripted")) == Served(engines, max_batch=8, models=without_ocr)
    assert Served.read(artifact("cpu")) == Served(engines, max_batch=8, models=(*without_ocr, "ocr"))


@pytest.mark.parametrize("fault", [None, "triton", "engine"])
def test_ready_means_that_the_engine_answers(fault: str | None) -> None:
    """Triton goes on to call a model ready whose engine has died."""

    async def answer(request: Any, context: Any) -> None:
        message = response(request, end=True)
        if fault == "engine":
            message.error_message = "the engine is gone"
        await context.write(message)

    async def scenario() -> None:
        async with fronted(answer, ("llm_small",)) as (fake, stub, _):
            fake.is_ready = fault != "triton"
            is_ready = fault is None
            assert (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready == is_ready
            for model, expected in (("orchestrator", is_ready), ("embedding", fault != "triton")):
                assert (await stub.ModelReady(service_pb2.ModelReadyRequest(name=model))).ready == expected

    asyncio.run(scenario())


def test_a_version_that_does_not_exist_is_not_found() -> None:
    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (_, stub, _):
            with pytest.raises(aio.AioRpcError) as got:
                await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="orchestrator", version="99"))
            assert got.value.code() == grpc.StatusCode.NOT_FOUND
            assert "model_version: must be 1, or empty (got '99')" in (got.value.details() or "")

    asyncio.run(scenario())


def test_half_a_million_parts_hold_nobody_up() -> None:
    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (fake, stub, _):
            channel_call = stub.ModelInfer
            data = make().SerializeToString() + b"\x2a\x00" * 500_000
            crowded = service_pb2.ModelInferRequest.FromString(data)
            with pytest.raises(aio.AioRpcError) as got:
                await channel_call(crowded)
            assert "inputs: at most 16 are allowed" in (got.value.details() or "")
            (answer, *_) = [each async for each in stub.ModelStreamInfer(iter((crowded,)))]
            assert "inputs: at most 16 are allowed" in answer.error_message
            assert fake.requests == []

    asyncio.run(scenario())


def test_what_has_ended_is_not_cancelled() -> None:
    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (fake, stub, _):
            stream = stub.ModelStreamInfer()
            await stream.write(make())
            await stream.read(), await stream.read()
            stream.cancel()
            await asyncio.sleep(0.1)
            assert fake.cancelled == []

    asyncio.run(scenario())


def test_a_slow_reader_holds_triton_back() -> None:
    """Of 64 MB that Triton has to say, what the two connections' windows hold is taken from it, and no more."""
    said = 0

    async def says_much(request: Any, context: Any) -> None:
        nonlocal said
        for _ in range(1000):
            await context.write(response(request, bytes(64 << 10)))
            said += 1
        await context.write(response(request, end=True))

    async def scenario() -> None:
        async with fronted(says_much) as (_, stub, _):
            stream = stub.ModelStreamInfer(iter((make(),)))
            await stream.read()
            await asyncio.sleep(0.5)
            held = said
            await asyncio.sleep(0.3)
            assert said == held < 300
            num_rest = 0
            while await stream.read() is not aio.EOF:
                num_rest += 1
            assert num_rest == 1000  # nothing is lost

    asyncio.run(scenario())


def test_a_caller_that_does_not_read_is_ended_and_told_when_he_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the orchestrator keeps nothing for him."""
    monkeypatch.setattr("orchestrator.grpc_front.relay.WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setenv(SOCKETS_VARIABLE, f"{tmp_path}/s-")
    running: dict[str, tuple[LocalSink, asyncio.Task[None]]] = {}

    async def says_much(sink: LocalSink) -> None:
        while True:
            sink.send("x" * 10_000, final=False)
            await asyncio.sleep(0.001)

    def receive(request: Any, sink: LocalSink) -> None:
        if contracts.CANCEL_PARAMETER in request.parameters:
            to_end, task = running.pop(request.id)
            task.cancel()
            to_end.send(None, final=True)
            sink.send(None, final=True)
        else:
            running[request.id] = sink, asyncio.create_task(says_much(sink))

    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (_, stub, front):
            (replica,) = front._replicas.serving
            path = socket_of(f"{tmp_path}/s-", replica.streams._url, contracts.ORCHESTRATOR_MODEL, "0")
            server = await listen(path, receive)
            stream = stub.ModelStreamInfer()
            for request_id in ("a", "b"):
                await stream.write(make(request_id))
            await stream.read()
            await wait_for(lambda: len(running) == 2)
            await wait_for(lambda: not running)
            await wait_for(lambda: all(not relay._live for relay in front._relays))
            with pytest.raises(aio.AioRpcError, match="no response was read for 0.2 s") as caught:
                while await stream.read() is not aio.EOF:
                    pass
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await wait_for(lambda: not front._relays)
            server.close()

    asyncio.run(scenario())


def test_triton_refuses_a_request_itself() -> None:
    """With a text and no mark of an end."""

    async def refuses(request: Any, context: Any) -> None:
        await context.write(service_pb2.ModelStreamInferResponse(error_message="no such version"))

    async def scenario() -> None:
        async with fronted(refuses) as (_, stub, _):
            (got,) = [got async for got in stub.ModelStreamInfer(iter((make(),)))]
            assert (got.error_message, got.infer_response.id) == ("no such version", "mine")
            with pytest.raises(aio.AioRpcError, match="no such version") as caught:
                await stub.ModelInfer(make())
            assert caught.value.code() == grpc.StatusCode.INTERNAL

    asyncio.run(scenario())


def test_triton_ends_in_the_midst() -> None:
    async def breaks(request: Any, context: Any) -> None:
        await context.write(response(request, b"event"))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    async def scenario() -> None:
        async with fronted(breaks) as (_, stub, _):
            first, last = [got async for got in stub.ModelStreamInfer(iter((make(),)))]
            assert first.infer_response.outputs
            error = json.loads(last.error_message)["error"]
            assert error["code"] == "engine_error" and "UNAVAILABLE: broken" in error["message"]
            assert last.infer_response.parameters["triton_final_response"].bool_param

    asyncio.run(scenario())


def test_draining_ends_streams_that_are_idle_and_lets_the_others_finish() -> None:
    go = asyncio.Event()

    async def waits(request: Any, context: Any) -> None:
        await context.write(response(request, b"one"))
        await go.wait()
        await context.write(response(request, b"two", end=True))

    async def scenario() -> None:
        async with fronted(waits) as (_, stub, front):
            idle, busy = stub.ModelStreamInfer(), stub.ModelStreamInfer(iter((make(),)))
            await idle.wait_for_connection(), await busy.read()
            await wait_for(lambda: len(front._relays) == 2)
            front.drain()
            with pytest.raises(aio.AioRpcError, match="shutting down"):
                await idle.read()
            go.set()
            assert (await busy.read()).infer_response.raw_output_contents == [b"two"]
            with pytest.raises(aio.AioRpcError, match="shutting down") as caught:
                await busy.read()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())
