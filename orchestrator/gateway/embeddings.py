"""`/v1/embeddings`: a Triton request for each input, which Triton batches; the answers as one JSON."""

from __future__ import annotations

import asyncio
import base64
import json
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from starlette.types import Receive, Scope, Send

from orchestrator.config import Embedder
from orchestrator.contracts import EMBEDDING_MODEL
from orchestrator.embedding.request import EmbeddingRequest, Input, parse_embedding_request
from orchestrator.embedding.window import choose_length, most_tokens, pad
from orchestrator.errors import ApiError, InvalidRequestError
from orchestrator.gateway.messages import attended, forwarded_headers
from orchestrator.gateway.places import Answer, json_body, send_answer
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.limits.client import Place

# Of one HTTP request: enough to fill two of Triton's batches, and few enough that a short text of somebody else, which
# queues behind them, does not wait for 256 long ones.
MAX_IN_FLIGHT = 16


class Embedding(NamedTuple):
    """`vector` is little-endian FP32."""

    vector: bytes
    num_tokens: int


class Embeddings:
    """An ASGI endpoint. For a client that leaves no further input is begun, and he pays for those that are done."""

    def __init__(self, triton: TritonClient, embedder: Embedder) -> None:
        self._triton = triton
        self._embedder = embedder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = Place()
        await send_answer(send, place, self._answer(scope, receive, place))

    async def _answer(self, scope: Scope, receive: Receive, place: Place) -> Answer:
        async with json_body(scope, receive, self._triton) as body:
            request, inputs = parse_embedding_request(body, self._embedder)
            return await self._embed_inputs(request, inputs, scope, receive, place)

    async def _embed_inputs(
        self, request: EmbeddingRequest, inputs: list[Input], scope: Scope, receive: Receive, place: Place
    ) -> Answer:
        is_list = isinstance(request.input, list) and not isinstance(request.input[0], int)
        lengths = [most_tokens(given) for given in inputs]
        async with attended(receive, place.cancel):
            embeddings = await self._triton.serve(
                place,
                EMBEDDING_MODEL,
                lengths,
                forwarded_headers(scope),
                partial(self._embed_all, inputs, is_list, place),
            )
        encode = _to_base64 if request.encoding_format == "base64" else _to_floats
        num_tokens = sum(embedding.num_tokens for embedding in embeddings)
        answer = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(embedding.vector)}
                for index, embedding in enumerate(embeddings)
            ],
            "model": self._embedder.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return Answer(json.dumps(answer).encode())

    async def _embed_all(
        self, inputs: list[Input], is_list: bool, place: Place, triton: TritonClient
    ) -> list[Embedding]:
        """In their order. The first `ApiError` cancels the place, so that no further one is begun."""
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        place.num_tokens = num_tokens = 0

        async def embed(index: int) -> Embedding:
            nonlocal num_tokens
            async with slots:
                place.raise_if_cancelled()
                try:
                    embedding = await self._embed(triton, inputs[index], f"input[{index}]" if is_list else "input")
                except ApiError as error:
                    await place.cancel(error)
                    raise
                place.num_tokens = num_tokens = num_tokens + embedding.num_tokens
                return embedding

        # All that was begun is awaited, also if one has failed.
        done = await asyncio.gather(*map(embed, range(len(inputs))), return_exceptions=True)
        for failed in done:
            if isinstance(failed, BaseException):
                raise failed
        return [embedding for embedding in done if isinstance(embedding, Embedding)]

    async def _embed(self, triton: TritonClient, given: Input, field: str) -> Embedding:
        if isinstance(given, str):
            try:
                return Embedding(*await triton.embed_text(given))
            except InvalidRequestError as error:  # which names the tensor
                raise InvalidRequestError(f"{field}: {error.message.partition(': ')[2]}", param=field) from error
        length = choose_length(len(given), self._embedder.max_input_tokens)
        input_ids, attention_mask = pad(given, length, self._embedder.pad_id)
        return Embedding(await triton.embed_ids(input_ids, attention_mask), len(given))


def _to_floats(vector: bytes) -> Any:
    return np.frombuffer(vector, "<f4").tolist()


def _to_base64(vector: bytes) -> Any:
    return base64.b64encode(vector).decode()
