"""An engine without a model: it answers what the prompt tells it to, when the prompt tells it to.

For tests and measurements that need bytes or timing no real model gives on demand. The prompt's last occurrence of
``#script`` followed by a JSON object is the script:

    {"text": "..."} or {"token_ids": [[1], [2, 3], []]}   the answer; with text, one token of the tokenizer a step
    "per_char": true                one character a step instead (each by its own token ids)
    "first_token_ms", "itl_ms"      when the first chunk comes, and the gap between chunks
    "log_probs": [-0.5, ...]        the tokens' log probabilities, for a request that asks for them
    "fail_after": n                 the request fails after n chunks
    "die_after": n                  the whole engine fails after n chunks
    "hang_ms": t                    the whole engine does nothing for so long, from when the request arrives

A text ends with the request's end id, `token_ids` end as they are; `request_output_len` and stop words cut both. A
prompt without a script gets DEFAULT_TEXT. Times not given are the target's `first_token_ms` and `itl_ms`, log
probabilities not given DEFAULT_LOG_PROB. A guide is checked for its type and size and then not followed: the answer
is the script's. Bad words are refused.
"""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from orchestrator import contracts
from orchestrator.engines import Chunk, EngineRefusal, EngineRequest
from orchestrator.engines.words import StopWords, check_ids

DEFAULT_TEXT = "The scripted engine answers."
DEFAULT_LOG_PROB = -0.25
MARK = "#script"


class Script(BaseModel):
    """One answer, see the module's docstring. Times in milliseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str | None = None
    token_ids: list[list[int]] | None = None
    per_char: bool = False
    first_token_ms: float = Field(default=0, ge=0, le=60_000)
    itl_ms: float = Field(default=0, ge=0, le=60_000)
    log_probs: list[float] = Field(default_factory=list)
    fail_after: int | None = None
    die_after: int | None = None
    hang_ms: float = Field(default=0, ge=0, le=600_000)


class Settings(BaseModel):
    """The engine parameters of the target's row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    max_batch_size: int = Field(gt=0)
    first_token_ms: float = Field(default=0, ge=0)
    itl_ms: float = Field(default=0, ge=0)
    context_window: int = Field(gt=0)
    vocab_size: int = Field(gt=0)


@dataclass(slots=True)
class Sequence:
    """A running script: `chunks` still to come, `num_sent` already sent, `num_tokens_left` before the cut.

    `log_probs` are those of the tokens still to come; None when the request did not ask for them.
    """

    request_id: str
    script: Script
    chunks: list[list[int]]
    num_tokens_left: int
    stop_words: StopWords
    log_probs: Iterator[float] | None
    num_sent: int = 0
    stopped: bool = field(default=False)


class ScriptedStepper:
    """A `Stepper` whose step waits for the next chunk that is due."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._sequences: dict[str, Sequence] = {}
        self._due: list[tuple[float, int, Sequence]] = []  # heap by time; the count keeps ties comparable
        self._count = itertools.count()

    @classmethod
    def load(cls, model_dir: Path, parameters: Mapping[str, str]) -> ScriptedStepper:
        """Load `model_dir`/tokenizer; raises `ValueError` for a parameter that is unknown or out of range."""
        settings = Settings.model_validate(dict(parameters))
        return cls(Tokenizer.from_file(str(model_dir / "tokenizer" / "tokenizer.json")), settings)

    def add(self, request: EngineRequest) -> None:
        for word in request.stop_words:
            check_ids(contracts.STOP_WORDS_LIST.name, word, self._settings.vocab_size)
        if request.bad_words:
            raise EngineRefusal(
                f"{contracts.BAD_WORDS_LIST.name}: the scripted engine cannot avoid words; leave it out"
            )
        script = self._read_script(request)
        log_probs = itertools.chain(script.log_probs, itertools.repeat(DEFAULT_LOG_PROB))
        sequence = Sequence(
            request.request_id,
            script,
            self._chunks(script, request.end_id),
            request.max_new_tokens,
            StopWords(request.stop_words),
            log_probs if request.log_probs else None,
        )
        self._sequences[request.request_id] = sequence
        time.sleep(script.hang_ms / 1000)
        self._schedule(sequence, script.first_token_ms)

    def stop(self, request_id: str) -> None:
        self._sequences.pop(request_id).stopped = True

    def kv_cache_usage(self) -> None:
        return None

    def has_requests(self) -> bool:
        return bool(self._sequences)

    def step(self) -> dict[str, Chunk]:
        while self._due[0][2].stopped:
            heapq.heappop(self._due)
        # At most 1 ms, so that requests join and leave while others wait for their time.
        time.sleep(min(max(self._due[0][0] - time.monotonic(), 0), 0.001))
        chunks: dict[str, Chunk] = {}
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            sequence = heapq.heappop(self._due)[2]
            if not sequence.stopped:
                chunks[sequence.request_id] = self._advance(sequence)
        return chunks

    def _advance(self, sequence: Sequence) -> Chunk:
        script = sequence.script
        if sequence.num_sent == script.die_after:
            raise RuntimeError("the script says die")
        if sequence.num_sent == script.fail_after:
            del self._sequences[sequence.request_id]
            return Chunk([], finished=True, error="the script says fail")
        token_ids = sequence.chunks.pop(0)[: sequence.num_tokens_left] if sequence.chunks else []
        cut = sequence.stop_words.cut(token_ids)
        token_ids = token_ids[:cut]
        log_probs = None if sequence.log_probs is None else list(itertools.islice(sequence.log_probs, len(token_ids)))
        sequence.num_sent += 1
        sequence.num_tokens_left -= len(token_ids)
        must_fail = sequence.num_sent in (script.fail_after, script.die_after)
        at_end = cut is not None or sequence.num_tokens_left == 0 or not sequence.chunks
        if not must_fail and at_end:
            del self._sequences[sequence.request_id]
            return Chunk(token_ids, finished=True, log_probs=log_probs)
        self._schedule(sequence, script.itl_ms)
        return Chunk(token_ids, log_probs=log_probs)

    def _schedule(self, sequence: Sequence, delay_ms: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_ms / 1000, next(self._count), sequence))

    def _read_script(self, request: EngineRequest) -> Script:
        prompt = self._tokenizer.decode(request.input_ids, skip_special_tokens=False)
        found = prompt.rfind(MARK)
        given: dict[str, Any] = {"text": DEFAULT_TEXT}
        if found >= 0:
            try:
                given, _ = json.JSONDecoder().raw_decode(prompt, prompt.index("{", found))
            except ValueError as error:
                raise EngineRefusal(f"input_ids: the prompt's script is not JSON: {error}") from error
        defaults = {"first_token_ms": self._settings.first_token_ms, "itl_ms": self._settings.itl_ms}
        try:
            return Script.model_validate({**defaults, **given})
        except ValidationError as error:
            raise EngineRefusal(f"input_ids: the prompt's script is wrong: {error}") from error

    def _chunks(self, script: Script, end_id: int | None) -> list[list[int]]:
        if script.token_ids is not None:
            return [list(chunk) for chunk in script.token_ids]
        text = script.text or ""
        ids = [self._encode(char) for char in text] if script.per_char else [[i] for i in self._encode(text)]
        return ids if end_id is None else [*ids, [end_id]]

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids
