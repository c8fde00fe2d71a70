"""The engine's own process: join, leave and die, and each request ends with exactly one finished chunk."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from orchestrator.engines import Chunk, EngineRefusal, EngineRequest
from orchestrator.engines.process import ProcessEngine
from orchestrator.engines.worker import BUSY_REQUESTS, CommandReader, StreamInterval, Worker, write_line

PARAMETERS = {"engine": "scripted", "max_batch_size": "8", "context_window": "8192", "vocab_size": "49152"}
TIMEOUT_S = 10.0


class Inbox:
    """Where the chunks of one request arrive."""

    def __init__(self) -> None:
        self._chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self.put = self._chunks.put

    def next(self) -> Chunk:
        return self._chunks.get(timeout=TIMEOUT_S)

    def until_finished(self) -> list[Chunk]:
        chunks = [self.next()]
        while not chunks[-1].finished:
            chunks.append(self.next())
        return chunks

    def is_empty(self) -> bool:
        return self._chunks.empty()


# --- the worker, over pipes, with a stepper that does what the test says -------------------------------------


class FakeStepper:
    """Emits one token (the number of its step) for each live request; what a test puts into `die` it raises."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.live: set[str] = set()
        self.may_step = threading.Semaphore(0)
        self.num_steps = 0
        self.die: Exception | None = None
        self.usage: float | None = None
        self.usages: list[float | None] = []

    def add(self, request: EngineRequest) -> None:
        if request.max_new_tokens > 100:
            raise EngineRefusal("request_output_len: too much")
        self.log.append(f"add {request.request_id}")
        self.live.add(request.request_id)

    def stop(self, request_id: str) -> None:
        self.log.append(f"stop {request_id}")
        self.live.remove(request_id)

    def has_requests(self) -> bool:
        return bool(self.live)

    def kv_cache_usage(self) -> float | None:
        return self.usage

    def step(self) -> dict[str, Chunk]:
        assert self.may_step.acquire(timeout=TIMEOUT_S)
        if self.die is not None:
            raise self.die
        self.num_steps += 1
        if self.usages:
            self.usage = self.usages.pop(0)
        return {request_id: Chunk([self.num_steps]) for request_id in sorted(self.live)}


