"""A conversation as the token ids that the model `complexity` judges.

    <s> query: the last turn </s> role: the turn before </s> role: the one before that </s> … user: the task </s>

The last turn is always in; of a long one, head and tail, because that is where a paste has its question. Earlier turns
follow from the latest backwards, each with its head and tail, as long as the whole fits: "continue" is judged by what
it continues. Where they do not all fit, the user's turn that states the task keeps a place behind those that do: after
long rounds of "continue" only that turn tells what is continued.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

# The classifier was trained with these; other numbers need another training.
MAX_TOKENS = 256
MAX_LAST_TOKENS = 160
MAX_EARLIER_TOKENS = 36

# A user's turn of so many characters states a task, as far as length tells; among shorter ones the longest does.
TASK_CHARACTERS = 60

# The prefix that multilingual-e5 was trained with (its model card).
_PREFIX = "query:"
# No token of the vocabulary is longer: so many characters a token hold enough of them, but where most are spaces.
_TOKEN_CHARACTERS = 16


class Turn(NamedTuple):
    """One message: OpenAI's `role`, and its content as text."""

    role: str
    text: str


class ConversationReader:
    """Reads conversations with the tokenizer of the model `complexity`.

    The cost is bounded: of a turn, however long, no more is tokenised than may be kept.
    """

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        self._begin, self._end, self._gap = map(self._special, ("<s>", "</s>", "<unk>"))
        self._prefix = self._ids(_PREFIX)

    def read(self, turns: Sequence[Turn]) -> npt.NDArray[np.int32]:
        """INT32 [length] with length ≤ `MAX_TOKENS`. `turns` are from the first to the last, at least one."""
        last = self._cut(turns[-1].text, MAX_LAST_TOKENS)
        ids = [self._begin, *self._prefix, *last, self._end]
        earlier, task = turns[:-1], find_task(turns[:-1])
        places: list[int] = []  # of the turns that fit, from the latest backwards
        parts: list[list[int]] = []
        room = MAX_TOKENS - len(ids)
        for place in reversed(range(len(earlier))):
            part = self._read_earlier(earlier[place])
            if len(part) > room:
                break
            places.append(place)
            parts.append(part)
            room -= len(part)
        if task is not None and len(parts) < len(earlier) and task not in places:
            part = self._read_earlier(earlier[task])
            while parts and len(part) > room:
                room += len(parts.pop())
            if len(part) <= room:
                parts.append(part)
        return np.array([*ids, *itertools.chain.from_iterable(parts)], dtype=np.int32)

    def _read_earlier(self, turn: Turn) -> list[int]:
        return [*self._ids(f"{turn.role}:"), *self._cut(turn.text, MAX_EARLIER_TOKENS), self._end]

    def _cut(self, text: str, max_tokens: int) -> list[int]:
        """The tokens of `text`; where they are more than `max_tokens`, of its head and its tail, a gap between."""
        num_head = max_tokens // 2
        num_tail = max_tokens - num_head - 1
        reach = num_head * _TOKEN_CHARACTERS
        if len(text) <= 2 * reach:
            ids = self._ids(text)
            if len(ids) <= max_tokens:
                return ids
            return [*ids[:num_head], self._gap, *ids[-num_tail:]]
        return [*self._ids(text[:reach])[:num_head], self._gap, *self._ids(text[-reach:])[-num_tail:]]

    def _special(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, f"the classifier's tokenizer has no {token}"
        return int(token_id)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def find_task(turns: Sequence[Turn]) -> int | None:
    """The place of the latest user's turn that states a task; None where the user said nothing."""
    users = [place for place, turn in enumerate(turns) if turn.role == "user"]
    return max(users, key=lambda place: (min(len(turns[place].text), TASK_CHARACTERS), place), default=None)
