"""OpenAI's answers as JSON text, streamed and whole: `chat.completion.chunk`, `chat.completion`, `text_completion`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.tool_calls import ToolCallDelta


class Usage(NamedTuple):
    """Token counts of one request; the token that ends a sequence is not counted."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        return {**self._asdict(), "total_tokens": self.prompt_tokens + self.completion_tokens}


@dataclass(slots=True)
class Choice:
    """One of a request's answers, as it grows. `log_probs` is None when they were not asked for."""

    index: int
    pieces: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    log_probs: list[TokenLogProb] | None = None
    num_tokens: int = 0
    finish_reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(
        self, text: str, calls: Sequence[ToolCallDelta] = (), log_probs: Sequence[TokenLogProb] | None = None
    ) -> None:
        """What became certain of it."""
        if text:
            self.pieces.append(text)
        self.calls += calls
        if log_probs is not None:
            if self.log_probs is None:
                self.log_probs = []
            self.log_probs += log_probs


class AnswerWriter(Protocol):
    """Writes the events of one answer, each one line of JSON.

    With usage asked for, every chunk has `usage`, null but in the last, which then has no choices, as OpenAI does it.
    `rt` rides in the last event.
    """

    def delta(self, index: int, text: str, log_probs: Sequence[TokenLogProb] | None) -> str:
        """A piece of a choice's text."""

    def calls(self, index: int, calls: Sequence[ToolCallDelta]) -> str:
        """News of a choice's tool calls."""

    def finish(self, choice: Choice, rt: dict[str, Any] | None) -> str:
        """The end of a choice."""

    def usage(self, usage: Usage, rt: dict[str, Any]) -> str:
        """The last chunk, if usage was asked for."""

    def whole(self, choices: Sequence[Choice], usage: Usage, rt: dict[str, Any]) -> str:
        """The whole answer as one object."""


class ChatWriter:
    """An `AnswerWriter` of chat completions. A choice's first delta also carries the role."""

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._head = {"id": f"chatcmpl-{answer_id}", "object": "chat.completion.chunk", "created": created}
        self._head["model"] = model
        # The per-token path only puts the text between two fixed halves.
        self._before = _dumps(self._head)[:-1] + ',"choices":[{"index":'
        self._tail = ',"usage":null}' if include_usage else "}"
        self._has_role: set[int] = set()

    def delta(self, index: int, text: str, log_probs: Sequence[TokenLogProb] | None) -> str:
        content = f'"content":{json.dumps(text, ensure_ascii=False)}'
        return self._chunk(index, content, "null" if log_probs is None else _dumps(_chat_log_probs(log_probs)))

    def calls(self, index: int, calls: Sequence[ToolCallDelta]) -> str:
        return self._chunk(index, f'"tool_calls":{_dumps([_call_delta(call) for call in calls])}', "null")

    def finish(self, choice: Choice, rt: dict[str, Any] | None) -> str:
        delta = {} if choice.index in self._has_role else {"role": "assistant", "content": ""}
        last = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        more = {} if rt is None else {"rt": rt}
        return _dumps({**self._head, "choices": [last], **more})[:-1] + self._tail

    def usage(self, usage: Usage, rt: dict[str, Any]) -> str:
        return _dumps({**self._head, "choices": [], "usage": usage.body(), "rt": rt})

    def whole(self, choices: Sequence[Choice], usage: Usage, rt: dict[str, Any]) -> str:
        bodies = [
            {
                "index": choice.index,
                "message": _message(choice),
                "logprobs": None if choice.log_probs is None else _chat_log_probs(choice.log_probs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return _dumps({**self._head, "object": "chat.completion", "choices": bodies, "usage": usage.body(), "rt": rt})

    def _chunk(self, index: int, delta: str, log_probs: str) -> str:
        role = ""
        if index not in self._has_role:
            self._has_role.add(index)
            role = '"role":"assistant",'
        end = f'"logprobs":{log_probs},"finish_reason":null}}]{self._tail}'
        return f'{self._before}{index},"delta":{{{role}{delta}}},{end}'


class CompletionWriter:
    """An `AnswerWriter` of completions."""

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._head = {"id": f"cmpl-{answer_id}", "object": "text_completion", "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}
        self._num_sent: dict[int, int] = {}  # characters of each choice, where the next token's text begins

    def delta(self, index: int, text: str, log_probs: Sequence[TokenLogProb] | None) -> str:
        start = self._num_sent.get(index, 0)
        self._num_sent[index] = start + len(text)
        choice = _completion_choice(index, text, log_probs, None, start)
        return _dumps({**self._head, "choices": [choice], **self._tail})

    def calls(self, index: int, calls: Sequence[ToolCallDelta]) -> str:
        raise TypeError("a completion has no tools")

    def finish(self, choice: Choice, rt: dict[str, Any] | None) -> str:
        last = _completion_choice(choice.index, "", None, choice.finish_reason)
        more = {} if rt is None else {"rt": rt}
        return _dumps({**self._head, "choices": [last], **self._tail, **more})

    def usage(self, usage: Usage, rt: dict[str, Any]) -> str:
        return _dumps({**self._head, "choices": [], "usage": usage.body(), "rt": rt})

    def whole(self, choices: Sequence[Choice], usage: Usage, rt: dict[str, Any]) -> str:
        bodies = [
            _completion_choice(choice.index, choice.text, choice.log_probs, choice.finish_reason) for choice in choices
        ]
        return _dumps({**self._head, "choices": bodies, "usage": usage.body(), "rt": rt})


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = join_calls(choice.calls)
    return message


def join_calls(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """The whole calls, as OpenAI's messages carry them."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _chat_log_probs(log_probs: Sequence[TokenLogProb]) -> dict[str, Any]:
    content = [
        {"token": each.token, "logprob": each.log_prob, "bytes": each.bytes(), "top_logprobs": []} for each in log_probs
    ]
    return {"content": content, "refusal": None}


def _completion_choice(
    index: int, text: str, log_probs: Sequence[TokenLogProb] | None, finish_reason: str | None, start: int = 0
) -> dict[str, Any]:
    body = None
    if log_probs is not None:
        offsets = []
        for each in log_probs:
            offsets.append(start)
            start += 0 if each.bytes() is None else len(each.token)
        body = {
            "tokens": [each.token for each in log_probs],
            "token_logprobs": [each.log_prob for each in log_probs],
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {"index": index, "text": text, "logprobs": body, "finish_reason": finish_reason}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
