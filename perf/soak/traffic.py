"""What a soak asks, and what is right: every answer is known beforehand, down to the character.

A prompt tells the scripted engine what to say, and the text names its request, so that an answer that went astray says
whose it is.
"""

from __future__ import annotations

import json
import math
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perf.prompts import script
from perf.sse import CHAT_PATH, MODEL

EMBEDDINGS_PATH = "/v1/embeddings"
DEADLINE_MS = 500
# Shares of the requests, in percent.
KINDS: Mapping[str, int] = {
    "fresh": 40,  # a prompt that was not asked before, streamed
    "auto": 8,  # the same, of no tier by name
    "whole": 10,  # the same, not streamed
    "repeat": 20,  # one of a few prompts, again and again: the cache's
    "embedding": 10,
    "leave": 5,  # the client goes in the midst of the answer, or before its first token
    "late": 4,  # the deadline comes in the midst of the answer
    "refused": 3,  # for what the gateway itself, or the orchestrator, does not take
}
_NUM_REPEATED, _NUM_EMBEDDED = 40, 16
_FIRST_FRESH = 1000
_SLOW_WORDS = 60
# Ended by its deadline, or refused at once because it could not be kept.
_LATE_CODES = ("deadline_exceeded", "overloaded")
_SAME_COSINE = 0.9999  # another batch is another order of sums
_WORDS = [
    "the",
    "lamp",
    "of",
    "a",
    "keeper",
    "naïve",
    "größer",
    "💡",
    "burns",
    "on",
    "while",
    "ships",
    "pass",
    "slowly;",
    "žluť,",
    "水",
    "and",
    "salt",
]


class Ask(NamedTuple):
    """One request. `text` is the answer; of an embedding, what is embedded.

    Its client goes after `leave_events` events with text, or after `leave_s`. One of the errors `codes` is wanted.
    """

    kind: str
    request_id: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    text: str
    leave_events: int | None = None
    leave_s: float | None = None
    codes: tuple[str, ...] = ()


class Heard(NamedTuple):
    """What came of an `Ask`: `status` is 0 where nothing came; `fault` is what broke the connection."""

    ask: Ask
    sent_s: float
    ended_s: float
    status: int
    body: bytes
    has_left: bool = False
    fault: str | None = None


class Verdict(NamedTuple):
    """`code` is an error's that came instead of the answer; `wrong` says in words what is not as it must be."""

    code: str | None = None
    wrong: str | None = None

    @property
    def is_right(self) -> bool:
        return self == Verdict()


def text_of(number: int, num_words: int) -> str:
    words = (_WORDS[(7 * number + place * (number % 11 + 1)) % len(_WORDS)] for place in range(num_words))
    return f"Answer {number}: {' '.join(words)}."


