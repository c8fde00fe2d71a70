"""The way to engines of text, NVIDIA's LLM-API model, by its tensor contract: text in, all the text so far out.

What differs from the engines of tokens, as NVIDIA's model has it: every answer is cumulative; the prompt is echoed
unless told otherwise; a stop is answered with an error, and so is what it stops; what is declared as a number may come
as text. Nothing that only the last of these tells is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection
from typing import Any

from orchestrator import contracts
from orchestrator.engines import Chunk, EngineRequest
from orchestrator.errors import EngineError
from orchestrator.generation import EngineClient
from orchestrator.infer_streams import InferStream, InferStreams
from orchestrator.triton.engine_client import GrpcEngineClient
from orchestrator.wire import add_string, add_values, find_output, is_end, new_request, read_strings, stop_text_request

# What a decoder makes of the first bytes of a character.
REPLACEMENT = "\ufffd"


class GrpcTextClient:
    """An `EngineClient` of engines of text, for one event loop."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request."""
        self._streams = InferStreams(url)
        self._live: dict[str, InferStream] = {}
        self._stopped: set[str] = set()

    async def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        stream = self._streams.borrow(model)
        self._live[request.request_id] = stream
        ended, said = False, ""
        try:
            await stream.send(build_request(model, request))
            while not ended:
                response = await stream.receive()
                ended = is_end(response)
                if response.error_message:
                    ended = True
                    if request.request_id in self._stopped:
                        return  # the stop's answer, or that of what it stopped
                    raise EngineError(response.error_message)
                text = _read_first(response, contracts.TEXT_OUTPUT)
                if text is not None:
                    reason = _read_first(response, contracts.FINISH_REASON)
                    delta, said = _advance(said, text, is_last=ended)
                    yield Chunk([], text=delta, at_limit=reason == "length")
        finally:
            if not ended:
                with contextlib.suppress(EngineError):  # a stream that broke has nothing to stop
                    await self.stop(model, request.request_id)
            del self._live[request.request_id]
            await stream.drain()
            self._stopped.discard(request.request_id)
            await self._streams.give_back(stream)

    async def stop(self, model: str, request_id: str) -> None:
        if stream := self._live.get(request_id):
            self._stopped.add(request_id)
            await stream.send(stop_text_request(model, request_id))

    async def close(self) -> None:
        """End every stream."""
        await self._streams.close()


class EngineClients:
    """Both kinds of engines behind one `EngineClient`; `text_models` are those of text."""

    def __init__(self, tokens: GrpcEngineClient, text: GrpcTextClient, text_models: Collection[str]) -> None:
        self._tokens = tokens
        self._text = text
        self._text_models = frozenset(text_models)

    def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        return self._client(model).stream(model, request)

    async def stop(self, model: str, request_id: str) -> None:
        await self._client(model).stop(model, request_id)

    async def close(self) -> None:
        """End every stream."""
        await self._tokens.close()
        await self._text.close()

    def _client(self, model: str) -> EngineClient:
        return self._text if model in self._text_models else self._tokens


def build_request(model: str, request: EngineRequest) -> Any:
    """`request` by NVIDIA's text contract, streaming; stop strings are ours to find."""
    assert request.prompt is not None
    message = new_request(model, request.request_id)
    add_string(message, contracts.TEXT_INPUT, request.prompt.encode())
    add_values(message, contracts.TEXT_STREAMING, True)
    add_values(message, contracts.EXCLUDE_INPUT_FROM_OUTPUT, True)
    add_values(message, contracts.RETURN_FINISH_REASON, True)
    add_values(message, contracts.SAMPLING_MAX_TOKENS, request.max_new_tokens)
    if request.sample:
        add_values(message, contracts.SAMPLING_TEMPERATURE, request.temperature)
        add_values(message, contracts.SAMPLING_TOP_P, request.top_p)
    if request.top_k or not request.sample:
        add_values(message, contracts.SAMPLING_TOP_K, request.top_k if request.sample else 1)
    if request.seed is not None:
        add_values(message, contracts.SAMPLING_SEED, request.seed)
    for spec, value in (
        (contracts.SAMPLING_PRESENCE_PENALTY, request.presence_penalty),
        (contracts.SAMPLING_FREQUENCY_PENALTY, request.frequency_penalty),
    ):
        if value:
            add_values(message, spec, value)
    for output in (contracts.TEXT_OUTPUT, contracts.FINISH_REASON):
        message.outputs.add(name=output.name)
    return message


def _read_first(response: Any, spec: contracts.TensorSpec) -> str | None:
    raw = find_output(response, spec)
    texts = [] if raw is None else read_strings(raw)
    return texts[0].decode(errors="replace") if texts else None


def _advance(said: str, text: str, *, is_last: bool) -> tuple[str, str]:
    """What is new of the cumulative `text` after `said`, and what has been said then.

    The beginning of a character is held until the rest is there, at the end for good.
    """
    certain = text.rstrip(REPLACEMENT)
    if not certain.startswith(said):
        if is_last and said.startswith(certain):
            return "", said
        raise EngineError("the engine took back a part of its answer")
    return certain[len(said) :], certain
