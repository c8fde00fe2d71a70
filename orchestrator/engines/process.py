"""An `Engine` that runs in a process of its own: see `engines.worker`.

A worker that dies takes its requests with it, and another one is started in its place: whoever asks until that has
loaded is refused. In-process state (the prefix cache) begins anew.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pydantic_core

from orchestrator.engines import Chunk, Deliver, EngineRefusal, EngineRequest
from orchestrator.engines.worker import write_line

log = logging.getLogger("orchestrator.engine")

# The Python that runs the engine, where it is not the one of Triton's models: vLLM's numpy is too new for theirs.
PYTHON_VARIABLE = "TRITON_REALTIME_ENGINE_PYTHON"


_FIELDS = tuple(each.name for each in dataclasses.fields(EngineRequest))
# Before the worker is started again: not at all, unless the one before lived for less than `SETTLED_S`.
RESTART_DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
SETTLED_S = 60.0


class ProcessEngine:
    """Starts the worker, waits until it has loaded, and passes requests and chunks on.

    Raises `RuntimeError` with the worker's last words when it cannot load.
    """

    def __init__(
        self, parameters: Mapping[str, str], model_dir: Path, after_step: Callable[[], None] = lambda: None
    ) -> None:
        """`after_step` is called when all chunks of a step were delivered, on the thread that did."""
        # Triton's stub is no Python interpreter; like it, we take the first python3 in PATH.
        named = os.environ.get(PYTHON_VARIABLE)
        python = shutil.which(named or "python3")
        if python is None:
            fault = f"{PYTHON_VARIABLE}: no {named}" if named else "no python3"
            raise RuntimeError(f"{fault} in PATH to run the engine with")
        self._after_step = after_step
        self._python = python
        self._settings: dict[str, object] = {"parameters": dict(parameters), "model_dir": str(model_dir)}
        # Two locks: a write may wait for the worker, which may wait for us to read what it says.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._live: dict[str, Deliver] = {}
        self._failure: str | None = None  # while there is no worker that takes requests
        self._is_closing = threading.Event()
        self._start()
        self._supervisor = threading.Thread(target=self._supervise, name="engine", daemon=True)
        self._supervisor.start()

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineRefusal(self._failure)
            if request.request_id in self._live:
                raise EngineRefusal(f"request id: {request.request_id!r} is already running; use a fresh one")
            self._live[request.request_id] = deliver
            worker = self._process
        # Not `asdict`, which copies the prompt token by token: 10 ms for 8,000.
        self._send(worker, {"add": {name: getattr(request, name) for name in _FIELDS}})

    def stop(self, request_id: str) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineRefusal(self._failure)
            worker = self._process
        self._send(worker, {"stop": request_id})

    def kv_cache_usage(self) -> float | None:
        return self._kv_cache_usage

    def close(self) -> None:
        with self._lock:
            self._is_closing.set()
            is_down = self._failure is not None
            self._failure = self._failure or "the engine is shutting down"
            worker = self._process
        if is_down:  # or it would load first
            worker.kill()
        self._close_input(worker)  # end of input: the worker exits after its step
        self._supervisor.join()

    def _start(self) -> None:
        """Start a worker and wait until it has loaded. Raises `RuntimeError`, and has killed it then."""
        with self._lock:
            if self._is_closing.is_set():
                raise RuntimeError("the engine is shutting down")
            self._process = worker = subprocess.Popen(
                [self._python, "-m", "orchestrator.engines.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert worker.stdout is not None
        self._send(worker, self._settings)
        line = worker.stdout.readline()
        first = pydantic_core.from_json(line) if line.endswith(b"\n") else {}
        if "ready" not in first:
            worker.kill()
            self._close_input(worker)
            worker.stdout.close()
            worker.wait()
            raise RuntimeError(first.get("failed", "the engine's process ended while loading; its log says why"))
        self._kv_cache_usage: float | None = first["kv_cache_usage"]

    def _supervise(self) -> None:
        num_deaths = 0
        while True:
            started_s = time.monotonic()
            self._read()
            num_deaths = 0 if time.monotonic() - started_s > SETTLED_S else num_deaths
            while not self._restart(num_deaths):
                num_deaths += 1
                if self._is_closing.is_set():
                    return
            num_deaths += 1

    def _restart(self, num_deaths: int) -> bool:
        """Whether there is a worker again that takes requests."""
        if self._is_closing.wait(RESTART_DELAYS_S[min(num_deaths, len(RESTART_DELAYS_S) - 1)]):
            return False
        started_s = time.monotonic()
        try:
            self._start()
        except (RuntimeError, OSError) as error:  # the second: there is no memory for a process
            if not self._is_closing.is_set():
                log.error(json.dumps({"event": "engine_not_restarted", "error": str(error)}))
            return False
        log.warning(json.dumps({"event": "engine_restarted", "took_s": round(time.monotonic() - started_s, 3)}))
        with self._lock:
            if not self._is_closing.is_set():
                self._failure = None
        return True

    def _send(self, worker: subprocess.Popen[bytes], message: dict[str, object]) -> None:
        assert worker.stdin is not None
        with self._writing:
            try:
                if not worker.stdin.closed:
                    write_line(worker.stdin.fileno(), message)
            except BrokenPipeError:
                pass  # the worker is gone; the reader sees its end and tells every request

    def _close_input(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdin is not None
        with self._writing:
            worker.stdin.close()

    def _read(self) -> None:
        """What the worker says, until it ends; then every request of it ends."""
        worker = self._process
        failure: str | None = None
        assert worker.stdout is not None
        for line in worker.stdout:
            if not line.endswith(b"\n"):  # it died as it wrote
                break
            message = pydantic_core.from_json(line)
            failure = message.get("failed")
            self._kv_cache_usage = message.get("kv_cache_usage", self._kv_cache_usage)
            for request_id, fields in message.get("chunks", {}).items():
                chunk = Chunk(*fields)
                with self._lock:
                    deliver = self._live.pop(request_id) if chunk.finished else self._live[request_id]
                deliver(chunk)
            self._after_step()
        worker.stdout.close()
        status = worker.wait()
        self._close_input(worker)
        with self._lock:
            self._failure = self._failure or failure or f"the engine's process ended with status {status}"
            waiting = list(self._live.values())
            self._live.clear()
        if status != 0:
            log.error(json.dumps({"event": "engine_failed", "error": self._failure, "num_waiting": len(waiting)}))
        for deliver in waiting:
            deliver(Chunk([], finished=True, error=self._failure))
        self._after_step()
