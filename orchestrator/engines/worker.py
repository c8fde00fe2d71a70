"""The engine's own process: steps a `Stepper` and speaks JSON lines with the Triton model that started it.

A process, because OpenVINO GenAI holds Python's global lock for a whole step: inside Triton's stub nothing else could
run meanwhile, and a crash would leave Triton waiting forever. Here one loop reads commands, steps, writes chunks.

    in    the settings, once:      {"parameters": {...}, "model_dir": "..."}
          then any number of:      {"add": {fields of EngineRequest}}   {"stop": "request id"}
          end of input:            exit
    out   once:                    {"ready": true, "kv_cache_usage": 0 to 1, or null without a KV cache}
          after a step or a stop:  {"chunks": {"request id": [four fields of Chunk]}, "kv_cache_usage": if it changed}
          last words:              {"failed": "why"}
"""

from __future__ import annotations

import collections
import json
import logging
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import pydantic_core

from orchestrator.engines import Chunk, EngineRefusal, EngineRequest, Stepper, create_stepper

log = logging.getLogger("orchestrator.engine")

READ_BYTES = 1 << 16
# From so many live requests on, a row's `stream_interval` holds: with fewer the processor has time for each token.
BUSY_REQUESTS = 8
# With DEBUG, every chunk's token ids are logged.
LOG_LEVEL_VARIABLE = "TRITON_REALTIME_LOG_LEVEL"


class CommandReader:
    """Reads JSON lines from a file descriptor without ever waiting longer than asked."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._partial = b""
        self.is_closed = False

    def read(self, *, wait: bool) -> list[dict[str, Any]]:
        """The commands that have arrived; with `wait` at least one, unless the input ends."""
        commands: list[dict[str, Any]] = []
        while not self.is_closed and select.select([self.fd], [], [], None if wait and not commands else 0)[0]:
            data = os.read(self.fd, READ_BYTES)
            self.is_closed = not data
            *lines, self._partial = (self._partial + data).split(b"\n")
            commands += [pydantic_core.from_json(line) for line in lines]
        return commands


class StreamInterval:
    """Lets a token wait for the next one of its request, so that many requests' tokens travel in fewer chunks.

    What waits goes in the same step for all: their chunks then wake each process of the way once. A first token never
    waits, nor does a last one. TensorRT-LLM and vLLM know it by the same name.
    """

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens` is the size of a chunk: 1 lets none wait."""
        self._num_tokens = num_tokens
        self._num_steps = 0
        self._begun: set[str] = set()
        self._held: dict[str, Chunk] = {}

    def join(self, chunks: dict[str, Chunk], num_live: int) -> dict[str, Chunk]:
        """Those of a step's chunks that go now, with what waited for them."""
        if self._num_tokens == 1:
            return chunks
        self._num_steps += 1
        is_time = num_live < BUSY_REQUESTS or self._num_steps % self._num_tokens == 0
        ready: dict[str, Chunk] = {}
        for request_id, chunk in chunks.items():
            if held := self._held.pop(request_id, None):
                log_probs = None if chunk.log_probs is None else [*(held.log_probs or []), *chunk.log_probs]
                chunk = chunk._replace(token_ids=held.token_ids + chunk.token_ids, log_probs=log_probs)
            may_wait = request_id in self._begun and not chunk.finished
            if may_wait and not is_time and len(chunk.token_ids) < self._num_tokens:
                self._held[request_id] = chunk
                continue
            ready[request_id] = chunk
            if chunk.finished:
                self.forget(request_id)
            else:
                self._begun.add(request_id)
        return ready

    def forget(self, request_id: str) -> None:
        """It ended; what waits of it nobody reads."""
        self._begun.discard(request_id)
        self._held.pop(request_id, None)


class Worker:
    """Requests join and leave between two steps, whatever the others do."""

    def __init__(self, stepper: Stepper, commands: CommandReader, out_fd: int, stream_interval: int = 1) -> None:
        self._stepper = stepper
        self._commands = commands
        self._out_fd = out_fd
        self._interval = StreamInterval(stream_interval)
        self._live: set[str] = set()
        self._kv_cache_usage = stepper.kv_cache_usage()  # as it was written last
        # When the last steps began, for the log line that proves how soon a stop took effect.
        self._step_began_s: collections.deque[float] = collections.deque(maxlen=4)

    def run(self) -> None:
        """Serve until the input ends. Whatever the stepper raises but `EngineRefusal` ends the engine."""
        while True:
            chunks: dict[str, Chunk] = {}
            for command in self._commands.read(wait=not self._stepper.has_requests()):
                if "add" in command:
                    self._add(EngineRequest(**command["add"]), chunks)
                else:
                    self._stop(command["stop"], chunks)
            if self._commands.is_closed:
                return
            self._write(chunks)
            if self._stepper.has_requests():
                self._step_began_s.append(time.monotonic())
                self._write(self._interval.join(self._stepper.step(), len(self._live)))

    def _add(self, request: EngineRequest, chunks: dict[str, Chunk]) -> None:
        try:
            self._stepper.add(request)
            self._live.add(request.request_id)
        except EngineRefusal as refusal:
            chunks[request.request_id] = Chunk([], finished=True, error=str(refusal))

    def _stop(self, request_id: str, chunks: dict[str, Chunk]) -> None:
        if request_id not in self._live:
            return
        self._live.remove(request_id)  # a second stop may be right behind
        self._stepper.stop(request_id)
        self._interval.forget(request_id)
        chunks[request_id] = Chunk([], finished=True)
        line = {"event": "engine_stopped", "request_id": request_id, "monotonic_s": time.monotonic()}
        log.info(json.dumps(line | {"last_steps_began_s": list(self._step_began_s)}))

    def _write(self, chunks: dict[str, Chunk]) -> None:
        # Without the fields of engines of text, which have no worker.
        message: dict[str, Any] = {"chunks": {key: chunk[:4] for key, chunk in chunks.items()}} if chunks else {}
        if (usage := self._stepper.kv_cache_usage()) != self._kv_cache_usage:
            self._kv_cache_usage = message["kv_cache_usage"] = usage
        if message:
            self._live.difference_update(request_id for request_id, chunk in chunks.items() if chunk.finished)
            if log.isEnabledFor(logging.DEBUG):
                for request_id, chunk in chunks.items():
                    line = {"event": "engine_chunk", "request_id": request_id, "token_ids": chunk.token_ids}
                    log.debug(json.dumps(line))
            write_line(self._out_fd, message)


def write_line(fd: int, message: dict[str, Any]) -> None:
    """Write `message` as one line of JSON, whole.

    By pydantic's parser and writer, on both sides: a prompt of 8,000 tokens takes a quarter of the time that `json`
    takes to write it and half of what it takes to read it.
    """
    data = memoryview(pydantic_core.to_json(message) + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO")
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    out_fd = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between our lines
    commands = CommandReader(0)
    try:
        settings, *_ = commands.read(wait=True)
        parameters, model_dir = settings["parameters"], Path(settings["model_dir"])
        if parameters.get("engine") == "vllm":  # it steps by itself
            from orchestrator.engines.vllm import run_worker

            run_worker(parameters, model_dir, commands, out_fd)
            return
        stream_interval = int(parameters.pop("stream_interval", "1"))
        stepper = create_stepper(parameters, model_dir)
        write_line(out_fd, {"ready": True, "kv_cache_usage": stepper.kv_cache_usage()})
        Worker(stepper, commands, out_fd, stream_interval).run()
    except Exception as error:
        log.exception("the engine failed")
        write_line(out_fd, {"failed": f"the engine failed: {type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
