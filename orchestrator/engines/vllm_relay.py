"""Requests into vLLM's AsyncLLM and their tokens out of it, as the worker's messages (see `engines.worker`)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator import contracts
from orchestrator.engines import Chunk, EngineRefusal, EngineRequest
from orchestrator.engines.words import StopWords

log = logging.getLogger("orchestrator.engine")


class AsyncEngine(Protocol):
    """What is used of vLLM's AsyncLLM. `generate` raises `ValueError` for a request that vLLM refuses."""

    @property
    def errored(self) -> bool:
        """Whether it has failed for good."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """`RequestOutput`s of new tokens; closing it early aborts the request."""


@dataclass(slots=True)
class Waiting:
    """What is new of one request and not written yet, and when something of it was written last."""

    chunk: Chunk | None = None
    written_s: float = -math.inf


class Relay:
    """For one event loop. What a step of the engine brought for all requests goes out as one message.

    `prepare` makes vLLM's sampling parameters of a request; it raises `EngineRefusal` or `ValueError`. `write` gets the
    messages. With so many requests that a token each would be more than `max_responses_per_s`, tokens of a request wait
    for the next ones; its first and its end never do.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prepare: Callable[[EngineRequest], Any],
        max_responses_per_s: float,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self._engine = engine
        self._prepare = prepare
        self._max_responses_per_s = max_responses_per_s
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly
        self._live: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, Waiting] = {}
        self._flush_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._kv_cache_usage = self._written_usage = 0.0
        self.end: asyncio.Future[None] = self._loop.create_future()  # fails when the engine has

    def note_usage(self, share: float) -> None:
        """The share of the KV blocks that requests hold, as of the last step."""
        self._kv_cache_usage = round(share, 4)

    def do(self, command: Mapping[str, Any]) -> None:
        """One of the worker's commands."""
        if "add" in command:
            self._add(EngineRequest(**command["add"]))
        else:
            self._stop(command["stop"])

    def _add(self, request: EngineRequest) -> None:
        self._waiting[request.request_id] = Waiting()
        try:
            params = self._prepare(request)
        except (EngineRefusal, ValueError) as refusal:
            self._put(request.request_id, Chunk([], finished=True, error=str(refusal)))
            return
        task = self._live[request.request_id] = self._loop.create_task(self._run(request, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop(self, request_id: str) -> None:
        if (task := self._live.pop(request_id, None)) is None:
            return
        task.cancel()  # which aborts the request
        self._waiting[request_id].chunk = None
        self._put(request_id, Chunk([], finished=True))
        line = {"event": "engine_stopped", "request_id": request_id, "monotonic_s": time.monotonic()}
        log.info(json.dumps(line))

    async def _run(self, request: EngineRequest, params: Any) -> None:
        request_id, words = request.request_id, StopWords(request.stop_words)
        try:
            prompt = {"prompt_token_ids": request.input_ids}
            async with aclosing(self._engine.generate(prompt, params, request_id)) as outputs:
                async for output in outputs:
                    if self._put_output(request, words, output):
                        break
        except ValueError as error:  # of checks that only vLLM can make
            name = contracts.GUIDED_DECODING_GUIDE if request.guide_type is not None else contracts.INPUT_IDS
            self._end(request_id, f"{name.name}: {error}")
        except Exception as error:
            if self._engine.errored:
                if not self.end.done():
                    self.end.set_exception(error)
                return
            log.exception("a request failed")
            self._end(request_id, f"the engine failed: {type(error).__name__}: {error}")

    def _end(self, request_id: str, error: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self._waiting[request_id].chunk = None
            self._put(request_id, Chunk([], finished=True, error=error))

    def _put_output(self, request: EngineRequest, words: StopWords, output: Any) -> bool:
        """Whether the request is to end though the engine would go on."""
        new = output.outputs[0]
        token_ids = list(new.token_ids)
        log_probs = None
        if request.log_probs:
            log_probs = [entry[token_id].logprob for token_id, entry in zip(token_ids, new.logprobs or [])]
        cut = words.cut(token_ids)
        finished = cut is not None or bool(output.finished)
        if request.request_id not in self._live:
            return True  # stopped meanwhile
        if finished:
            del self._live[request.request_id]
        if token_ids or finished:
            self._put(request.request_id, Chunk(token_ids[:cut], finished, log_probs=log_probs and log_probs[:cut]))
        return cut is not None

    def _put(self, request_id: str, chunk: Chunk) -> None:
        waiting = self._waiting[request_id]
        if waiting.chunk is not None:
            log_probs = None if chunk.log_probs is None else [*(waiting.chunk.log_probs or []), *chunk.log_probs]
            chunk = chunk._replace(token_ids=waiting.chunk.token_ids + chunk.token_ids, log_probs=log_probs)
        waiting.chunk = chunk
        if not self._flush_is_due:
            # After the tasks that the same step has woken: they are in the loop's queue before it.
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = time.monotonic()
        pause_s = len(self._live) / self._max_responses_per_s
        chunks, is_held = {}, False
        for request_id, waiting in list(self._waiting.items()):
            if waiting.chunk is None:
                continue
            if not waiting.chunk.finished and now_s - waiting.written_s < pause_s:
                is_held = True
                continue
            chunks[request_id] = waiting.chunk[:4]
            if waiting.chunk.finished:
                del self._waiting[request_id]
            else:
                waiting.chunk, waiting.written_s = None, now_s
        message: dict[str, Any] = {"chunks": chunks} if chunks else {}
        if self._kv_cache_usage != self._written_usage:
            self._written_usage = message["kv_cache_usage"] = self._kv_cache_usage
        if message:
            self._write(message)
        if is_held:  # for when no further step comes soon
            self._timer = self._loop.call_later(pause_s, self._flush)
