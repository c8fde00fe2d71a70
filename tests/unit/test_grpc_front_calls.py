"""What strangers cost the gRPC front who send half, say nothing, or do not read, by an HTTP/2 client of our own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from test_grpc_front_relay import FakeTriton, fronted, make, one_event_then_the_end, response, wait_for
from tritonclient.grpc import service_pb2

from orchestrator.grpc_front.calls import _address

SERVICE = "/inference.GRPCInferenceService/"


class Stranger:
    """One connection whose windows open only when told to: 64 KiB of each answer arrive, and of all together."""

    def __init__(self, front: Any, address: str = "127.0.0.1") -> None:
        self._port = front.port
        self._address = address
        self.ends: dict[int, tuple[str | None, str]] = {}  # of RPCs by number: status and text
        self.num_bytes: Counter[int] = Counter()
        self._http = H2Connection(H2Configuration(client_side=True))

    async def __aenter__(self) -> Stranger:
        local = self._address, 0
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=local)
        self._http.initiate_connection()
        self._flush()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._reading

    def call(self, method: str, data: bytes = b"", *, ends: bool = False) -> int:
        """`data` is what is sent of a message's frame, of at most 64 KiB; `ends` says that nothing follows."""
        number = self._http.get_next_available_stream_id()
        head = {":method": "POST", ":scheme": "http", ":path": SERVICE + method, ":authority": "front"}
        self._http.send_headers(number, [*head.items(), ("content-type", "application/grpc"), ("te", "trailers")])
        for offset in range(0, len(data), 16384):
            self._http.send_data(number, data[offset : offset + 16384])
        if ends:
            self._http.end_stream(number)
        self._flush()
        return number

    def send(self, number: int, data: bytes) -> None:
        self._http.send_data(number, data)
        self._flush()

    def take(self, num_bytes: int, number: int) -> None:
        self._http.increment_flow_control_window(num_bytes)
        self._http.increment_flow_control_window(num_bytes, number)
        self._flush()

    async def _read(self) -> None:
        while data := await self._reader.read(65536):
            for event in self._http.receive_data(data):
                if isinstance(event, events.DataReceived):
                    self.num_bytes[event.stream_id] += len(event.data)
                elif isinstance(event, events.ResponseReceived | events.TrailersReceived):
                    headers = dict(event.headers)
                    if b"grpc-status" in headers:
                        status, text = headers[b"grpc-status"], headers.get(b"grpc-message", b"")
                        self.ends[event.stream_id] = status.decode(), text.decode()
                elif isinstance(event, events.StreamReset):
                    self.ends.setdefault(event.stream_id, (None, "reset"))
            self._flush()

    def _flush(self) -> None:
        self._writer.write(self._http.data_to_send())


def frame(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def code(status: grpc.StatusCode) -> str:
    return str(status.value[0])


def _have_ended(strangers: list[Stranger], count: int) -> bool:
    return sum(len(stranger.ends) for stranger in strangers) >= count


def _has_heard(fake: FakeTriton, count: int) -> bool:
    return len(fake.requests) == count


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_who_says_nothing_keeps_nobody_out(method: str) -> None:
    """Nor is more kept of him than of so many as may be idle."""

    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (_, stub, front), AsyncExitStack() as stack:
            strangers = [await stack.enter_async_context(Stranger(front)) for _ in range(9)]
            max_idle = 64 if method == "ServerLive" else 256
            for index, stranger in enumerate(strangers, 1):
                for _ in range(128):
                    stranger.call(method)
                await wait_for(partial(_have_ended, strangers, index * 128 - max_idle))
            assert (await stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=5)).ready
            assert (await stub.ModelInfer(make(), timeout=5)).raw_output_contents == [b"event"]
            stream = stub.ModelStreamInfer(iter((make(),)), timeout=5)
            assert len([each async for each in stream]) == 2
            ends = {end for stranger in strangers for end in stranger.ends.values()}
            text = "ended while it was idle: others need its place"
            assert ends == {(code(grpc.StatusCode.RESOURCE_EXHAUSTED), text)}

    asyncio.run(scenario())


def test_of_two_addresses_the_one_with_more_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.grpc_front.server._MAX_IDLE_RPCS", 4)

    async def scenario() -> None:
        async with (
            fronted(one_event_then_the_end) as (_, _, front),
            Stranger(front) as one,
            Stranger(front, "127.0.0.2") as other,
        ):
            other.call("ModelStreamInfer")
            await wait_for(lambda: len(front._relays) == 1)
            numbers = [one.call("ModelStreamInfer") for _ in range(6)]
            await wait_for(lambda: len(one.ends) == 3)
            assert sorted(one.ends) == numbers[:3] and not other.ends

    asyncio.run(scenario())


