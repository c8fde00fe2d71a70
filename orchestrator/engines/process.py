"""An `Engine` that runs in a process of its own: see `engines.worker`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from orchestrator.engines import Chunk, Deliver, EngineRefusal, EngineRequest
from orchestrator.engines.worker import write_line

log = logging.getLogger("orchestrator.engine")

# The Python that runs the engine, where it is not the one of Triton's models: vLLM's numpy is too new for theirs.
PYTHON_VARIABLE = "TRITON_REALTIME_ENGINE_PYTHON"


class ProcessEngine:
    """Starts the worker, waits until it has loaded, and passes requests and chunks on.

    Raises `RuntimeError` with the worker's last words when it cannot load.
    """

    def __init__(self, parameters: Mapping[str, str], model_dir: Path) -> None:
        # Triton's stub is no Python interpreter; like it, we take the first python3 in PATH.
        named = os.environ.get(PYTHON_VARIABLE)
        python = shutil.which(named or "python3")
        if python is None:
            fault = f"{PYTHON_VARIABLE}: no {named}" if named else "no python3"
            raise RuntimeError(f"{fault} in PATH to run the engine with")
        self._process = subprocess.Popen(
            [python, "-m", "orchestrator.engines.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin and self._process.stdout
        self._in = self._process.stdin
        self._out = self._process.stdout
        # Two locks: a write may wait for the worker, which may wait for us to read what it says.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._live: dict[str, Deliver] = {}
        self._failure: str | None = None
        self._send({"parameters": dict(parameters), "model_dir": str(model_dir)})
        first = json.loads(self._out.readline() or "{}")
        if "ready" not in first:
            self._process.kill()
            self._process.communicate()
            raise RuntimeError(first.get("failed", "the engine's process ended while loading; its log says why"))
        self._kv_cache_usage: float | None = first["kv_cache_usage"]
        self._reader = threading.Thread(target=self._read, name="engine", daemon=True)
        self._reader.start()

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineRefusal(self._failure)
            if request.request_id in self._live:
                raise EngineRefusal(f"request id: {request.request_id!r} is already running; use a fresh one")
            self._live[request.request_id] = deliver
        self._send({"add": dataclasses.asdict(request)})

    def stop(self, request_id: str) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineRefusal(self._failure)
        self._send({"stop": request_id})

    def kv_cache_usage(self) -> float | None:
        return self._kv_cache_usage

    def close(self) -> None:
        with self._lock:
            self._failure = self._failure or "the engine is shutting down"
        with self._writing:
            self._in.close()  # end of input: the worker exits after its step
        self._reader.join()

    def _send(self, message: dict[str, object]) -> None:
        with self._writing:
            try:
                if not self._in.closed:
                    write_line(self._in.fileno(), message)
            except BrokenPipeError:
                pass  # the worker is gone; the reader sees its end and tells every request

    def _read(self) -> None:
        failure = None
        for line in self._out:
            message = json.loads(line)
            failure = message.get("failed")
            self._kv_cache_usage = message.get("kv_cache_usage", self._kv_cache_usage)
            for request_id, fields in message.get("chunks", {}).items():
                chunk = Chunk(*fields)
                with self._lock:
                    deliver = self._live.pop(request_id) if chunk.finished else self._live[request_id]
                deliver(chunk)
        self._out.close()
        status = self._process.wait()
        with self._lock:
            self._failure = self._failure or failure or f"the engine's process ended with status {status}"
            waiting = list(self._live.values())
            self._live.clear()
        if status != 0:
            log.error(json.dumps({"event": "engine_failed", "error": self._failure, "num_waiting": len(waiting)}))
        for deliver in waiting:
            deliver(Chunk([], finished=True, error=self._failure))
