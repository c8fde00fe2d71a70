"""Many streams at once: none lost, doubled or mixed."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import CHAT_PATH, ask, running
from tokenizers import Tokenizer

NUM_STREAMS = 200
END_ID = 2


async def read(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
    """The answer's id and its text."""
    body = {"messages": ask(f"Say {number}."), "stream": True, "max_tokens": 6, "temperature": 1.0}
    text, answer_ids, reasons, is_done = "", set(), [], False
    async with client.stream("POST", CHAT_PATH, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            assert not is_done or not line
            if line == "data: [DONE]":
                is_done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                answer_ids.add(event["id"])
                text += event["choices"][0]["delta"].get("content") or ""
                reasons += [event["choices"][0]["finish_reason"]] * bool(event["choices"][0]["finish_reason"])
    assert is_done and len(reasons) == 1
    (answer_id,) = answer_ids
    return answer_id, text


@pytest.mark.timeout(180)
def test_every_stream_is_what_the_engine_produced_for_it(
    artifact: Callable[[str], Path], cpu_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """By the engine's own log of token ids. Sampled, so that a text that went astray is another text."""

    async def read_all(url: str) -> list[tuple[str, str]]:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(base_url=url, timeout=150.0, limits=limits) as client:
            return await asyncio.gather(*(read(client, number) for number in range(NUM_STREAMS)))

    with running(artifact("cpu"), tmp_path, TRITON_REALTIME_LOG_LEVEL="DEBUG") as stack:
        answers = asyncio.run(read_all(stack.url))
        stack.wait_until_idle()
        produced: dict[str, list[int]] = defaultdict(list)
        for line in stack.logged("engine_chunk"):
            produced[line["request_id"]] += line["token_ids"]
    assert len(dict(answers)) == NUM_STREAMS
    for answer_id, text in answers:
        token_ids = produced[answer_id.removeprefix("chatcmpl-")]
        if token_ids[-1] == END_ID:
            token_ids.pop()
        whole = cpu_tokenizer.decode(token_ids)
        # A token whose character the limit cut off is not sent.
        assert whole == text or (whole.startswith(text) and whole.endswith("\ufffd"))
    assert len({text for _, text in answers}) > NUM_STREAMS / 2
