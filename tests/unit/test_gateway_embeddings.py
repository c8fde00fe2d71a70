"""`/v1/embeddings` over a fake Triton: what a client that leaves, leaves behind."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from limits_loopback import Beside

from orchestrator.config import Embedder
from orchestrator.errors import EngineError
from orchestrator.gateway.embeddings import Embeddings
from orchestrator.limits.ledger import Amount


class FakeTriton:
    def __init__(self, beside: Beside) -> None:
        self._limits = beside.client
        self.check = self._limits.check
        self.asked: list[str] = []
        self.leave = asyncio.Event()

    async def serve(self, *request: Any) -> Any:
        *request, work = request
        return await self._limits.serve(*request, lambda: work(self))

    async def embed_text(self, text: str) -> tuple[bytes, int]:
        self.asked.append(text)
        await asyncio.sleep(0.01)
        self.leave.set()
        await asyncio.sleep(0.2)
        if text != "text 0":
            raise EngineError("the embedder failed")
        return bytes(4), 3


@pytest.mark.parametrize("leaves", [True, False])
def test_no_further_input_is_begun_and_nothing_logged(leaves: bool, tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []
    beside = Beside(tmp_path, pays={"tokens_per_minute": 10_000})

    async def scenario() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        triton = FakeTriton(beside)
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
        headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer pays")]
        await Embeddings(triton, embedder)({"type": "http", "headers": headers}, receive, send)  # type: ignore[arg-type]
        if leaves:
            assert beside.num_running["embedding"] == 1  # until what was begun has ended
        await beside.settled()
        assert len(triton.asked) == 16
        assert await beside.used("pays") == Amount(int(leaves), 3)
        return sent

    sent = asyncio.run(scenario())
    gc.collect()
    assert logged == []
    assert [message.get("status") for message in sent] == ([] if leaves else [502, None])