class Traffic:
    """An endless mixture; `seed` makes it repeatable but for the ids."""

    def __init__(self, key: str, seed: int) -> None:
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._random = random.Random(seed)
        self._number = _FIRST_FRESH
        self._vectors: dict[str, Sequence[float]] = {}  # by their text, as they came first

    def __iter__(self) -> Iterator[Ask]:
        while True:
            yield self.make(*self._random.choices(tuple(KINDS), tuple(KINDS.values())))

    def make(self, kind: str) -> Ask:
        request_id = f"soak-{uuid.uuid4().hex}"
        headers = {**self._headers, "x-request-id": request_id}
        number = self._number = self._number + 1
        if kind == "embedding":
            text = f"Passage {self._random.randrange(_NUM_EMBEDDED)} of the keeper's log."
            body = json.dumps({"model": "embedding", "input": text}).encode()
            return Ask(kind, request_id, EMBEDDINGS_PATH, body, headers, text)
        if kind == "refused":
            if self._random.random() < 0.5:  # the gateway's own refusal
                media = {**headers, "content-type": "text/plain"}
                return Ask(kind, request_id, CHAT_PATH, b"hello", media, "", codes=("unsupported_media_type",))
            body = _chat("x", is_streamed=True, temperature=9)
            return Ask(kind, request_id, CHAT_PATH, body, headers, "", codes=("invalid_value",))
        if kind in ("leave", "late"):
            text = text_of(number, _SLOW_WORDS)
            if kind == "late":
                body = _chat(script(text, 20, 50, number), is_streamed=True)
                late = {**headers, "x-deadline-ms": str(DEADLINE_MS)}
                return Ask(kind, request_id, CHAT_PATH, body, late, text, codes=_LATE_CODES)
            if self._random.random() < 0.5:
                body = _chat(script(text, 20, 20, number), is_streamed=True)
                return Ask(kind, request_id, CHAT_PATH, body, headers, text, leave_events=self._random.randint(1, 6))
            body = _chat(script(text, 2000, 20, number), is_streamed=self._random.random() < 0.5)
            return Ask(kind, request_id, CHAT_PATH, body, headers, text, leave_s=0.3)
        if kind == "repeat":
            number = self._random.randrange(_NUM_REPEATED)
        text = text_of(number, 4 + number % 24)
        model = "auto" if kind == "auto" else MODEL
        body = _chat(script(text, 5, 0, number), is_streamed=kind != "whole", model=model)
        return Ask(kind, request_id, CHAT_PATH, body, headers, text)

    def judge(self, heard: Heard) -> Verdict:
        """Whether an answer is as it must be."""
        ask = heard.ask
        if heard.fault is not None and not heard.has_left:
            return Verdict(wrong=heard.fault)
        if heard.status == 0:
            return Verdict() if heard.has_left else Verdict(wrong="closed without an answer")
        if heard.status != 200:
            return _judge_error(ask, heard)
        try:
            if ask.kind == "embedding":
                return self._judge_vector(ask.text, json.loads(heard.body)["data"][0]["embedding"])
            if b'"stream": true' not in ask.body:
                choice = json.loads(heard.body)["choices"][0]
                return _judge_text(ask, choice["message"]["content"], choice["finish_reason"])
            return _judge_stream(ask, heard)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return Verdict(wrong=f"no answer's shape ({type(error).__name__}): {heard.body[:200]!r}")

    def _judge_vector(self, text: str, vector: Sequence[float]) -> Verdict:
        known = self._vectors.setdefault(text, vector)
        if len(vector) != len(known) or cosine(vector, known) < _SAME_COSINE:
            return Verdict(wrong=f"another vector for {text!r}")
        other = next((each for each in self._vectors if each != text and self._vectors[each] == vector), None)
        return Verdict() if other is None else Verdict(wrong=f"the vector of {other!r} for {text!r}")


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    dot = sum(a * b for a, b in zip(left, right))
    return dot / math.sqrt(sum(a * a for a in left) * sum(b * b for b in right))


def _chat(prompt: str, *, is_streamed: bool, model: str = MODEL, **fields: Any) -> bytes:
    request = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": is_streamed, **fields}
    return json.dumps(request).encode()


def _judge_error(ask: Ask, heard: Heard) -> Verdict:
    try:
        code = str(json.loads(heard.body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return Verdict(wrong=f"status {heard.status} without an error of ours: {heard.body[:200]!r}")
    return Verdict() if code in ask.codes else Verdict(code=code)


def _judge_stream(ask: Ask, heard: Heard) -> Verdict:
    text, reason, is_done = "", None, False
    whole, _, rest = heard.body.rpartition(b"\n\n")
    if rest and not heard.has_left:
        return Verdict(wrong=f"the stream ends inside of an event: {rest[-200:]!r}")
    for event in whole.split(b"\n\n") if whole else ():
        data = event.removeprefix(b"data: ")
        if is_done:
            return Verdict(wrong="goes on after its end")
        if data == b"[DONE]":
            is_done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            if not ask.text.startswith(text):
                return Verdict(wrong=_describe_other(ask, text))
            code = str(chunk["error"]["code"])
            return Verdict() if code in ask.codes else Verdict(code=code)
        (choice,) = chunk["choices"]
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
    if heard.has_left:
        return Verdict() if ask.text.startswith(text) else Verdict(wrong=_describe_other(ask, text))
    if not is_done:
        return Verdict(wrong="the stream ends without [DONE] and without an error")
    return _judge_text(ask, text, reason)


def _judge_text(ask: Ask, text: str, reason: str | None) -> Verdict:
    if text != ask.text:
        return Verdict(wrong=_describe_other(ask, text))
    if reason != "stop":
        return Verdict(wrong=f"finish_reason {reason!r}")
    return Verdict(wrong=f"{ask.codes[0]} was wanted, and the whole answer came") if ask.codes else Verdict()


def _describe_other(ask: Ask, text: str) -> str:
    own, other = ask.text.partition(":")[0], text.partition(":")[0]
    what = "another request's answer" if own != other and other.startswith("Answer ") else "a wrong answer"
    return f"{what}: {text[:120]!r} for {ask.text[:120]!r}"
