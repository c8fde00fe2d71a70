"""`/v1/embeddings` over a fake Triton: what a client that leaves, leaves behind."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from orchestrator.config import Embedder
from orchestrator.errors import EngineError
from orchestrator.gateway.embeddings import Embeddings


class FakeTriton:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.leave = asyncio.Event()

    async def embed_text(self, text: str) -> tuple[bytes, int]:
        self.asked.append(text)
        await asyncio.sleep(0.01)
        self.leave.set()
        await asyncio.sleep(0.2)
        raise EngineError("the embedder failed")


@pytest.mark.parametrize("leaves", [True, False])
def test_no_further_input_is_begun_and_nothing_logged(leaves: bool) -> None:
    logged: list[dict[str, Any]] = []

    async def scenario() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        triton = FakeTriton()
        body = json.dumps({"model": "embedding", "input": [f"text {number}" for number in range(50)]}).encode()
        sent: list[Any] = []
        came = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if came:
                return came.pop()
            if leaves:
                await triton.leave.wait()
                return {"type": "http.disconnect"}
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        embedder = Embedder(name="m", max_input_tokens=256, vocab_size=100, pad_id=0, cls_id=1, sep_id=2)
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        await Embeddings(triton, embedder, with_keys=False)(scope, receive, send)  # type: ignore[arg-type]
        await asyncio.sleep(0.4)
        assert len(triton.asked) < 50
        return sent

    sent = asyncio.run(scenario())
    gc.collect()
    assert logged == []
    assert [message.get("status") for message in sent] == ([] if leaves else [502, None])