class RunningWorker:
    """A worker in a thread, and the two pipes to it."""

    def __init__(self, stepper: FakeStepper) -> None:
        commands_fd, self._in_fd = os.pipe()
        self._out_fd, chunks_fd = os.pipe()
        self._fds = (commands_fd, chunks_fd)
        self._output = CommandReader(self._out_fd)  # it reads any JSON lines
        self._seen: list[dict[str, Any]] = []
        self.died: Exception | None = None
        self._may_step = stepper.may_step
        self._worker = Worker(stepper, CommandReader(commands_fd), chunks_fd)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            self.died = error

    def add(self, request_id: str, max_new_tokens: int = 10) -> None:
        fields = {"request_id": request_id, "input_ids": [1], "max_new_tokens": max_new_tokens}
        write_line(self._in_fd, {"add": fields})

    def stop(self, request_id: str) -> None:
        write_line(self._in_fd, {"stop": request_id})

    def send_raw(self, data: bytes) -> None:
        os.write(self._in_fd, data)

    def chunks(self) -> dict[str, Chunk]:
        return {request_id: Chunk(*fields) for request_id, fields in self.line()["chunks"].items()}

    def line(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._seen:
            assert self.died is None and time.monotonic() < deadline_s, self.died
            self._seen += self._output.read(wait=False)
        return self._seen.pop(0)

    def end(self) -> None:
        os.close(self._in_fd)
        self._may_step.release()  # the last step, if it waits for one; then it sees that the input ended
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        for fd in (self._out_fd, *self._fds):
            os.close(fd)


@pytest.fixture
def stepper() -> FakeStepper:
    return FakeStepper()


@pytest.fixture
def worker(stepper: FakeStepper) -> Iterator[RunningWorker]:
    worker = RunningWorker(stepper)
    yield worker
    worker.end()


def test_requests_join_and_leave_between_steps(stepper: FakeStepper, worker: RunningWorker) -> None:
    worker.add("a")
    stepper.may_step.release()
    assert worker.chunks() == {"a": Chunk([1])}
    worker.add("b")  # joins while "a" runs
    stepper.may_step.release(2)
    seen = [worker.chunks(), worker.chunks()]
    assert seen[-1] == {"a": Chunk([3]), "b": Chunk([3])}
    worker.stop("a")
    stepper.may_step.release(2)
    while (chunks := worker.chunks()) != {"a": Chunk([], finished=True)}:
        assert "a" in chunks
    assert set(worker.chunks()) == {"b"}


def test_the_use_of_the_kv_cache_is_told_when_it_changes(stepper: FakeStepper, worker: RunningWorker) -> None:
    stepper.usages = [None, 0.25, 0.25, 0.0]
    worker.add("a")
    stepper.may_step.release(4)
    told = [{}, {"kv_cache_usage": 0.25}, {}, {"kv_cache_usage": 0.0}]
    assert [worker.line() for _ in told] == [
        {"chunks": {"a": [[n], False, None, None]}} | told[n - 1] for n in range(1, 5)
    ]


def test_a_request_stopped_before_it_began_never_runs(stepper: FakeStepper, worker: RunningWorker) -> None:
    worker.send_raw(b'{"add":{"request_id":"a","input_ids":[1],"max_new_tokens":5}}\n{"stop":"a"}\n')
    assert worker.chunks() == {"a": Chunk([], finished=True)}
    assert (stepper.log, stepper.num_steps) == (["add a", "stop a"], 0)


def test_stopping_twice_or_what_is_unknown_is_nothing(stepper: FakeStepper, worker: RunningWorker) -> None:
    worker.stop("nobody")
    worker.add("a")
    worker.stop("a")
    worker.stop("a")
    worker.add("b")
    stepper.may_step.release(2)
    finished = 0
    while "b" not in (chunks := worker.chunks()):
        finished += chunks["a"].finished
    assert finished == 1
    assert stepper.log == ["add a", "stop a", "add b"]


def test_a_refused_request_disturbs_nobody(stepper: FakeStepper, worker: RunningWorker) -> None:
    worker.add("a")
    worker.add("b", max_new_tokens=101)
    stepper.may_step.release(2)
    seen: dict[str, Chunk] = {}
    while set(seen) != {"a", "b"}:
        seen |= worker.chunks()
    assert seen["b"] == Chunk([], finished=True, error="request_output_len: too much")
    assert seen["a"].error is None


def test_with_many_requests_tokens_travel_in_pairs() -> None:
    interval = StreamInterval(2)

    def step(num_live: int = BUSY_REQUESTS, **chunks: Chunk) -> dict[str, Chunk]:
        return interval.join(chunks, num_live)

    assert step(a=Chunk([1])) == {"a": Chunk([1])}, "the first token never waits"
    assert step(b=Chunk([7])) == {"b": Chunk([7])}
    assert step(a=Chunk([2], log_probs=[-0.2])) == {}
    assert step(a=Chunk([3], log_probs=[-0.3]), b=Chunk([8])) == {
        "a": Chunk([2, 3], log_probs=[-0.2, -0.3]),
        "b": Chunk([8]),
    }, "all in the same step"
    assert step(a=Chunk([4, 5]), b=Chunk([9])) == {"a": Chunk([4, 5])}, "enough by themselves"
    assert step(a=Chunk([6])) == {"a": Chunk([6])}
    assert step(BUSY_REQUESTS - 1, a=Chunk([7]), b=Chunk([10])) == {"a": Chunk([7]), "b": Chunk([9, 10])}
    assert step(BUSY_REQUESTS - 1, a=Chunk([8])) == {"a": Chunk([8])}
    assert step(a=Chunk([9]), b=Chunk([11])) == {}
    assert step(a=Chunk([], finished=True)) == {"a": Chunk([9], finished=True)}, "the last never waits"
    interval.forget("b")
    assert step(b=Chunk([1])) == {"b": Chunk([1])}, "the same id anew"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_token_is_lost_by_waiting(size: int) -> None:
    chance, interval = random.Random(size), StreamInterval(size)
    sent: dict[str, list[int]] = {f"r{number}": [] for number in range(12)}
    made: dict[str, list[int]] = {request_id: [] for request_id in sent}
    live = set(sent)
    while live:
        chunks = {}
        for request_id in chance.sample(sorted(live), chance.randint(1, len(live))):
            token_ids = [chance.randrange(100) for _ in range(chance.randint(0, 2))]
            made[request_id] += token_ids
            chunks[request_id] = Chunk(token_ids, finished=chance.random() < 0.1)
        for request_id, chunk in interval.join(chunks, len(live)).items():
            sent[request_id] += chunk.token_ids
        live -= {request_id for request_id, chunk in chunks.items() if chunk.finished}
    assert sent == made


def test_a_command_in_pieces(stepper: FakeStepper, worker: RunningWorker) -> None:
    line = b'{"add":{"request_id":"a","input_ids":[1],"max_new_tokens":5}}\n'
    for byte in line:
        worker.send_raw(bytes([byte]))
    stepper.may_step.release()
    assert worker.chunks() == {"a": Chunk([1])}


def test_a_stepper_that_fails_ends_the_worker(stepper: FakeStepper, worker: RunningWorker) -> None:
    stepper.die = RuntimeError("out of memory")
    worker.add("a")
    stepper.may_step.release()
    deadline_s = time.monotonic() + TIMEOUT_S
    while worker.died is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert worker.died is stepper.die


def test_a_stop_is_logged_with_the_last_steps(
    stepper: FakeStepper, worker: RunningWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "orchestrator.engine"):
        worker.add("a")
        stepper.may_step.release(6)
        while worker.chunks() != {"a": Chunk([6])}:
            pass
        worker.stop("a")
        stepper.may_step.release()
        while not worker.chunks()["a"].finished:
            pass
    (line,) = [json.loads(message) for message in caplog.messages]
    assert (line["event"], line["request_id"]) == ("engine_stopped", "a")
    assert len(line["last_steps_began_s"]) == 4
    assert line["last_steps_began_s"] == sorted(line["last_steps_began_s"])
    assert line["last_steps_began_s"][-1] <= line["monotonic_s"]


# --- the process ---------------------------------------------------------------------------------------------


@contextmanager
def running_engine(model_dir: Path, **parameters: str) -> Iterator[ProcessEngine]:
    engine = ProcessEngine({**PARAMETERS, **parameters}, model_dir)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def python_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs on the first python3 in PATH, as Triton's stub does."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


@pytest.fixture(scope="module")
def shared_engine(tokenizer_dir: Path) -> Iterator[ProcessEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        with running_engine(tokenizer_dir.parent) as engine:
            yield engine


@pytest.fixture(scope="module")
def request_for(tokenizer: Tokenizer) -> Callable[..., EngineRequest]:
    """A request whose prompt is the script in `fields`."""

    def make(request_id: str, *, padding: int = 0, **fields: Any) -> EngineRequest:
        prompt = "x " * padding + f"#script {json.dumps(fields)}"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        return EngineRequest(request_id, ids, max_new_tokens=200_000, end_id=2)

    return make


def process_id(engine: ProcessEngine) -> int:
    return engine._process.pid


def test_a_request_runs_to_its_end(shared_engine: ProcessEngine, request_for: Callable[..., EngineRequest]) -> None:
    inbox = Inbox()
    shared_engine.add(request_for("a", token_ids=[[5], [6, 7], []]), inbox.put)
    assert inbox.until_finished() == [Chunk([5]), Chunk([6, 7]), Chunk([], finished=True)]
    assert inbox.is_empty()


def test_a_request_and_a_chunk_arrive_with_all_their_fields(
    shared_engine: ProcessEngine, request_for: Callable[..., EngineRequest]
) -> None:
    inbox = Inbox()
    asked = request_for("a", token_ids=[[5], [6], [7]], log_probs=[-0.5, -0.25])
    shared_engine.add(dataclasses.replace(asked, stop_words=[[5, 6]], log_probs=True, guide_type="json"), inbox.put)
    assert inbox.until_finished() == [Chunk([5], log_probs=[-0.5]), Chunk([6], finished=True, log_probs=[-0.25])]


def test_the_end_of_each_step_is_told(tokenizer_dir: Path, request_for: Callable[..., EngineRequest]) -> None:
    """After all that the step brought, so that it can leave as one."""
    told: list[str] = []
    engine = ProcessEngine(PARAMETERS, tokenizer_dir.parent, lambda: told.append("step"))
    try:
        ended = threading.Event()

        def deliver(chunk: Chunk) -> None:
            told.append("chunk")
            if chunk.finished:
                ended.set()

        engine.add(request_for("a"), deliver)
        assert ended.wait(TIMEOUT_S)
    finally:
        engine.close()
    assert told.count("chunk") >= 1 and "".join(told).replace("chunkstep", "").replace("step", "") == "", told


def test_an_id_may_run_once_at_a_time(shared_engine: ProcessEngine, request_for: Callable[..., EngineRequest]) -> None:
    inbox = Inbox()
    shared_engine.add(request_for("a", token_ids=[[5], [6]], first_token_ms=5000), inbox.put)
    with pytest.raises(EngineRefusal, match="^request id: 'a' is already running; use a fresh one$"):
        shared_engine.add(request_for("a", token_ids=[[5]]), inbox.put)
    shared_engine.stop("a")
    assert inbox.until_finished() == [Chunk([], finished=True)]
    shared_engine.add(request_for("a", token_ids=[[5]]), inbox.put)  # and then again
    assert inbox.until_finished() == [Chunk([5], finished=True)]


def test_a_stop_ends_a_request_in_its_midst(
    shared_engine: ProcessEngine, request_for: Callable[..., EngineRequest]
) -> None:
    inbox, other = Inbox(), Inbox()
    shared_engine.add(request_for("a", token_ids=[[5]] * 1000, itl_ms=5), inbox.put)
    shared_engine.add(request_for("b", token_ids=[[6]] * 20, itl_ms=5), other.put)
    inbox.next()
    shared_engine.stop("a")
    assert len(inbox.until_finished()) < 100
    shared_engine.stop("a")
    shared_engine.stop("nobody")
    assert len(other.until_finished()) == 20


def test_a_failed_request_disturbs_nobody(
    shared_engine: ProcessEngine, request_for: Callable[..., EngineRequest]
) -> None:
    inbox, other = Inbox(), Inbox()
    shared_engine.add(request_for("a", token_ids=[[5]] * 9, fail_after=2), inbox.put)
    shared_engine.add(request_for("b", token_ids=[[6]] * 9), other.put)
    assert inbox.until_finished() == [Chunk([5])] * 2 + [Chunk([], finished=True, error="the script says fail")]
    assert other.until_finished()[-1].error is None


def test_long_prompts_join_while_nobody_reads(
    shared_engine: ProcessEngine, request_for: Callable[..., EngineRequest]
) -> None:
    """The pipes are full in both directions, and yet everybody gets on."""
    may_read = threading.Event()
    stream = Inbox()

    def read_slowly(chunk: Chunk) -> None:
        may_read.wait(TIMEOUT_S)
        stream.put(chunk)

    shared_engine.add(request_for("s", token_ids=[[5] * 1000] * 200), read_slowly)
    prompts = [Inbox() for _ in range(16)]
    joining = threading.Thread(
        target=lambda: [
            shared_engine.add(request_for(f"p{index}", padding=3500, token_ids=[[5]]), inbox.put)
            for index, inbox in enumerate(prompts)
        ]
    )
    joining.start()
    joining.join(0.5)
    assert joining.is_alive(), "the pipes hold more than this test sends"
    may_read.set()
    assert stream.until_finished()[-1].finished
    for inbox in prompts:
        assert inbox.until_finished()[-1] == Chunk([5], finished=True)
    joining.join(TIMEOUT_S)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", "the engine failed: RuntimeError: the script says die"),
        ("kill", "the engine's process ended with status -9"),
    ],
)
def test_death_is_told_to_everyone_and_refuses_until_there_is_another_process(
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_for: Callable[..., EngineRequest],
    how: str,
    message: str,
) -> None:
    monkeypatch.setattr("orchestrator.engines.process.RESTART_DELAYS_S", (0.0, 0.05))
    shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    needed, gone = tmp_path / "tokenizer" / "tokenizer.json", tmp_path / "gone"
    with running_engine(tmp_path) as engine:
        inboxes = [Inbox() for _ in range(3)]
        for index, inbox in enumerate(inboxes):
            engine.add(request_for(f"r{index}", token_ids=[[5]] * 1000, itl_ms=10), inbox.put)
        for inbox in inboxes:
            inbox.next()
        needed.rename(gone)  # without it no other process can load
        first = process_id(engine)
        if how == "kill":
            os.kill(process_id(engine), signal.SIGKILL)
        else:
            engine.add(request_for("d", token_ids=[[5]] * 5, die_after=1), Inbox().put)
        for inbox in inboxes:
            assert inbox.until_finished()[-1] == Chunk([], finished=True, error=message)
            assert inbox.is_empty()
        with pytest.raises(EngineRefusal) as refused:
            engine.add(request_for("late", token_ids=[[5]]), Inbox().put)
        assert str(refused.value) == message
        with pytest.raises(EngineRefusal) as refused:
            engine.stop("r0")
        assert str(refused.value) == message
        gone.rename(needed)
        again = Inbox()
        add_when_back(engine, request_for("again", token_ids=[[5], [6]]), again)
        assert again.until_finished() == [Chunk([5]), Chunk([6], finished=True)]
        assert process_id(engine) != first
        assert not Path(f"/proc/{first}").exists()


