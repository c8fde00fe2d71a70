"""`/v1/embeddings`: a Triton request for each input, which Triton batches; the answers as one JSON."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from starlette.types import Receive, Scope, Send

from orchestrator.config import Embedder
from orchestrator.contracts import EMBEDDING_MODEL
from orchestrator.embedding.request import Input, parse_embedding_request
from orchestrator.embedding.window import choose_length, most_tokens, pad
from orchestrator.errors import ApiError, InvalidRequestError
from orchestrator.gateway.messages import (
    ClientLeft,
    encode_headers,
    forwarded_headers,
    look_at,
    read_json_body,
    send_error,
    send_json,
    wait_until_client_leaves,
)
from orchestrator.gateway.triton_client import TritonClient

# Of one HTTP request: enough to fill two of Triton's batches, and few enough that a short text of somebody else, which
# queues behind them, does not wait for 256 long ones.
MAX_IN_FLIGHT = 16


class Embedding(NamedTuple):
    """`vector` is little-endian FP32."""

    vector: bytes
    num_tokens: int


@dataclass
class _Done:
    """What was embedded so far."""

    num_tokens: int = 0


class Embeddings:
    """An ASGI endpoint. For a client that leaves no further input is begun, and he pays for those that are done."""

    def __init__(self, triton: TritonClient, embedder: Embedder, *, with_keys: bool) -> None:
        self._triton = triton
        self._embedder = embedder
        self._with_keys = with_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation, done = None, _Done()
        try:
            body = await read_json_body(scope, receive)
            request, inputs = parse_embedding_request(body, self._embedder)
            if self._with_keys:
                lengths = [most_tokens(given) for given in inputs]
                reservation = await self._triton.limits.reserve(EMBEDDING_MODEL, lengths, forwarded_headers(scope))
            is_list = isinstance(request.input, list) and not isinstance(request.input[0], int)
            embeddings = await self._embed_all(inputs, is_list, receive, done)
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        finally:
            if reservation is not None:
                self._triton.limits.settle(reservation, done.num_tokens)
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
        headers = {} if reservation is None else reservation.headers
        await send_json(send, 200, json.dumps(answer).encode(), encode_headers(headers))

    async def _embed_all(self, inputs: list[Input], is_list: bool, receive: Receive, done: _Done) -> list[Embedding]:
        """In their order. Raises the first `ApiError`, or `ClientLeft`."""
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def embed(index: int) -> Embedding:
            async with slots:
                # Shielded: what Triton has begun, it finishes; it leaks a request that is cancelled as it ends.
                one = asyncio.create_task(self._embed(inputs[index], f"input[{index}]" if is_list else "input"))
                one.add_done_callback(look_at)
                embedding = await asyncio.shield(one)
                done.num_tokens += embedding.num_tokens
                return embedding

        tasks = [asyncio.create_task(embed(index)) for index in range(len(inputs))]
        all_done = asyncio.gather(*tasks)
        all_done.add_done_callback(look_at)
        leaving = asyncio.create_task(wait_until_client_leaves(receive))
        try:
            await asyncio.wait((all_done, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not all_done.done():
                raise ClientLeft
            return await all_done
        finally:
            for task in tasks:  # a gathering that failed does not cancel the others any more
                task.cancel()
            leaving.cancel()

    async def _embed(self, given: Input, field: str) -> Embedding:
        if isinstance(given, str):
            try:
                return Embedding(*await self._triton.embed_text(given))
            except InvalidRequestError as error:  # which names the tensor
                raise InvalidRequestError(f"{field}: {error.message.partition(': ')[2]}", param=field) from error
        length = choose_length(len(given), self._embedder.max_input_tokens)
        input_ids, attention_mask = pad(given, length, self._embedder.pad_id)
        return Embedding(await self._triton.embed_ids(input_ids, attention_mask), len(given))


def _to_floats(vector: bytes) -> Any:
    return np.frombuffer(vector, "<f4").tolist()


def _to_base64(vector: bytes) -> Any:
    return base64.b64encode(vector).decode()