def test_one_address_does_not_get_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """With requests that run, of which none gives way."""
    monkeypatch.setattr("orchestrator.grpc_front.server._MAX_RPCS_PER_PEER", 3)

    async def never_ends(request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with fronted(never_ends) as (fake, stub, front):
            async with Stranger(front) as one, Stranger(front, "127.0.0.2") as other:
                for count in range(1, 4):
                    one.call("ModelInfer", frame(make()), ends=True)
                    await wait_for(partial(_has_heard, fake, count))
                refused = one.call("ModelInfer", frame(make()), ends=True)
                await wait_for(lambda: one.ends)
                text = "3 RPCs of your address run, which is the limit"
                assert one.ends == {refused: (code(grpc.StatusCode.RESOURCE_EXHAUSTED), text)}
                with pytest.raises(aio.AioRpcError, match="3 RPCs of your address run"):
                    await stub.ModelInfer(make())
                other.call("ModelInfer", frame(make()), ends=True)
                await wait_for(lambda: len(fake.requests) == 4)
            await wait_for(lambda: len(fake.cancelled) == 4)

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
@pytest.mark.parametrize("data", [b"", frame(make())[:-1]], ids=["nothing", "half a message"])
def test_a_message_comes_in_time_or_not_at_all(monkeypatch: pytest.MonkeyPatch, method: str, data: bytes) -> None:
    monkeypatch.setattr("orchestrator.grpc_front.calls.READ_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with fronted(one_event_then_the_end) as (_, _, front), Stranger(front) as stranger:
            number = stranger.call(method, data)
            await wait_for(lambda: stranger.ends)
            text = "no whole message came within 0.2 s"
            assert stranger.ends == {number: (code(grpc.StatusCode.DEADLINE_EXCEEDED), text)}

    asyncio.run(scenario())


def test_a_stream_on_which_nothing_runs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has sent something else than a request; what runs is not cut."""
    monkeypatch.setattr("orchestrator.grpc_front.relay.IDLE_TIMEOUT_S", 0.2)

    async def late(request: Any, context: Any) -> None:
        await asyncio.sleep(0.5)
        await one_event_then_the_end(request, context)

    async def scenario() -> None:
        async with fronted(late) as (_, stub, _):
            for message, num_responses in ((make(), 2), (service_pb2.ModelInferRequest(model_name="none"), 1)):
                stream = stub.ModelStreamInfer()
                await stream.write(message)
                for _ in range(num_responses):
                    await stream.read()
                with pytest.raises(aio.AioRpcError, match="nothing ran on the stream for 0.2 s") as caught:
                    await asyncio.wait_for(stream.read(), 5)
                assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(scenario())


def answer_of(num_bytes: int) -> Callable[[Any, Any], Any]:
    async def answer(request: Any, context: Any) -> None:
        await context.write(response(request, bytes(num_bytes), end=True))

    return answer


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_an_answer_that_is_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """gRPC frees its bytes when it ends the RPC, which it does only for one that nobody refers to any more."""
    for module in ("relay", "server"):
        monkeypatch.setattr(f"orchestrator.grpc_front.{module}.WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("orchestrator.grpc_front.relay._SLOW_S", 0.1)
    monkeypatch.setattr("orchestrator.grpc_front.relay.STATUS_TIMEOUT_S", 0.2)
    monkeypatch.setattr("orchestrator.grpc_front.calls._SHORT_STATUS_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with fronted(answer_of(2 << 20)) as (_, _, front), Stranger(front) as stranger:
            number = stranger.call(method, frame(make()), ends=True)
            await wait_for(lambda: stranger.ends)
            assert stranger.ends == {number: (code(grpc.StatusCode.CANCELLED), "CANCELLED")}
            assert stranger.num_bytes[number] <= 65535

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_unread_answers_have_a_limit_together(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The oldest of the address with most goes first."""
    monkeypatch.setattr("orchestrator.unread.MAX_UNREAD_BYTES", 5 << 20)
    monkeypatch.setattr("orchestrator.grpc_front.calls._SHORT_STATUS_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with (
            fronted(answer_of(2 << 20)) as (_, _, front),
            Stranger(front) as one,
            Stranger(front, "127.0.0.2") as other,
        ):
            first = other.call(method, frame(make()), ends=True)
            await wait_for(lambda: other.num_bytes[first] > 60_000)
            numbers = []
            for _ in range(2):
                numbers.append(one.call(method, frame(make()), ends=True))
                await wait_for(lambda: one.num_bytes.total() + 5 > 65535)
            await wait_for(lambda: one.ends)
            assert list(one.ends) == numbers[:1] and not other.ends
            other.take(3 << 20, first)
            await wait_for(lambda: other.ends)
            assert other.ends == {first: ("0", "")} and other.num_bytes[first] > 2 << 20

    asyncio.run(scenario())


def test_answers_that_wait_behind_an_unread_one_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.unread.MAX_UNREAD_BYTES", 3 << 20)
    monkeypatch.setattr("orchestrator.grpc_front.calls._SHORT_STATUS_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with fronted(answer_of(2 << 20)) as (_, _, front), Stranger(front) as stranger:
            number = stranger.call("ModelStreamInfer", 2 * frame(make()))
            await wait_for(lambda: stranger.ends)
            assert stranger.num_bytes[number] <= 65535
            await wait_for(lambda: not front._relays)

    asyncio.run(scenario())


def test_a_stream_takes_no_more_while_its_answers_are_not_read() -> None:
    async def scenario() -> None:
        async with fronted(answer_of(2 << 20)) as (fake, _, front), Stranger(front) as stranger:
            number = stranger.call("ModelStreamInfer", 2 * frame(make()))
            await wait_for(lambda: any(not relay._has_room.is_set() for relay in front._relays))
            stranger.send(number, 5 * frame(make()))
            await asyncio.sleep(0.2)
            assert len(fake.requests) <= 3  # one was being waited for
            for _ in range(7):
                stranger.take(2 << 20, number)
            stranger.take(1 << 20, number)
            await wait_for(lambda: stranger.num_bytes[number] > 7 * (2 << 20))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:4711", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", "10.0.0.1"),
    ],
)
def test_addresses_of_one_owner(peer: str, address: str) -> None:
    assert _address(peer) == address