def add_when_back(engine: ProcessEngine, request: EngineRequest, inbox: Inbox) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return engine.add(request, inbox.put)
        except EngineRefusal:
            assert time.monotonic() < ends_s, "the engine's process is not back"
            time.sleep(0.01)


def test_one_that_dies_again_and_again_is_started_ever_later(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, request_for: Callable[..., EngineRequest]
) -> None:
    waits: list[float] = []

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return self.is_set()

    monkeypatch.setattr("orchestrator.engines.process.RESTART_DELAYS_S", (0.0, 1.0, 2.0))
    with running_engine(tokenizer_dir.parent) as engine:
        monkeypatch.setattr(engine, "_is_closing", Impatient())
        for _ in range(4):
            inbox = Inbox()
            add_when_back(engine, request_for("d", token_ids=[[5]], die_after=1), inbox)
            assert inbox.until_finished()[-1].error == "the engine failed: RuntimeError: the script says die"
    assert waits[:3] == [0.0, 1.0, 2.0] and set(waits[3:]) == {2.0}


def test_a_process_that_dies_as_it_writes_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_for: Callable[..., EngineRequest]
) -> None:
    program = tmp_path / "engine"
    program.write_text(
        """#!/bin/sh
read settings
echo '{"ready": true, "kv_cache_usage": null}'
read command
printf '{"chunks": {"a": [[5'
exit 3
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("TRITON_REALTIME_ENGINE_PYTHON", str(program))
    with running_engine(tmp_path) as engine:
        inbox = Inbox()
        engine.add(request_for("a", token_ids=[[5]]), inbox.put)
        assert inbox.until_finished() == [Chunk([], finished=True, error="the engine's process ended with status 3")]


def test_closing_does_not_wait_for_another_process(
    tokenizer_dir: Path, tmp_path: Path, request_for: Callable[..., EngineRequest]
) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    with running_engine(tmp_path) as engine:
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
        os.kill(process_id(engine), signal.SIGKILL)
        ends_s = time.monotonic() + TIMEOUT_S
        while engine._failure is None:
            assert time.monotonic() < ends_s
            time.sleep(0.001)
        closes_s = time.monotonic()
    assert time.monotonic() - closes_s < 5
    assert not Path(f"/proc/{process_id(engine)}").exists()
    with pytest.raises(EngineRefusal, match="^the engine's process ended with status -9$"):
        engine.add(request_for("late", token_ids=[[5]]), Inbox().put)


def test_closing_ends_every_request_and_the_process(
    tokenizer_dir: Path, request_for: Callable[..., EngineRequest]
) -> None:
    with running_engine(tokenizer_dir.parent) as engine:
        inbox = Inbox()
        engine.add(request_for("a", token_ids=[[5]] * 1000, itl_ms=10), inbox.put)
        inbox.next()
    assert inbox.until_finished()[-1] == Chunk([], finished=True, error="the engine is shutting down")
    assert inbox.is_empty()
    assert not Path(f"/proc/{process_id(engine)}").exists()
    with pytest.raises(EngineRefusal, match="^the engine is shutting down$"):
        engine.add(request_for("late", token_ids=[[5]]), inbox.put)


def test_an_engine_that_cannot_load_says_why(tokenizer_dir: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"^the engine failed: ValidationError: 1 validation error for Settings\nitl_ms\n"
    ):
        ProcessEngine({**PARAMETERS, "itl_ms": "-1"}, tokenizer_dir.parent)


def test_without_a_python_in_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="^no python3 in PATH to run the engine with$"):
        ProcessEngine(PARAMETERS, tmp_path)
