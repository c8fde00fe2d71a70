"""The thread that steps a `Stepper`: requests join and leave between two steps, whatever the others do."""

from __future__ import annotations

import logging
import threading

from orchestrator.engines import Chunk, Deliver, EngineRefusal, EngineRequest, Stepper

log = logging.getLogger(__name__)


class SteppedEngine:
    """An `Engine` over a `Stepper`.

    All calls into the stepper come from one thread. Callers leave requests and stops in a mailbox, which the
    thread empties before every step, stops last, so that a request stopped before it began never runs.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._mail = threading.Condition()
        self._new: list[tuple[EngineRequest, Deliver]] = []
        self._stops: list[str] = []
        self._live: dict[str, Deliver] = {}
        self._failure: str | None = None
        self.num_steps = 0
        self.num_tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_live(self) -> int:
        """Requests accepted and not finished."""
        return len(self._live) + len(self._new)

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        with self._mail:
            if self._failure is not None:
                raise EngineRefusal(self._failure)
            if request.request_id in self._live or any(new.request_id == request.request_id for new, _ in self._new):
                raise EngineRefusal(f"request id: {request.request_id!r} is already running; use a fresh one")
            self._new.append((request, deliver))
            self._mail.notify()

    def stop(self, request_id: str) -> None:
        with self._mail:
            if self._failure is not None:
                raise EngineRefusal(self._failure)
            self._stops.append(request_id)
            self._mail.notify()

    def close(self) -> None:
        self._end("the engine is shutting down")
        self._thread.join()

    def _end(self, reason: str) -> None:
        """From now on refuse with `reason`; the thread ends what is live with it."""
        with self._mail:
            self._failure = self._failure or reason
            self._mail.notify()

    def _run(self) -> None:
        try:
            while self._receive():
                if self._stepper.has_requests():
                    self.num_steps += 1
                    for request_id, chunk in self._stepper.step().items():
                        self._deliver(request_id, chunk)
        except Exception as error:
            log.exception("the engine failed")
            self._end(f"the engine failed: {type(error).__name__}: {error}")
        with self._mail:
            waiting = [(request.request_id, deliver) for request, deliver in self._new]
            self._live.update(waiting)
            self._new.clear()
        for request_id in list(self._live):
            self._deliver(request_id, Chunk([], finished=True, error=self._failure))

    def _receive(self) -> bool:
        """Empty the mailbox, waiting for mail while there is nothing to step; False when the engine must end."""
        with self._mail:
            self._mail.wait_for(
                lambda: self._new or self._stops or self._failure is not None or self._stepper.has_requests()
            )
            new, self._new = self._new, []
            stops, self._stops = self._stops, []
            if self._failure is not None:
                self._new = new
                return False
            self._live.update((request.request_id, deliver) for request, deliver in new)
        for request, _ in new:
            try:
                self._stepper.add(request)
            except EngineRefusal as refusal:
                self._deliver(request.request_id, Chunk([], finished=True, error=str(refusal)))
        for request_id in stops:
            if request_id in self._live:
                self._stepper.stop(request_id)
                self._deliver(request_id, Chunk([], finished=True))
        return True

    def _deliver(self, request_id: str, chunk: Chunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        deliver = self._live.pop(request_id) if chunk.finished else self._live[request_id]
        deliver(chunk)
