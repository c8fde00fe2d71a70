"""OpenAI's chat-completion objects as JSON text: `chat.completion.chunk` events and the `chat.completion`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """Token counts of one request; the token that ends a sequence is not counted."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        return {**self._asdict(), "total_tokens": self.prompt_tokens + self.completion_tokens}


class ChunkWriter:
    """Writes the events of one answer.

    The first delta also carries the role. With `include_usage` every chunk has `usage`, null but in the last, which
    then has no choices, as OpenAI does it. `rt` rides in the last event.
    """

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        # The per-token path only puts the text between two fixed halves.
        self._before = _dumps(self._head)[:-1] + ',"choices":[{"index":0,"delta":{'
        usage = ',"usage":null' if include_usage else ""
        self._after = '},"logprobs":null,"finish_reason":null}]' + usage + "}"
        self._role = '"role":"assistant",'

    def delta(self, text: str) -> str:
        """One chunk with `text` as content."""
        role, self._role = self._role, ""
        return f'{self._before}{role}"content":{json.dumps(text, ensure_ascii=False)}{self._after}'

    def ending(self, finish_reason: str, usage: Usage, rt: dict[str, Any]) -> list[str]:
        """The last one or two chunks: finish reason, then usage if it was asked for."""
        delta = {"role": "assistant", "content": ""} if self._role else {}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if not self._include_usage:
            return [_dumps({**self._head, "choices": [choice], "rt": rt})]
        return [
            _dumps({**self._head, "choices": [choice], "usage": None}),
            _dumps({**self._head, "choices": [], "usage": usage.body(), "rt": rt}),
        ]

    def completion(self, text: str, finish_reason: str, usage: Usage, rt: dict[str, Any]) -> str:
        """The whole answer as one `chat.completion`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        head = {**self._head, "object": "chat.completion"}
        return _dumps({**head, "choices": [choice], "usage": usage.body(), "rt": rt})


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
