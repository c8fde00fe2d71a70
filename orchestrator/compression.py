"""Prompt compression: of the turns before the last, the sentences that tell least are left out.

The system prompt stays as it is, so that its cached prefix does, and so does all from the last user message on. What is
kept is near the last turn and unlike what is kept already (maximal marginal relevance, Carbonell and Goldstein, SIGIR
1998), by the vectors of the shared embedder. Code, tool calls and their results are never cut, and no message goes
empty: the turns alternate as they did.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.cache.stage import Embed
from orchestrator.cache.store import Vector
from orchestrator.config import Compression
from orchestrator.request import Message
from orchestrator.streaming.sentences import SentenceCutter

# Passages of one prompt that are embedded; a longer past is cut into so many longer ones.
MAX_PASSAGES = 64
# How much being near the last turn counts, the rest of 1 being unlike what is kept already.
RELEVANCE = 0.5

# What is nothing without its whole, as CommonMark and its tables write it: fenced code (also within a line), lines that
# are indented after an empty one, and rows between bars.
_CODE = re.compile(
    r"(```.*?(?:```|\Z)"
    r"|^[ ]{0,3}~~~.*?(?:^[ ]{0,3}~~~[^\n]*|\Z)"
    r"|(?:(?<=\n\n)|\A)(?:(?:[ ]{4}|\t)[^\n]*(?:\n+|\Z))+"
    r"|(?:^[ ]{0,3}\|[^\n]*\|[ \t]*(?:\n|\Z)){2,})",
    re.DOTALL | re.MULTILINE,
)


class Passage(NamedTuple):
    """Neighbouring sentences of one message. `is_fixed`: it is code or a table, which is nothing without its whole."""

    message: int
    text: str
    num_tokens: int
    is_fixed: bool = False


async def compress(
    messages: Sequence[Message], rules: Compression, embed: Embed, count: Callable[[str], int]
) -> list[Message] | None:
    """`messages` with less in the old ones; None when there is nothing to leave out, or it would take too long.

    `count` tells the tokens of a text.
    """
    passages = await asyncio.to_thread(split, messages, count)  # a long past takes a while
    budget = rules.keep * sum(passage.num_tokens for passage in passages)
    last = find_last_turn(messages)
    if last is None or sum(not passage.is_fixed for passage in passages) < 2:
        return None
    texts = [messages[last].text(), *(passage.text for passage in passages if not passage.is_fixed)]
    embedding = [asyncio.ensure_future(embed(text)) for text in texts]
    try:
        vectors = await asyncio.wait_for(asyncio.gather(*embedding), rules.timeout_s)
    except asyncio.TimeoutError:
        return None
    question, *others = vectors
    if question is None:
        return None
    rows = iter(others)
    kept = choose(passages, [None if passage.is_fixed else next(rows) for passage in passages], question, budget)
    return None if len(kept) == len(passages) else join(messages, [passages[place] for place in sorted(kept)])


def find_last_turn(messages: Sequence[Message]) -> int | None:
    """The last user message."""
    return next((place for place in reversed(range(len(messages))) if messages[place].role == "user"), None)


def split(messages: Sequence[Message], count: Callable[[str], int]) -> list[Passage]:
    """What may be left out, and the code between, in order."""
    sentences: list[Passage] = []
    for place, message in enumerate(messages[: find_last_turn(messages)]):
        if message.role not in ("user", "assistant") or message.tool_calls is not None:
            continue
        for number, text in enumerate(_CODE.split(message.text())):
            if number % 2:
                sentences.append(Passage(place, text, count(text), is_fixed=True))
                continue
            cutter = SentenceCutter()
            sentences += [Passage(place, each, count(each)) for each in (*cutter.push(text), *cutter.flush())]
    size = -(-len(sentences) // MAX_PASSAGES)
    return list(itertools.chain.from_iterable(_in_groups(sentences, size))) if size > 1 else sentences


def _in_groups(sentences: Sequence[Passage], size: int) -> list[list[Passage]]:
    """Up to `size` neighbours of one message as one passage."""
    groups = []
    for (_, is_fixed), run in itertools.groupby(sentences, lambda each: (each.message, each.is_fixed)):
        parts = list(run)
        step = 1 if is_fixed else size
        groups.append(
            [
                parts[start]._replace(
                    text="".join(part.text for part in parts[start : start + step]),
                    num_tokens=sum(part.num_tokens for part in parts[start : start + step]),
                )
                for start in range(0, len(parts), step)
            ]
        )
    return groups


def choose(passages: Sequence[Passage], vectors: Sequence[Vector | None], question: Vector, budget: float) -> set[int]:
    """The places of the passages to keep: about `budget` tokens, one passage of each message at least.

    What has no vector is kept.
    """
    kept = {place for place, vector in enumerate(vectors) if vector is None}
    left = budget - sum(passages[place].num_tokens for place in kept)
    open_places = [place for place in range(len(passages)) if place not in kept]
    if not open_places:
        return kept
    matrix = np.stack([vectors[place] for place in open_places])  # type: ignore[misc]  # those without are kept
    relevance = matrix @ question
    likeness = np.zeros(len(open_places), np.float32)
    waiting = set(range(len(open_places)))

    def keep(row: int) -> None:
        nonlocal left, likeness
        waiting.discard(row)
        kept.add(open_places[row])
        left -= passages[open_places[row]].num_tokens
        likeness = np.maximum(likeness, matrix @ matrix[row])

    for message in {passages[place].message for place in open_places} - {passages[place].message for place in kept}:
        rows = [row for row in waiting if passages[open_places[row]].message == message]
        keep(max(rows, key=lambda row: (relevance[row], -row)))
    while waiting:
        scores = RELEVANCE * relevance - (1 - RELEVANCE) * likeness
        best = max(waiting, key=lambda row: (scores[row], -row))
        if passages[open_places[best]].num_tokens > left:
            break
        keep(best)
    return kept


def join(messages: Sequence[Message], kept: Sequence[Passage]) -> list[Message]:
    """The messages, those that were split made of what was kept."""
    texts: dict[int, str] = {}
    for passage in kept:
        texts[passage.message] = texts.get(passage.message, "") + passage.text
    return [
        message.model_copy(update={"content": texts[place]}) if place in texts else message
        for place, message in enumerate(messages)
    ]
