"""Text that reads like a control token stays text: what a caller writes cannot end his turn and begin another's.

A chat template gives one string, in which ``<|im_end|>`` of the template and ``<|im_end|>`` out of a message look the
same. So those of the caller are replaced by marks that nobody can guess before the template runs, and put back after
it for a tokenizer that knows the template's own under other names alone. Most requests have none, and go the plain way.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

# Who writes these says what a value is, and templates compare them; callers cannot choose their text.
_OURS = ("role", "type")


class ControlTokens:
    """The control tokens (in tokenizer.json: ``special``) of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
        self._names = sorted(special, key=len, reverse=True)
        nonce = secrets.token_hex(8)
        self._mark_begin = f"\ue002{secrets.token_hex(8)}"  # a template may show it, in what it raises
        self._find = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        # In text beside which a template, or another text, may write the rest of a name.
        self._starts = {name[:length] for name in self._names for length in range(1, len(name))}
        self._ends = {name[length:] for name in self._names for length in range(1, len(name))}
        self._all = "\0".join(self._names)
        self._renamed = {name: f"\ue000{nonce}{number}\ue001" for number, name in enumerate(self._names)}
        self._find_mark = re.compile(rf"{self._mark_begin}(\d+)\ue003")
        self._text_tokenizer = self._rename(tokenizer)

    def hide(self, value: Any, hidden: list[str]) -> Any:
        """`value` (of JSON) with a mark for each text in it that is a control token, or could become part of one.

        What the marks stand for goes into `hidden`.
        """
        if isinstance(value, str):
            return self._hide(value, hidden)
        if isinstance(value, Mapping):
            return {
                self._find.sub(lambda found: self._mark(found[0], hidden), key): (
                    each
                    if key in _OURS and isinstance(each, str) and not self._find.search(each)
                    else self.hide(each, hidden)
                )
                for key, each in value.items()
            }
        if isinstance(value, Sequence):
            return [self.hide(each, hidden) for each in value]
        return value

    def encode(self, prompt: str, hidden: Sequence[str]) -> list[int]:
        """Token ids of a prompt made of values with marks, those of what they stand for being text.

        Raises `ValueError` when the template changed a mark, so that what it stands for cannot be put back.
        """
        prompt = self.show(self._find.sub(lambda found: self._renamed[found[0]], prompt), hidden)
        if self._mark_begin in prompt:
            raise ValueError("it changes text that is, or could be part of, a control token")
        token_ids: list[int] = self._text_tokenizer.encode_batch_fast([prompt], add_special_tokens=False)[0].ids
        return token_ids

    def show(self, text: str, hidden: Sequence[str]) -> str:
        """`text` with what its marks stand for."""

        def unmark(found: re.Match[str]) -> str:
            number = int(found[1])
            return hidden[number] if number < len(hidden) else found[0]

        return self._find_mark.sub(unmark, text)

    def _hide(self, text: str, hidden: list[str]) -> str:
        text = self._find.sub(lambda found: self._mark(found[0], hidden), text)
        inner = text.strip()
        if not inner or not self._names:
            return text
        if inner in self._all and "\0" not in inner:
            return text.replace(inner, self._mark(inner, hidden))
        longest = len(self._names[0])
        # The longest first: of "<|<|im", "<|im" alone is no start that counts, "<|<|im" is none.
        end = next((inner[-n:] for n in range(min(longest, len(inner)), 0, -1) if inner[-n:] in self._starts), "")
        if end:
            at = text.rindex(end)
            text = text[:at] + self._mark(end, hidden) + text[at + len(end) :]
        start = next((inner[:n] for n in range(min(longest, len(inner)), 0, -1) if inner[:n] in self._ends), "")
        if start and len(start) + len(end) <= len(inner):
            at = text.index(start)
            text = text[:at] + self._mark(start, hidden) + text[at + len(start) :]
        return text

    def _mark(self, text: str, hidden: list[str]) -> str:
        hidden.append(text)
        return f"{self._mark_begin}{len(hidden) - 1}\ue003"

    def _rename(self, tokenizer: Tokenizer) -> Tokenizer:
        """The same tokenizer, whose control tokens have names that nobody can write."""
        rows = json.loads(tokenizer.to_str())
        rows["post_processor"] = None  # adds control tokens around a text, which the template does here
        for row in rows["added_tokens"]:
            row["content"] = self._renamed.get(row["content"], row["content"])
        vocabulary = rows["model"]["vocab"]
        if isinstance(vocabulary, dict):
            rows["model"]["vocab"] = {self._renamed.get(name, name): each for name, each in vocabulary.items()}
        else:  # Unigram: rows of name and score
            rows["model"]["vocab"] = [[self._renamed.get(name, name), score] for name, score in vocabulary]
        if rows["model"].get("unk_token") in self._renamed:
            rows["model"]["unk_token"] = self._renamed[rows["model"]["unk_token"]]
        return Tokenizer.from_str(json.dumps(rows))
