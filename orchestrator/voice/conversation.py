"""The items of a realtime conversation, and what of them a language model is told: what was heard, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.errors import InvalidRequestError, shorten
from orchestrator.voice.playback import Mark, text_until

Role = Literal["system", "user", "assistant"]
Status = Literal["in_progress", "completed", "incomplete"]

# The oldest are forgotten; a model's context window is smaller than either.
MAX_ITEMS = 200
MAX_CHARACTERS = 128 << 10


@dataclass
class Item:
    """One message. `kind` is OpenAI's type of its one part of content.

    Of an assistant's sound, `marks` say which text ends where, and `text` is what of it was heard.
    """

    id: str
    role: Role
    kind: Literal["input_text", "input_audio", "output_text", "output_audio"]
    text: str = ""
    status: Status = "completed"
    marks: list[Mark] = field(default_factory=list)
    rate_hz: int = 0

    def describe(self) -> dict[str, Any]:
        """OpenAI's object; without the sound, which is not kept."""
        name = "transcript" if self.kind.endswith("_audio") else "text"
        content = [{"type": self.kind, name: self.text}]
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": content,
        }

    def truncate(self, audio_end_ms: int) -> None:
        """Only so much of it was heard."""
        self.text = text_until(self.marks, audio_end_ms * self.rate_hz // 1000)
        self.status = "incomplete"


class Conversation:
    """In order; bounded."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    def add(self, item: Item, previous_id: str | None = None) -> str | None:
        """Behind the item `previous_id` ("root": before all; None: at the end). Returns the id of the one before it.

        Raises `InvalidRequestError`.
        """
        if any(each.id == item.id for each in self._items):
            raise InvalidRequestError(f"item.id: {shorten(item.id)} exists already; choose another", param="item.id")
        at = len(self._items)
        if previous_id == "root":
            at = 0
        elif previous_id is not None:
            at = self._items.index(self.find(previous_id, "previous_item_id")) + 1
        self._items.insert(at, item)
        self._forget()
        at = self._items.index(item) if item in self._items else 0
        return self._items[at - 1].id if at else None

    def find(self, item_id: str, field: str = "item_id") -> Item:
        """Raises `InvalidRequestError`, which names `field`."""
        for item in self._items:
            if item.id == item_id:
                return item
        raise InvalidRequestError(f"{field}: there is no item {shorten(item_id)}", param=field)

    def delete(self, item_id: str) -> None:
        self._items.remove(self.find(item_id))

    def forget_half(self) -> bool:
        """The older half, what is too long for the model; returns whether there was anything to forget."""
        count = len(self._items) // 2
        del self._items[:count]
        return count > 0

    def messages(self, instructions: str, extra: Sequence[Item] = ()) -> list[dict[str, str]]:
        """As `/v1/chat/completions` takes them, `extra` at the end.

        What somebody says twice in a row is one message: who goes on, after he was taken for done, says one thing. Of
        what nobody heard nothing is told.
        """
        messages = [{"role": "system", "content": instructions}] if instructions else []
        for item in [*self._items, *extra]:
            if not item.text:
                continue
            if messages and messages[-1]["role"] == item.role != "system":
                messages[-1]["content"] += f" {item.text}"
            else:
                messages.append({"role": item.role, "content": item.text})
        return messages

    def _forget(self) -> None:
        size = sum(len(item.text) for item in self._items)
        while len(self._items) > MAX_ITEMS or (size > MAX_CHARACTERS and len(self._items) > 1):
            size -= len(self._items.pop(0).text)
