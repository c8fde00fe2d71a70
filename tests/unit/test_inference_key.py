"""The key of Triton's own ports: who has it, and what is said without. A fake behind real gRPC refuses as Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.config import ConfigError
from orchestrator.errors import ConnectionLostError, EngineError
from orchestrator.infer_streams import InferStreams, Responses, ask_once
from orchestrator.inference_key import INFERENCE_KEY_METADATA, INFERENCE_KEY_VARIABLE, LOCKED_OUT, find_inference_key
from orchestrator.wire import mark_end, new_request

KEY = "the-key_0123456789-0123456789-0123456789"


class LockedTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """It refuses a stream when it is opened, as Triton does, before it has read anything."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        await self._check(context)
        return service_pb2.ModelInferResponse(model_name=request.model_name)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._check(context)
        async for _ in requests:
            response = service_pb2.ModelStreamInferResponse()
            mark_end(response)
            await context.write(response)

    async def _check(self, context: Any) -> None:
        if (INFERENCE_KEY_METADATA, KEY) not in context.invocation_metadata():
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"This protocol is restricted, expecting header '{INFERENCE_KEY_METADATA}'"
            )


@asynccontextmanager
async def locked_triton() -> AsyncIterator[InferStreams]:
    """Streams to one, by this process' environment."""
    server = aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(LockedTriton(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    streams = InferStreams(f"127.0.0.1:{port}")
    try:
        yield streams
    finally:
        await streams.close()
        await server.stop(None)


async def read(streams: InferStreams) -> list[Any]:
    responses = Responses(streams, new_request(contracts.ORCHESTRATOR_MODEL, "id"))
    return [response async for response in responses.read()]


def test_with_the_key_everything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INFERENCE_KEY_VARIABLE, KEY)

    async def scenario() -> None:
        async with locked_triton() as streams:
            assert len(await read(streams)) == 1
            assert (await ask_once(streams, new_request("embedding"))).infer_response.model_name == "embedding"

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["", KEY[:-1] + "x"])
def test_without_it_the_answer_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Each time, though gRPC does not always tell how a stream ended that was written to."""
    monkeypatch.setenv(INFERENCE_KEY_VARIABLE, key)

    async def scenario() -> None:
        async with locked_triton() as streams:
            for _ in range(50):
                with pytest.raises(EngineError) as caught:
                    await read(streams)
                assert caught.value.message == LOCKED_OUT and not isinstance(caught.value, ConnectionLostError)
            with pytest.raises(EngineError, match=INFERENCE_KEY_VARIABLE):
                await ask_once(streams, new_request("embedding"))

    asyncio.run(scenario())


@pytest.mark.parametrize("environ", [{}, {INFERENCE_KEY_VARIABLE: ""}])
def test_there_may_be_none(environ: dict[str, str]) -> None:
    assert find_inference_key(environ) is None


def test_one_that_was_chosen_is_taken() -> None:
    assert find_inference_key({INFERENCE_KEY_VARIABLE: KEY}) == KEY


@pytest.mark.parametrize("key", ["short", "a" * 129, f"{KEY}\n", f"{KEY},x=y", f"{KEY} ", "ü" * 40])
def test_what_cannot_be_one_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_inference_key({INFERENCE_KEY_VARIABLE: key})
    message = str(caught.value)
    assert message.startswith(
        f"{INFERENCE_KEY_VARIABLE}: its value is not allowed; 32 to 128 letters, digits, - and _\nfix: "
    )
    assert key.strip() not in message
