"""Which replica a request goes to, which are well, what happens when one is lost: fakes behind real gRPC."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.errors import ConnectionLostError, EngineError
from orchestrator.gateway.metrics import join_pages
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.limits.client import Place
from orchestrator.replica_set import Address, ReplicaSet
from orchestrator.replicas import LOAD_FACTOR, MAX_FAILURES, Replica, Replicas
from orchestrator.request import prefix_key, read_fields
from orchestrator.wire import mark_end

KEYS = [number.to_bytes(4, "big") for number in range(400)]


def known(*ports: int, version: int = 0, **states: Any) -> ReplicaSet:
    """A set of replicas a, b, c, ... at `ports`; `states` by name."""
    return ReplicaSet(
        artifact=Path("artifact"),
        version=version,
        replicas=tuple(
            Address(name=name, grpc_url=f"127.0.0.1:{port}", metrics_url="", state=states.get(name, "serving"))
            for name, port in zip("abcdefgh", ports)
        ),
    )


def make(num: int) -> Replicas:
    """None of them is ever asked."""
    return Replicas(known(*range(1, num + 1)))


def choices(replicas: Replicas) -> dict[bytes, str]:
    """Where each key goes while nobody has anything to do."""
    return {key: replicas.choose(key).name for key in KEYS}


# --- the choice --------------------------------------------------------------------------------------------


def test_every_replica_has_its_share_of_the_keys() -> None:
    found = list(choices(make(4)).values())
    assert all(60 < found.count(name) < 140 for name in "abcd")


@given(st.integers(2, 8), st.data())
def test_a_key_moves_only_when_its_replica_goes(num: int, data: st.DataObject) -> None:
    replicas = make(num)
    before = choices(replicas)
    gone = data.draw(st.sampled_from([replica.name for replica in replicas]))
    how = data.draw(st.sampled_from(["lost", "leaving", "down"]))
    if how == "lost":
        next(replica for replica in replicas if replica.name == gone).lose()
    else:
        replicas.update(known(*range(1, num + 1), **{gone: how}))
    after = choices(replicas)
    assert all(after[key] == before[key] for key in KEYS if before[key] != gone)
    assert gone not in after.values()
    replicas.update(known(*range(1, num + 1)))
    for replica in replicas:
        replica.is_up = True
    assert choices(replicas) == before


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200))
def test_nobody_is_far_above_the_mean(num: int, steps: list[tuple[bool, int]]) -> None:
    """Whatever comes and ends in whatever order; of equal keys too."""
    replicas = make(num)
    running: list[Replica] = []
    for comes, number in steps:
        if comes or not running:
            replica = replicas.choose(KEYS[number])
            replica.streams.num_live += 1
            running.append(replica)
            assert replica.num_live <= math.ceil(LOAD_FACTOR * len(running) / num) or num == 1
        else:
            running.pop(number % len(running)).streams.num_live -= 1


def test_without_a_key_who_has_least_to_do() -> None:
    replicas = make(3)
    for _ in range(30):
        replicas.choose().streams.num_live += 1
    assert [replica.num_live for replica in replicas] == [10, 10, 10]


def test_where_none_is_well_one_is_asked_all_the_same() -> None:
    replicas = make(2)
    for replica in replicas:
        replica.lose()
    assert replicas.choose(b"key").name in "ab"
    assert replicas.another(replicas.choose()) is None
    alone = make(1)
    assert alone.another(alone.choose()) is None


def test_the_beginning_of_a_conversation_and_its_caller_make_the_key() -> None:
    system = {"role": "system", "content": "Be brief."}
    first, answer, second = ({"role": role, "content": role + "!"} for role in ("user", "assistant", "user"))
    key = prefix_key({"messages": [system, first]}, "")
    assert prefix_key({"messages": [system, first, answer, {**second, "content": "?"}], "stream": True}, "") == key
    others = [
        prefix_key({"messages": [system, first]}, "Bearer x"),
        prefix_key({"messages": [first]}, ""),
        prefix_key({"messages": [system, {**first, "content": [{"type": "text", "text": "user!"}]}]}, ""),
        prefix_key({"prompt": "Be brief."}, ""),
        prefix_key({"messages": 5}, ""),
    ]
    assert len({key, *others}) == len(others) + 1
    for body in (b"5", b"{", b'{"messages": [' + b"0," * 500_000 + b"0]}"):
        assert read_fields(body) == {}


# --- which are well ----------------------------------------------------------------------------------------


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`answer` is called for each request on a stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = True
        self.requests: list[Any] = []
        self.answer: Callable[[Any, Any], Awaitable[None]] = self._answer
        self.server = aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.is_ready)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelInferResponse(model_name=self.name)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> None:
        async for request in requests:
            self.requests.append(request)
            await self.answer(request, context)

    async def _answer(self, request: Any, context: Any) -> None:
        payload = self.name.encode()
        if request.parameters[contracts.LIMITS_OPERATION_PARAMETER].string_param:
            payload = b'{"reservation": "r", "deadline": null}'
        await context.write(event(payload))
        end = service_pb2.ModelStreamInferResponse()
        mark_end(end)
        await context.write(end)


def event(payload: bytes) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name="event", datatype="BYTES", shape=[1])
    response.infer_response.raw_output_contents.append(len(payload).to_bytes(4, "little") + payload)
    return response


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Replicas, dict[str, FakeTriton]]]:
    fakes = {name: FakeTriton(name) for name in "ab"}
    for fake in fakes.values():
        await fake.server.start()
    replicas = Replicas(known(*(fake.port for fake in fakes.values())))
    try:
        yield replicas, fakes
    finally:
        await replicas.close()
        for fake in fakes.values():
            await fake.server.stop(None)


async def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), timeout_s)


def key_of(replicas: Replicas, name: str) -> dict[str, Any]:
    """Fields of a request that goes to the replica of this name."""
    for number in range(1000):
        fields = {"prompt": f"number {number}"}
        if replicas.choose(prefix_key(fields, "")).name == name:
            return fields
    raise AssertionError(name)


async def ask(triton: TritonClient, fields: dict[str, Any]) -> list[bytes]:
    return [event async for event in triton.open(b"{}", (), fields).read()]


def test_one_is_well_until_three_probes_fail_and_again_after_one() -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            replica = replicas.choose()
            fake = fakes[replica.name]
            fake.is_ready = False
            for _ in range(MAX_FAILURES - 1):
                await replica.probe({})
            assert replica.is_up
            await replica.probe({})
            assert not replica.is_up
            fake.is_ready = True
            await replica.probe({})
            assert replica.is_up
            await fake.server.stop(None)
            await replica.probe({})  # it is gone: once is enough
            assert not replica.is_up

    asyncio.run(scenario())


def test_a_request_without_an_answer_is_asked_of_another_when_its_replica_dies() -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            triton = TritonClient(replicas)
            fields = key_of(replicas, "a")
            assert await ask(triton, fields) == [b"a"]

            stopping: list[Any] = []

            async def die(request: Any, context: Any) -> None:
                stopping.append(asyncio.create_task(fakes["a"].server.stop(0)))
                await asyncio.Event().wait()

            fakes["a"].answer = die
            assert await ask(triton, fields) == [b"b"]
            assert [replica.num_live for replica in replicas] == [0, 0]
            assert fakes["a"].requests[-1].id == fakes["b"].requests[-1].id
            assert await ask(triton, fields) == [b"b"]  # not tried there again
            assert [replica.is_up for replica in replicas] == [False, True]

    asyncio.run(scenario())


def test_a_request_that_has_begun_to_be_answered_ends_with_an_error() -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            stopping: list[Any] = []

            async def die(request: Any, context: Any) -> None:
                await context.write(event(b"a"))
                await asyncio.sleep(0.05)  # the first response is on its way
                stopping.append(asyncio.create_task(fakes["a"].server.stop(0)))
                await asyncio.Event().wait()

            fakes["a"].answer = die
            heard = []
            with pytest.raises(ConnectionLostError):
                async for each in TritonClient(replicas).open(b"{}", (), key_of(replicas, "a")).read():
                    heard.append(each)
            assert heard == [b"a"] and not fakes["b"].requests

    asyncio.run(scenario())


def test_where_both_are_gone_the_error_is_told_once() -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            for fake in fakes.values():
                await fake.server.stop(None)
            with pytest.raises(EngineError, match="the stream to Triton broke"):
                await ask(TritonClient(replicas), key_of(replicas, "a"))

    asyncio.run(scenario())


def test_a_place_is_taken_where_its_work_is_done() -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            triton = TritonClient(replicas)

            async def work(pinned: TritonClient) -> str:
                return (await pinned._pinned.streams.infer(service_pb2.ModelInferRequest())).model_name  # type: ignore[union-attr]

            def operations(name: str) -> list[str]:
                asked = [request.parameters[contracts.LIMITS_OPERATION_PARAMETER] for request in fakes[name].requests]
                return sorted(each.string_param for each in asked)

            name = await triton.serve(Place(), "embedding", [3], (), work)
            await wait_for(lambda: operations(name) == ["admit", "settle"])
            other = "b" if name == "a" else "a"
            assert not fakes[other].requests
            # The next one's turn is the other's, which is gone: nothing was begun there.
            await fakes[other].server.stop(None)
            assert await triton.serve(Place(), "embedding", [3], (), work) == name
            with pytest.raises(ConnectionLostError):
                await next(each for each in replicas if each.name == other).streams.infer(
                    service_pb2.ModelInferRequest()
                )

    asyncio.run(scenario())


def test_a_replica_that_comes_back_is_asked_again() -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            running = asyncio.create_task(replicas.run())
            triton, fields = TritonClient(replicas), key_of(replicas, "a")
            assert await ask(triton, fields) == [b"a"]
            await fakes["a"].server.stop(None)
            assert await ask(triton, fields) == [b"b"]
            again = FakeTriton("again")
            await again.server.stop(None)
            again.server = aio.server()
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(again, again.server)
            assert again.server.add_insecure_port(f"127.0.0.1:{fakes['a'].port}") == fakes["a"].port
            await again.server.start()
            await wait_for(lambda: all(replica.is_up for replica in replicas))
            assert await ask(triton, fields) == [b"again"]
            running.cancel()
            await again.server.stop(None)

    asyncio.run(scenario())


def test_the_set_follows_its_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two() as (replicas, fakes):
            path = tmp_path / "replicas.json"
            ports = [fake.port for fake in fakes.values()]
            known(*ports).write(path)
            versions = []
            running = asyncio.create_task(replicas.run(path, lambda each: versions.append(each.known.version)))
            old = replicas.choose()
            stream = old.streams.borrow("tts")
            known(*ports, version=1, **{old.name: "leaving"}).write(path)
            await wait_for(lambda: versions and versions[-1] == 1)
            assert [replica.name for replica in replicas.serving] == ["b" if old.name == "a" else "a"]
            path.write_text("{")  # nobody writes it so; what is known stays
            await asyncio.sleep(0.6)
            assert replicas.known.version == 1
            known(ports[1], version=2).write(path)
            await wait_for(lambda: versions[-1] == 2)
            assert [replica.address.grpc_url for replica in replicas.serving] == [f"127.0.0.1:{ports[1]}"]
            assert old.num_live == 1
            await old.streams.give_back(stream)
            running.cancel()

    asyncio.run(scenario())


# --- their metrics -----------------------------------------------------------------------------------------


def test_the_pages_of_several_become_one() -> None:
    page = b"""\
# HELP rt_live Requests
# TYPE rt_live gauge
rt_live{model="x",version="1"} %d
# HELP nv_used Memory
# TYPE nv_used counter
nv_used 5
"""
    assert join_pages({"triton-0": page % 1, "triton-1": page % 2}) == (
        b"# HELP rt_live Requests\n# TYPE rt_live gauge\n"
        b'rt_live{replica="triton-0",model="x",version="1"} 1\nrt_live{replica="triton-1",model="x",version="1"} 2\n'
        b"# HELP nv_used Memory\n# TYPE nv_used counter\n"
        b'nv_used{replica="triton-0"} 5\nnv_used{replica="triton-1"} 5\n'
    )
