"""AsyncLLM: echoes. A prompt that begins with one of these ids makes trouble instead.

REFUSED: `ValueError`, as for a guide that does not compile. FAILS: this request fails after a token. DIES: all does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

REFUSED, FAILS, DIES = 31, 32, 33
NUM_CONTROL_IDS = 20
BLOCK_TOKENS, NUM_BLOCKS = 16, 1000


@dataclass
class Logprob:
    logprob: float


class AsyncLLM:
    def __init__(self, arguments: dict[str, Any], loggers: list[Any]) -> None:
        self.arguments = arguments
        self.errored = False
        self.aborted: list[str] = []
        self.is_shut_down = False
        self._itl_s = float(os.environ.get("FAKE_VLLM_ITL_MS", "2")) / 1000
        self._loggers = loggers
        self._live: dict[str, int] = {}  # tokens held

    @classmethod
    def from_engine_args(cls, engine_args: Any, stat_loggers: list[type[Any]] | None = None) -> AsyncLLM:
        loggers = [each(vllm_config=None, engine_indexes=[0]) for each in stat_loggers or []]
        for logger in loggers:
            logger.log_engine_initialized()
        return cls(engine_args.values, loggers)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        ids, params = prompt["prompt_token_ids"], sampling_params
        if ids[0] == REFUSED:
            raise ValueError("no such grammar")
        circle = [each for each in ids if each >= NUM_CONTROL_IDS] or [NUM_CONTROL_IDS]
        try:
            for number in range(params.max_tokens):
                await asyncio.sleep(self._itl_s)
                if self.errored or (ids[0] == DIES and number == 1):
                    self.errored = True
                    raise RuntimeError("the core is dead")
                if ids[0] == FAILS and number == 1:
                    raise RuntimeError("this one failed")
                ends = bool(params.stop_token_ids) and number >= max(len(circle), params.min_tokens)
                token_id = params.stop_token_ids[0] if ends else circle[number % len(circle)]
                finished = ends or number == params.max_tokens - 1
                self._live[request_id] = len(ids) + number + 1
                if finished:
                    del self._live[request_id]
                self._tell()
                log_probs = None if params.logprobs is None else [{token_id: Logprob(-0.5), 0: Logprob(-9.0)}]
                new = SimpleNamespace(token_ids=[token_id], logprobs=log_probs)
                yield SimpleNamespace(outputs=[new], finished=finished)
                if finished:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            self._live.pop(request_id, None)
            raise

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _tell(self) -> None:
        used = sum(-(-tokens // BLOCK_TOKENS) for tokens in self._live.values())
        for logger in self._loggers:
            logger.record(SimpleNamespace(kv_cache_usage=used / NUM_BLOCKS), None)
