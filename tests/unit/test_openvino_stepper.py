"""The OpenVINO engine's own part, over a pipeline that the test moves: guides, stop words, log probabilities."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import openvino_genai as genai
import pytest

from orchestrator.engines import Chunk, EngineRefusal, EngineRequest
from orchestrator.engines.guide_checker import Guide
from orchestrator.engines.openvino import MAX_ALL_GUIDES_BYTES, OpenVINOStepper, Settings

SETTINGS = Settings(
    engine="openvino",
    max_batch_size=8,
    max_tokens_in_paged_kv_cache=1024,
    max_num_tokens=512,
    enable_kv_cache_reuse=True,
    enable_chunked_context=True,
    context_window=100,
    vocab_size=50,
)
TIMEOUT_S = 5.0


class Handle:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.status = genai.GenerationStatus.RUNNING
        self.outputs: list[Any] = []

    def emit(self, *ids: int, finished: bool = False) -> None:
        probs = [-id / 10 for id in ids]
        self.outputs.append({0: SimpleNamespace(generated_ids=list(ids), generated_log_probs=probs)})
        if finished:
            self.status = genai.GenerationStatus.FINISHED

    def can_read(self) -> bool:
        return bool(self.outputs)

    def read(self) -> Any:
        return self.outputs.pop(0)

    def get_status(self) -> Any:
        return self.status

    def cancel(self) -> None:
        self.status = genai.GenerationStatus.CANCEL


class Pipeline:
    """Emits, at each step, what the test has put into its handles."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def add_request(self, number: int, ids: Any, config: Any) -> Handle:
        self.handles.append(Handle(config))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return any(handle.status == genai.GenerationStatus.RUNNING for handle in self.handles)

    def step(self) -> None:
        pass


class Checker:
    """Knows what the test tells it."""

    def __init__(self) -> None:
        self.known: dict[Guide, str | None] = {}
        self.size = 0

    def check(self, guide: Guide) -> bool:
        if self.known.get(guide):
            raise EngineRefusal(self.known[guide])
        return guide in self.known

    def knows(self, guide: Guide) -> bool:
        return guide in self.known

    def num_bytes(self, guide: Guide) -> int:
        return self.size

    def decide(self, guide: Guide, refusal: str | None) -> None:
        self.known[guide] = refusal


class Compiler:
    """Compiles when the test lets it."""

    def __init__(self) -> None:
        self.began: list[Guide] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def generate(self, guide: Guide) -> None:
        self.began.append(guide)
        assert self.go.acquire(timeout=TIMEOUT_S)
        if self.error is not None:
            raise self.error


class Engine:
    def __init__(self) -> None:
        self.num_loads = 0
        self.checker, self.compiler = Checker(), Compiler()
        self.stepper = OpenVINOStepper(self.load, SETTINGS, self.checker)
        self.stepper.warm_up = lambda: None

    def load(self) -> tuple[Any, Any]:
        self.pipeline = Pipeline()
        self.num_loads += 1
        return self.pipeline, self.compiler

    def add(self, request_id: str, **fields: Any) -> None:
        self.stepper.add(EngineRequest(request_id, [1, 2], **{"max_new_tokens": 20, "end_id": 3, **fields}))

    def step_until_compiled(self) -> dict[str, Chunk]:
        """Let the compiler finish what it has begun, and the stepper see it."""
        assert self.stepper._compiling is not None
        self.compiler.go.release()
        self.stepper._compiling[1].exception(TIMEOUT_S)
        return self.stepper.step()


@pytest.fixture
def engine() -> Any:
    engine = Engine()
    yield engine
    engine.compiler.go.release(100)


A, B = Guide("regex", "a"), Guide("regex", "b")


def guided(guide: Guide) -> dict[str, Any]:
    return {"guide_type": guide.type, "guide": guide.text}


def test_stop_words_end_the_output_and_stay_in_it(engine: Engine) -> None:
    engine.add("id", stop_words=[[7, 8]])
    (handle,) = engine.pipeline.handles
    handle.emit(5, 7)
    assert engine.stepper.step() == {"id": Chunk([5, 7])}
    handle.emit(8, 9)
    assert engine.stepper.step() == {"id": Chunk([8], finished=True)}
    assert handle.status == genai.GenerationStatus.CANCEL
    assert not engine.stepper.has_requests()


def test_log_probs_are_as_many_as_the_tokens(engine: Engine) -> None:
    engine.add("id", stop_words=[[6]], log_probs=True)
    engine.add("other")
    asked, other = engine.pipeline.handles
    assert (asked.config.logprobs, other.config.logprobs) == (1, 0)
    asked.emit(5, 6, 7)
    other.emit(5, finished=True)
    assert engine.stepper.step() == {
        "id": Chunk([5, 6], finished=True, log_probs=[-0.5, -0.6]),
        "other": Chunk([5], finished=True),
    }


