"""How alike two good answers are: the model of target cpu, asked each question twice, beside answers to others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from build.router_data import PATH, read_labelled
from orchestrator.cache.lookup import Embedder
from orchestrator.config import QualityPolicy
from orchestrator.quality.clusters import Vector
from orchestrator.quality.vectors import embed_whole
from perf.report import say
from perf.stack import running_stack
from perf.stats import percentile

_MAX_TOKENS = 96
_AT_ONCE = 8
_TIMEOUT_S = 300.0


def likeness(artifact: Path, embedder: Embedder, num_questions: int) -> dict[str, Any]:
    """Of English questions of one turn that are labelled simple or medium, at the tier's own temperature."""
    rows = [row for row in read_labelled(PATH) if row.lang == "en" and row.label < 2 and len(row.messages) == 1]
    questions = [row.turns[0].text for row in random.Random(0).sample(rows, min(num_questions, len(rows)))]
    with running_stack(artifact) as stack:
        say(f"asking {len(questions)} questions twice")
        texts = asyncio.run(_ask_twice(stack.gateway_url, questions))

    async def embed(text: str) -> Vector | None:
        return embedder.embed(text)

    async def embed_all() -> list[tuple[Vector | None, Vector | None]]:
        return [(await embed_whole(embed, first), await embed_whole(embed, second)) for first, second in texts]

    pairs = [(first, second) for first, second in asyncio.run(embed_all()) if first is not None and second is not None]
    table = np.array([first for first, _ in pairs]) @ np.array([second for _, second in pairs]).T
    same, line = np.diag(table), QualityPolicy().similarity
    others = table[~np.eye(len(pairs), dtype=bool)]
    return {
        "questions": len(pairs),
        "same_question": {"alike": round(float((same >= line).mean()), 4), "cosine_p50": _middle(same.tolist())},
        "other_question": {"alike": round(float((others >= line).mean()), 6), "cosine_p50": _middle(others.tolist())},
    }


async def _ask_twice(url: str, questions: Sequence[str]) -> list[tuple[str, str]]:
    turns = asyncio.Semaphore(_AT_ONCE)
    headers = {"cache-control": "no-store"}
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, headers=headers) as client:

        async def ask(question: str) -> str:
            messages = [{"role": "user", "content": question}]
            async with turns:
                body = {"model": "expert", "messages": messages, "max_tokens": _MAX_TOKENS}
                response = await client.post("/v1/chat/completions", json=body)
            return str(response.raise_for_status().json()["choices"][0]["message"]["content"])

        async def ask_twice(question: str) -> tuple[str, str]:
            return await ask(question), await ask(question)

        return list(await asyncio.gather(*map(ask_twice, questions)))


def _middle(values: list[float]) -> float:
    return round(percentile(values, 50), 3)
