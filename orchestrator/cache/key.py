"""What makes two requests the same: everything that shapes the answer, and nothing else.

The exact key is a hash of all of it. The partition is a hash of all but the last user turn: within a partition only the
question differs, so that only questions need to be compared.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from typing import Any, NamedTuple

from orchestrator.request import ChatRequest, Message

# How an answer is delivered and who is billed does not shape it; for the others stand `output_limit`, `history` and
# `Origin.policy`.
_NOT_SHAPING = {"messages", "model", "stream", "stream_options", "user", "max_tokens", "max_completion_tokens"}


class Origin(NamedTuple):
    """Where a request comes from and goes, as far as its answer depends on it.

    `policy` is a tier's name, or the model that the caller pinned; a request that asks for one never shares with one
    that asks for the other. `template` is the version of the chat template.
    """

    tenant: str
    policy: str
    adapter: str = ""
    template: str = ""


class Identity(NamedTuple):
    """A request as the cache sees it. `question` is its last user turn, or None where that is not its last turn."""

    tenant: str
    policy: str
    partition: str
    exact_key: str
    question: str | None

    @property
    def words_key(self) -> str:
        """The same for all that ask it in the same words, whatever their case, spaces and punctuation."""
        words = re.findall(r"\w+", (self.question or "").casefold())
        return _digest([self.partition, words]) if words else self.exact_key


def identify(request: ChatRequest, origin: Origin) -> Identity:
    """The identity of `request`; two are equal only if every part that shapes the answer is.

    Text is compared after NFC and without outer space; all other values as they are, with defaults filled in.
    """
    fields = request.model_dump(mode="json", by_alias=True, exclude=_NOT_SHAPING)
    messages = [_canonical_message(message) for message in request.messages]
    asks = request.messages[-1].role == "user"
    shared = {
        "origin": origin._asdict(),
        "fields": {**fields, "output_limit": request.output_limit, "stop": request.stops, "n": request.num_choices},
        "history": messages[:-1] if asks else messages,
        # The last turn's own fields, such as its author's name.
        "last": {**messages[-1], "content": None} if asks else None,
    }
    partition = _digest(shared)
    question = _canonical_text(request.messages[-1].text()) if asks else None
    return Identity(origin.tenant, origin.policy, partition, _digest([partition, question]), question)


def _canonical_message(message: Message) -> dict[str, Any]:
    dumped = message.model_dump(mode="json")
    return {**dumped, "content": None if message.content is None else _canonical_text(message.text())}


def _canonical_text(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _digest(value: object) -> str:
    """SHA-256 of the canonical JSON: keys sorted, so that equal values and nothing else have equal digests."""
    # Escaped, because a lone surrogate has no UTF-8.
    written = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(written.encode("ascii")).hexdigest()