def test_a_guided_request_starts_when_its_guide_is_compiled(engine: Engine) -> None:
    engine.add("free")
    engine.add("guided", **guided(A))
    (free,) = engine.pipeline.handles
    free.emit(5)
    assert engine.stepper.step() == {"free": Chunk([5])}  # others go on
    assert engine.compiler.began == []
    engine.checker.known[A] = None
    free.emit(6)
    assert engine.stepper.step() == {"free": Chunk([6])}
    assert len(engine.pipeline.handles) == 1
    engine.step_until_compiled()
    assert engine.compiler.began == [A]
    assert engine.pipeline.handles[1].config.structured_output_config.grammar == "root ::= [a]\n"
    engine.add("again", **guided(A))  # now known
    engine.stepper.step()
    assert engine.compiler.began == [A]
    assert len(engine.pipeline.handles) == 3


def test_no_guide_is_compiled_while_another_ones_first_token_is_awaited(engine: Engine) -> None:
    engine.checker.known = {A: None, B: None}
    engine.add("a", **guided(A))
    engine.stepper.step()
    engine.step_until_compiled()
    engine.add("b", **guided(B))
    engine.stepper.step()
    assert engine.compiler.began == [A]  # "a" has no token yet
    engine.pipeline.handles[0].emit(5)
    engine.stepper.step()
    engine.add("a2", **guided(A))
    engine.stepper.step()  # B's compilation begins, so "a2" waits though A is known
    assert len(engine.pipeline.handles) == 1
    engine.step_until_compiled()
    assert engine.compiler.began == [A, B]
    assert len(engine.pipeline.handles) == 3


def test_a_refused_guide_ends_its_requests_alone(engine: Engine) -> None:
    engine.add("free")
    engine.add("bad", **guided(A))
    engine.checker.known[A] = "guided_decoding_guide: no"
    engine.pipeline.handles[0].emit(5)
    assert engine.stepper.step() == {
        "bad": Chunk([], finished=True, error="guided_decoding_guide: no"),
        "free": Chunk([5]),
    }


def test_a_guide_that_only_this_process_cannot_compile(engine: Engine) -> None:
    engine.checker.known[A] = None
    engine.compiler.error = MemoryError("no memory")
    engine.add("a", **guided(A))
    engine.stepper.step()
    message = "guided_decoding_guide: cannot be compiled: no memory"
    assert engine.step_until_compiled() == {"a": Chunk([], finished=True, error=message)}


def test_a_waiting_request_can_be_stopped(engine: Engine) -> None:
    engine.add("a", **guided(A))
    assert engine.stepper.has_requests()
    engine.stepper.stop("a")
    assert not engine.stepper.has_requests()
    engine.checker.known[A] = None
    assert engine.stepper.step() == {}
    assert engine.compiler.began == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": [[5]]}, "bad_words_list: OpenVINO GenAI cannot avoid words; leave it out"),
        ({"stop_words": [[5], [6, 50]]}, "stop_words_list: ids must be 0 to 49"),
        ({"input_ids": [50]}, "input_ids: ids must be 0 to 49"),
        (
            {"max_new_tokens": 99},
            "input_ids, request_output_len: 2 + 99 tokens are more than the context window of 100",
        ),
        ({"guide_type": "json", "end_id": None}, "guided_decoding_guide_type: needs end_id"),
        ({"guide_type": "json", "min_tokens": 1}, "guided_decoding_guide_type: the guide says how long the text is"),
    ],
)
def test_what_it_cannot_do_is_refused(engine: Engine, fields: dict[str, Any], message: str) -> None:
    request = {"request_id": "id", "input_ids": [1, 2], "max_new_tokens": 9, "end_id": 3, **fields}
    with pytest.raises(EngineRefusal) as got:
        engine.stepper.add(EngineRequest(**request))
    assert message in str(got.value)
    assert not engine.stepper.has_requests()


def test_new_guides_do_not_queue_without_end(engine: Engine) -> None:
    new = [Guide("regex", str(number)) for number in range(5)]
    for number, guide in enumerate(new[:4]):
        engine.add(str(number), **guided(guide))
    with pytest.raises(EngineRefusal, match="4 new guides are being tried, which is the limit; try again later"):
        engine.add("4", **guided(new[4]))
    engine.add("same", **guided(new[0]))
    engine.checker.known[A] = None
    engine.add("known", **guided(A))
    engine.add("free")


def test_when_the_guides_take_too_much_memory_the_pipeline_is_loaded_anew(engine: Engine) -> None:
    engine.checker.known = {A: None, B: None}
    engine.checker.size = MAX_ALL_GUIDES_BYTES // 2 + 1
    engine.add("running")
    for guide in (A, B):
        engine.add(str(guide), **guided(guide))
        engine.stepper.step()
        engine.step_until_compiled()
        if guide is A:
            engine.pipeline.handles[-1].emit(3, finished=True)
            engine.stepper.step()
    engine.add("late")  # waits, but what runs goes on
    assert engine.stepper.has_requests()
    old = engine.pipeline
    old.handles[0].emit(7)
    assert engine.stepper.step() == {"running": Chunk([7])}
    assert (engine.num_loads, len(old.handles)) == (1, 2)
    old.handles[0].emit(3, finished=True)
    engine.stepper.step()
    engine.stepper.step()
    assert engine.num_loads == 2
    engine.stepper.step()
    (late,) = engine.pipeline.handles
    late.emit(9)
    assert engine.stepper.step() == {"late": Chunk([9])}
    engine.step_until_compiled()  # B once more
    assert len(engine.pipeline.handles) == 2
