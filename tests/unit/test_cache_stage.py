"""The cache in the pipeline: what is served, what is kept, who shares, over the scripted engine in this process."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcessEngines, RecordingSink
from tokenizers import Tokenizer

from orchestrator.cache import stage
from orchestrator.cache.guards import read
from orchestrator.cache.key import Identity
from orchestrator.cache.lookup import Lookup
from orchestrator.cache.operations import operate
from orchestrator.cache.stage import MAX_REMEMBERED_ANSWERS, AnswerCache
from orchestrator.cache.store import Entry, MemoryStore, StoreError
from orchestrator.cache.stored import MAX_PIECES, StoredAnswer, join_pieces
from orchestrator.call import Call
from orchestrator.config import CachePolicy, load_tiers
from orchestrator.engines.scripted import DEFAULT_TEXT, ScriptedStepper, Settings
from orchestrator.errors import (
    CancelledError,
    EngineError,
    InvalidRequestError,
    NotCachedError,
    OverloadedError,
    StoreUnavailableError,
)
from orchestrator.limits.gate import Gate
from orchestrator.limits.keys import EVERYBODY, Key
from orchestrator.pipeline import Pipeline
from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.text import Piece
from orchestrator.streaming.tokenizer import ChatTokenizer

POLICY = CachePolicy(ttl_s=60, max_bytes=1 << 20, semantic=True, max_temperature=0.5)
QUESTION = "What is the capital of France?"
PARAPHRASE = "what's the capital of France"


class Counts:
    """`Counts` that can be looked at."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.store_errors = 0

    def count_answer(self, kind: str) -> None:
        self.answers[kind] += 1

    def count_rejection(self, guard: str) -> None:
        self.rejections[guard] += 1

    def count_store_error(self) -> None:
        self.store_errors += 1


class BagOfWords:
    """An `Embed`: texts of the same words lie near; counts how often it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.window = 100  # words
        self.delay_s = 0.0

    async def __call__(self, text: str) -> npt.NDArray[np.float32] | None:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        words = text.lower().replace("?", "").replace("'s", " is").split()
        if len(words) > self.window:
            return None
        vector = np.zeros(256, np.float32)
        for word in words:
            vector[zlib.crc32(word.encode()) % 256] += 1
        return vector / np.float32(math.sqrt(float(vector @ vector)) or 1.0)


class FakeGate(Gate):
    """Says whose call it is."""

    def __init__(self, key: Callable[[], Key]) -> None:
        super().__init__()
        self._key = key

    def identify(self, call: Call) -> Key:
        return self._key()


class Bench:
    """A pipeline with a cache, on a clock of its own; `ask` serves calls side by side on one loop."""

    def __init__(self, root: Path, engines: InProcessEngines, policy: CachePolicy = POLICY) -> None:
        self.now_s = 1000.0
        self.tenant = "default"
        self.engines = engines
        self.embed = BagOfWords()
        self.counts = Counts()
        self.store: Any = MemoryStore(policy.max_bytes, clock=lambda: self.now_s)
        self.cache = AnswerCache(policy, Lookup(self.store, lambda: self.now_s), self.embed, self.counts)
        self.pipeline = Pipeline(
            load_tiers(root / "tiers.toml"),
            root,
            engines,
            cache=self.cache,
            gate=FakeGate(lambda: EVERYBODY.model_copy(update={"tenant": self.tenant})),
        )

    def ask(self, text: str = QUESTION, control: str = "", **fields: Any) -> RecordingSink:
        """One call, and all that comes after it."""

        async def run() -> RecordingSink:
            call, sink = self.call(text, control, **fields)
            await self.pipeline.run(call)
            await self.pipeline.finish()
            return sink

        sink = asyncio.run(run())
        assert sink.num_ends == 1
        return sink

    def call(self, text: str = QUESTION, control: str = "", **fields: Any) -> tuple[Call, RecordingSink]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        if "prompt" in fields:
            del body["messages"]
        sink = RecordingSink()
        return Call(json.dumps(body).encode(), {"cache-control": control} if control else {}, sink), sink

    @property
    def num_generated(self) -> int:
        return len(self.engines.requests)


@pytest.fixture(scope="module")
def root(artifact: Callable[[str], Path]) -> Path:
    return artifact("scripted")


@pytest.fixture(scope="module", autouse=True)
def tokenizers_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTokenizer, "load", functools.cache(ChatTokenizer.load))
        yield


@pytest.fixture(scope="module")
def make_bench(root: Path, tokenizer: Tokenizer) -> Callable[..., Bench]:
    engine_settings = Settings(engine="scripted", max_batch_size=8, context_window=8192, vocab_size=49152)

    def make(policy: CachePolicy = POLICY) -> Bench:
        return Bench(root, InProcessEngines(lambda: ScriptedStepper(tokenizer, engine_settings)), policy)

    return make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def script(**fields: Any) -> str:
    return f"#script {json.dumps(fields)}"


def kind(sink: RecordingSink) -> str:
    return str(sink.events[-1]["rt"]["cache"])


# --- hits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored_by_stream", [True, False])
def test_a_stream_hits(bench: Bench, stored_by_stream: bool) -> None:
    """Case C19."""
    first = bench.ask(stream=stored_by_stream)
    assert kind(first) == "miss"
    bench.now_s += 5
    hit = bench.ask(stream=True, stream_options={"include_usage": True})
    assert (hit.text, hit.finish_reasons, bench.num_generated) == (DEFAULT_TEXT, ["stop"], 1)
    deltas = [each["choices"][0]["delta"] for each in hit.events if each["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert len([delta for delta in deltas if delta.get("content")]) > 1
    assert hit.events[-1]["usage"] == {**hit.events[-1]["usage"], "completion_tokens": 6}
    rt = hit.events[-1]["rt"]
    assert (rt["cache"], rt["cache_similarity"], rt["cache_age_s"]) == ("exact", 1.0, 5.0)
    assert (rt["cost_usd"], rt["tps"], rt["tier"], rt["model"]) == (0.0, None, "simple", "llm_small")
    assert rt["tokens"] == first.events[-1]["rt"]["tokens"]
    ids = {event["id"] for event in hit.events}
    assert len(ids) == 1 and ids.isdisjoint({event["id"] for event in first.events})
    assert bench.counts.answers == {"miss": 1, "exact": 1}


@pytest.mark.parametrize("stored_by_stream", [True, False])
def test_a_whole_answer_hits(bench: Bench, stored_by_stream: bool) -> None:
    first = bench.ask(stream=stored_by_stream)
    hit = bench.ask()
    (event,) = hit.events
    assert event["choices"][0]["message"]["content"] == first.text == DEFAULT_TEXT
    assert event["usage"]["prompt_tokens"] == first.events[-1]["rt"]["input_tokens"]
    assert kind(hit) == "exact"


def test_log_probs_are_replayed(bench: Bench) -> None:
    text = script(text="A 💡 is lit. And more words follow here.", log_probs=[-0.5, -0.125])
    first = bench.ask(text, logprobs=True)
    streamed = bench.ask(text, logprobs=True, stream=True)
    assert (kind(streamed), bench.num_generated) == ("exact", 1)
    entries = first.events[0]["choices"][0]["logprobs"]["content"]
    deltas = [event["choices"][0]["logprobs"] for event in streamed.events]
    assert [entry for delta in deltas if delta for entry in delta["content"]] == entries
    assert bench.ask(text, logprobs=True).events[0]["choices"] == first.events[0]["choices"]
    assert kind(bench.ask(text)) == "miss"


def test_another_question_that_means_the_same_hits(bench: Bench) -> None:
    bench.ask()
    hit = bench.ask(PARAPHRASE)
    assert (kind(hit), hit.text, bench.num_generated) == ("semantic", DEFAULT_TEXT, 1)
    assert 0.4 < hit.events[-1]["rt"]["cache_similarity"] <= 1.0
    assert bench.embed.num_asked == 2  # once a request, the miss's vector is kept


def test_a_guard_is_counted(bench: Bench) -> None:
    """Case C01 by way of the pipeline."""
    bench.ask("How do I turn on dark mode?")
    assert kind(bench.ask("How do I turn off dark mode?")) == "miss"
    assert sum(bench.counts.rejections.values()) == 1
    assert bench.num_generated == 2


def test_the_exact_tier_embeds_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(POLICY.model_copy(update={"semantic": False}))
    bench.ask()
    assert kind(bench.ask()) == "exact"
    assert kind(bench.ask(PARAPHRASE)) == "miss"
    assert bench.embed.num_asked == 0


def test_a_question_longer_than_the_window_is_matched_exactly_alone(bench: Bench) -> None:
    """Case C21."""
    bench.embed.window = 5
    bench.ask()
    assert kind(bench.ask(PARAPHRASE)) == "miss"
    assert kind(bench.ask()) == "exact"


def test_an_embedder_that_is_slow_delays_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "EMBED_TIMEOUT_S", 0.01)
    bench.embed.delay_s = 0.1
    assert kind(bench.ask()) == "miss"
    assert kind(bench.ask(PARAPHRASE)) == "miss"
    bench.embed.delay_s = 0
    assert kind(bench.ask("What's the capital of France?")) == "semantic"  # the vector was made after the answer


def test_a_question_is_read_while_its_vector_is_made(bench: Bench) -> None:
    question = "How deep is the lake behind the third hill?"
    bench.embed.delay_s = 0.05
    asked = bench.embed.__call__
    known: list[bool] = []

    async def embed(text: str) -> Any:
        vector = await asked(text)
        before = read.cache_info().misses
        read(text, "en")
        known.append(read.cache_info().misses == before)
        return vector

    bench.cache._embed = embed
    assert kind(bench.ask(question)) == "miss"
    assert known == [True]


def test_what_no_guard_reads_is_not_embedded(bench: Bench) -> None:
    for text in ("Какая столица Франции?", "What is it? " * 100):
        assert kind(bench.ask(text)) == "miss"
        assert kind(bench.ask(text)) == "exact"
    assert bench.embed.num_asked == 0


@pytest.mark.parametrize("fields", [{"seed": 1}, {"logprobs": True}])
def test_what_is_only_hit_exactly(bench: Bench, fields: dict[str, Any]) -> None:
    bench.ask(**fields)
    assert kind(bench.ask(PARAPHRASE, **fields)) == "miss"
    assert kind(bench.ask(**fields)) == "exact"


def test_it_ends_after_its_time(bench: Bench) -> None:
    bench.ask()
    for _ in range(3):
        bench.now_s += 19
        assert kind(bench.ask()) == "exact"  # a hit does not keep it longer
    bench.now_s += 19
    assert kind(bench.ask()) == "miss"


# --- what is not kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (QUESTION, {"max_tokens": 2}, "miss"),
        (script(text="a b c", fail_after=1), {}, None),
        (script(text=""), {}, "miss"),
        (QUESTION, {"temperature": 0.51}, "bypass"),
        (QUESTION, {"n": 2}, "bypass"),
        (QUESTION, {"ignore_eos": True}, "bypass"),
        (QUESTION, {"prompt": "x"}, "bypass"),
        (
            script(text='<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
            {"model": "medium", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "miss",
        ),
    ],
    ids=["length", "failed", "empty", "temperature", "n", "ignore_eos", "completion", "tool call"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_never_kept(
    bench: Bench, text: str, fields: dict[str, Any], expected: str | None, stream: bool
) -> None:
    """Cases C22 and S18."""
    for _ in range(2):
        sink = bench.ask(text, stream=stream, **fields)
        if expected is None:
            assert isinstance(sink.error, EngineError)
        else:
            assert kind(sink) == expected
    assert len(bench.store) == 0
    assert bench.num_generated >= 2


@pytest.mark.parametrize("fields", [{"temperature": 0.5}, {"temperature": 0}, {"tools": []}, {"top_p": 0.5}])
def test_what_is_kept(bench: Bench, fields: dict[str, Any]) -> None:
    bench.ask(**fields)
    assert kind(bench.ask(**fields)) == "exact"


def test_an_answer_whose_caller_left_is_not_kept(bench: Bench) -> None:
    """Cases C22 and K06."""
    text = script(text="x " * 200, itl_ms=5)

    async def leave() -> RecordingSink:
        call, sink = bench.call(text, stream=True)
        running = asyncio.create_task(bench.pipeline.run(call))
        while len(sink.events) < 3:
            await asyncio.sleep(0.005)
        await call.cancel()
        await running
        await bench.pipeline.finish()
        return sink

    sink = asyncio.run(leave())
    assert isinstance(sink.error, CancelledError)
    assert bench.engines.stopped and len(bench.store) == 0


# --- Cache-Control -------------------------------------------------------------------------------------------


def test_no_store(bench: Bench) -> None:
    assert kind(bench.ask(control="no-store")) == "bypass"
    assert kind(bench.ask()) == "miss"
    assert kind(bench.ask(control="no-store")) == "bypass"
    assert bench.embed.num_asked == 1


def test_no_cache_gets_a_fresh_answer_and_keeps_it(bench: Bench) -> None:
    bench.ask()
    bench.now_s += 10
    assert kind(bench.ask(control="no-cache")) == "miss"
    bench.now_s += 1
    assert bench.ask().events[-1]["rt"]["cache_age_s"] == 1.0
    assert kind(bench.ask(PARAPHRASE)) == "semantic"


def test_max_age(bench: Bench) -> None:
    bench.ask()
    bench.now_s += 10
    assert kind(bench.ask(control="max-age=10")) == "exact"
    assert kind(bench.ask(PARAPHRASE, "max-age=10")) == "semantic"
    assert kind(bench.ask(PARAPHRASE, "max-age=9")) == "miss"
    assert kind(bench.ask(control="max-age=9")) == "miss"


def test_only_if_cached(bench: Bench) -> None:
    for fields in ({}, {"temperature": 1.0}):
        error = bench.ask(control="only-if-cached", **fields).error
        assert isinstance(error, NotCachedError)
    assert bench.num_generated == 0
    bench.ask()
    assert kind(bench.ask(control="only-if-cached")) == "exact"
    assert kind(bench.ask(PARAPHRASE, "only-if-cached")) == "semantic"
    assert isinstance(bench.ask(control="only-if-cached, no-cache").error, NotCachedError)
    assert isinstance(bench.ask(control="only-if-cached, no-store").error, NotCachedError)


def test_a_malformed_header_is_refused(bench: Bench) -> None:
    error = bench.ask(control="max-age=soon").error
    assert isinstance(error, InvalidRequestError)
    assert error.param == "cache-control"


# --- tenants -------------------------------------------------------------------------------------------------


def test_who_a_caller_says_he_is_changes_nothing() -> None:
    call = Call(b"{}", {"authorization": "Bearer x", "x-tenant": "a", "tenant": "a"}, RecordingSink())
    assert Gate().identify(call) == EVERYBODY


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 2)), min_size=1, max_size=8))
def test_tenants_never_share(make_bench: Callable[..., Bench], asked: list[tuple[str, int]]) -> None:
    """Cases C13 and C15."""
    questions = ["What is my account balance?", "what's my account balance", QUESTION]
    bench = make_bench()
    seen: set[tuple[str, str]] = set()
    for tenant, number in asked:
        bench.tenant = tenant
        topic = "balance" if number < 2 else "capital"
        sink = bench.ask(questions[number])
        assert (kind(sink) in ("exact", "semantic")) == ((tenant, topic) in seen)
        seen.add((tenant, topic))


def test_keys_of_other_rights_share_no_answer_of_auto(bench: Bench) -> None:
    keys = [EVERYBODY, EVERYBODY.model_copy(update={"tiers": ("expert",)}), EVERYBODY]
    bench.pipeline._gate = FakeGate(iter(keys).__next__)
    assert [kind(bench.ask()) for _ in keys] == ["miss", "miss", "exact"]


# --- single flight -------------------------------------------------------------------------------------------

SLOW = script(text="one two three four five six seven eight", first_token_ms=30, itl_ms=10)


def test_other_weights_share_no_answer(make_bench: Callable[..., Bench], root: Path, tmp_path: Path) -> None:
    """One store, two artifacts that differ in one file's sha256, as servers of two builds on one Redis do."""

    def build(name: str, changed: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        manifest = json.loads((root / "manifest.json").read_text())
        manifest["files"][f"model_repository/{changed}"] = {"sha256": name, "bytes": 1}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        for part in ("tiers.toml", "model_repository"):
            (folder / part).symlink_to(root / part)
        return folder

    first = make_bench()
    assert kind(first.ask(model="simple")) == "miss" and kind(first.ask(model="simple")) == "exact"
    for name, changed, expected in (
        ("other-embedder", "embedding_encoder/1/model.onnx", "exact"),
        ("other-weights", "llm_small/1/weights.bin", "miss"),
    ):
        second = Bench(build(name, changed), first.engines)
        second.cache._lookup = first.cache._lookup
        assert kind(second.ask(model="simple")) == expected


def fly(bench: Bench, calls: list[tuple[Call, RecordingSink]], leave: dict[int, float] | None = None) -> None:
    """All calls together; caller i leaves after `leave[i]` seconds."""

    async def run() -> None:
        running = [asyncio.create_task(bench.pipeline.run(call)) for call, _ in calls]
        for index, seconds in (leave or {}).items():
            await asyncio.sleep(seconds)
            await calls[index][0].cancel()
        await asyncio.gather(*running)
        await bench.pipeline.finish()

    asyncio.run(run())
    assert all(sink.num_ends == 1 for _, sink in calls)


def test_identical_requests_generate_once(bench: Bench) -> None:
    calls = [bench.call(SLOW, stream=index % 2 == 0, stream_options=None) for index in range(20)]
    fly(bench, calls)
    assert bench.num_generated == 1
    texts = {sink.text for _, sink in calls}
    assert texts == {"one two three four five six seven eight"}
    assert [kind(sink) for _, sink in calls] == ["miss"] + ["exact"] * 19
    assert ["shared" in sink.events[-1]["rt"] for _, sink in calls] == [False] + [True] * 19
    assert len({sink.events[0]["id"] for _, sink in calls}) == 20
    assert all(len(sink.events) > 5 for _, sink in calls[::2])  # live, not in one piece
    assert bench.embed.num_asked <= 1
    assert kind(bench.ask(SLOW)) == "exact"
    assert bench.ask(SLOW).events[-1]["rt"]["cost_usd"] == 0


def test_a_late_one_gets_what_there_is_and_then_lives_on(bench: Bench) -> None:
    early, late = bench.call(SLOW, stream=True), bench.call(SLOW, stream=True)

    async def run() -> tuple[str, str, int]:
        running = [asyncio.create_task(bench.pipeline.run(early[0]))]
        while len(early[1].events) < 4:
            await asyncio.sleep(0.002)
        running.append(asyncio.create_task(bench.pipeline.run(late[0])))
        while not late[1].events:
            await asyncio.sleep(0)
        caught_up = early[1].text, late[1].text, len(late[1].events)
        await asyncio.gather(*running)
        await bench.pipeline.finish()
        return caught_up

    there_was, it_got, in_events = asyncio.run(run())
    assert it_got == there_was and len(there_was.split()) >= 4 and in_events == 1
    assert len(late[1].events) > 4  # live from then on
    assert early[1].text == late[1].text
    assert bench.num_generated == 1
    assert late[1].events[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("leaving", [0, 1])
def test_when_one_leaves_the_others_go_on(bench: Bench, leaving: int) -> None:
    calls = [bench.call(SLOW, stream=True) for _ in range(3)]
    fly(bench, calls, {leaving: 0.05})
    assert isinstance(calls[leaving][1].error, CancelledError)
    others = [sink for index, (_, sink) in enumerate(calls) if index != leaving]
    assert [sink.finish_reasons for sink in others] == [["stop"], ["stop"]]
    assert (bench.num_generated, bench.engines.stopped, len(bench.store)) == (1, [], 1)


def test_when_the_last_leaves_the_engine_stops(bench: Bench) -> None:
    calls = [bench.call(SLOW, stream=True) for _ in range(3)]
    fly(bench, calls, {1: 0.04, 0: 0.005, 2: 0.005})
    assert all(isinstance(sink.error, CancelledError) for _, sink in calls)
    assert bench.engines.stopped[:1] == [bench.engines.requests[0].request_id]
    assert len(bench.store) == 0


def test_the_deadline_of_the_first_is_no_fault_of_those_who_came_with_him(bench: Bench) -> None:
    bench.ask(script(text="one two three four five six", itl_ms=30))  # so that it is known how long one takes
    hasty, patient, other = (bench.call(SLOW, max_tokens=20, stream=stream) for stream in (False, True, False))
    hasty[0].parameters = {"x-deadline-ms": "60"}
    fly(bench, [hasty, patient, other])
    assert isinstance(hasty[1].error, OverloadedError) and "the deadline cannot be met" in str(hasty[1].error)
    assert patient[1].text == other[1].text == "one two three four five six seven eight"
    assert bench.num_generated == 2


def test_what_a_keys_quotas_left_is_not_for_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reserve(ride: Any, job: Any) -> None:
        await Pipeline._reserve(bench.pipeline, ride, job)
        job.is_limited = True

    with monkeypatch.context() as patch:
        patch.setattr(bench.pipeline, "_reserve", reserve)
        fly(bench, [bench.call(SLOW) for _ in range(2)])
    assert (bench.num_generated, len(bench.store)) == (2, 0)
    assert kind(bench.ask(SLOW)) == "miss"


def test_who_comes_when_the_last_left_starts_anew(bench: Bench) -> None:
    first, second = bench.call(SLOW, stream=True), bench.call(SLOW, stream=True)

    async def run() -> None:
        running = asyncio.create_task(bench.pipeline.run(first[0]))
        while not first[1].events:
            await asyncio.sleep(0.002)
        leaving = asyncio.create_task(first[0].cancel())
        await asyncio.sleep(0)
        await asyncio.gather(bench.pipeline.run(second[0]), running, leaving)
        await bench.pipeline.finish()

    asyncio.run(run())
    assert isinstance(first[1].error, CancelledError)
    assert (second[1].finish_reasons, bench.num_generated) == (["stop"], 2)


def test_all_hear_of_a_failure_and_the_next_starts_anew(bench: Bench) -> None:
    failing = script(text="a b c d", itl_ms=5, fail_after=2)
    calls = [bench.call(failing, stream=index > 0) for index in range(3)]
    fly(bench, calls)
    assert all(isinstance(sink.error, EngineError) for _, sink in calls)
    assert bench.num_generated == 1
    bench.ask(failing)
    assert bench.num_generated == 2


def test_one_sink_that_fails_is_not_the_others_concern(bench: Bench) -> None:
    calls = [bench.call(SLOW, stream=True) for _ in range(2)]
    broken = calls[0][1]

    def refuse(event: str, *, final: bool) -> None:
        raise RuntimeError("no way out")

    broken.send = refuse  # type: ignore[method-assign]
    fly(bench, calls)
    assert broken.error is not None
    assert calls[1][1].finish_reasons == ["stop"]


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"control": "no-store"}, {"control": "no-cache"}])
def test_who_wants_his_own_answer_shares_none(bench: Bench, fields: dict[str, Any]) -> None:
    fly(bench, [bench.call(SLOW, **fields) for _ in range(2)])
    assert bench.num_generated == 2


def test_tenants_share_no_flight(bench: Bench) -> None:
    tenants = iter(["a", "b"])
    bench.pipeline._gate = FakeGate(lambda: EVERYBODY.model_copy(update={"tenant": next(tenants)}))
    fly(bench, [bench.call(SLOW) for _ in range(2)])
    assert bench.num_generated == 2


def test_a_near_answer_is_looked_up_once_for_all(bench: Bench) -> None:
    bench.ask()
    bench.embed.delay_s = 0.02
    calls = [bench.call(PARAPHRASE, stream=True) for _ in range(5)]
    fly(bench, calls)
    assert [kind(sink) for _, sink in calls] == ["semantic"] * 5
    assert (bench.embed.num_asked, bench.num_generated) == (2, 1)


# --- a store that fails --------------------------------------------------------------------------------------


class BrokenStore(MemoryStore):
    async def get(self, identity: Identity) -> Entry | None:
        raise OSError("gone")

    async def nearest(self, identity: Identity, vector: Any, num: int) -> Any:
        raise OSError("gone")

    async def put(self, entry: Entry) -> None:
        raise OSError("gone")


def test_a_store_that_fails_is_a_miss(bench: Bench) -> None:
    broken = BrokenStore(1 << 20)
    bench.cache._lookup = Lookup(broken, lambda: bench.now_s)
    for _ in range(2):
        sink = bench.ask()
        assert (kind(sink), sink.text) == ("miss", DEFAULT_TEXT)
    assert bench.counts.store_errors == 6


def test_an_entry_that_cannot_be_read_is_a_miss(bench: Bench) -> None:
    bench.ask()
    (entry,) = bench.store._entries.values()
    for answer in (b"", b"[]", b"{}"):
        asyncio.run(bench.store.put(Entry(entry.identity, answer, "m", entry.vector, bench.now_s, bench.now_s + 9)))
        assert kind(bench.ask(control="max-age=100")) == "miss"


# --- operations ----------------------------------------------------------------------------------------------


def order(bench: Bench, operation: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(asyncio.run(operate(bench.cache, operation, json.dumps(fields).encode())))
    return answer


@pytest.mark.parametrize("prefix", ["chatcmpl-", ""])
def test_a_wrong_hit_is_evicted_and_blocked(bench: Bench, prefix: str) -> None:
    """Case C23."""
    bench.ask()
    answer_id = bench.ask(PARAPHRASE).events[-1]["id"]
    assert order(bench, "wrong", id=prefix + answer_id.removeprefix("chatcmpl-"))["evicted"] is True
    assert len(bench.store) == 0
    bench.ask()
    assert kind(bench.ask(PARAPHRASE)) == "miss"
    assert bench.counts.rejections == {"blocked": 1}


def test_an_answer_that_was_no_hit_cannot_be_wrong(bench: Bench) -> None:
    answer_id = bench.ask().events[-1]["id"]
    for unknown in (answer_id, "x"):
        with pytest.raises(InvalidRequestError, match="not the id of a recent answer out of the cache"):
            order(bench, "wrong", id=unknown)


def test_an_answer_that_was_shared_may_be_wrong(bench: Bench) -> None:
    calls = [bench.call(SLOW) for _ in range(2)]
    fly(bench, calls)
    assert order(bench, "wrong", id=calls[1][1].events[-1]["id"])["evicted"] is True
    assert len(bench.store) == 0


def test_what_the_store_could_not_evict_can_be_named_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise StoreError("gone")

    bench.ask()
    answer_id = bench.ask().events[-1]["id"]
    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "mark_wrong", fail)
        with pytest.raises(StoreUnavailableError, match="try again later"):
            order(bench, "wrong", id=answer_id)
    assert order(bench, "wrong", id=answer_id)["evicted"] is True
    assert len(bench.store) == 0


@pytest.mark.parametrize(("text", "num_stored"), [("one two", 0), ("something else", 1)])
def test_what_is_invalidated_while_it_is_made_is_not_stored(bench: Bench, text: str, num_stored: int) -> None:
    call, sink = bench.call(SLOW, stream=True)

    async def run() -> None:
        running = asyncio.create_task(bench.pipeline.run(call))
        while not sink.events:
            await asyncio.sleep(0.002)
        await operate(bench.cache, "invalidate", json.dumps({"text": text, "dry_run": False}).encode())
        await running
        await bench.pipeline.finish()

    asyncio.run(run())
    assert (sink.finish_reasons, len(bench.store)) == (["stop"], num_stored)


def test_text_is_found_however_it_is_composed(bench: Bench) -> None:
    bench.ask("Où est le café ?")
    assert order(bench, "invalidate", text="CAFE\u0301")["num_entries"] == 1


def test_hits_are_remembered_within_bounds(bench: Bench) -> None:
    bench.ask()
    ids = [bench.ask().events[-1]["id"] for _ in range(2)]
    bench.cache._answers.update({str(number): next(iter(bench.cache._answers.values())) for number in range(999)})
    bench.ask()
    assert len(bench.cache._answers) == MAX_REMEMBERED_ANSWERS
    assert ids[0].removeprefix("chatcmpl-") not in bench.cache._answers


def test_invalidation_is_a_dry_run_unless_it_is_not(bench: Bench) -> None:
    bench.ask()
    bench.ask("How tall is the Eiffel Tower?")
    found = order(bench, "invalidate", text="CAPITAL")
    assert (found["num_entries"], found["dry_run"], len(bench.store)) == (1, True, 2)
    assert order(bench, "invalidate", tenant="other", dry_run=False)["num_entries"] == 0
    assert order(bench, "invalidate", text="capital", dry_run=False)["num_bytes"] == found["num_bytes"]
    assert [kind(bench.ask()), kind(bench.ask("How tall is the Eiffel Tower?"))] == ["miss", "exact"]
    assert order(bench, "invalidate", everything=True, dry_run=False)["num_entries"] == 2


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        ("wrong", {}, "id: required"),
        ("wrong", {"id": 5}, "id: "),
        ("invalidate", {}, "give tenant, model, older_than_s or text"),
        ("invalidate", {"everything": True, "model": "m"}, "give tenant"),
        ("invalidate", {"older_than_s": -1}, "older_than_s"),
        ("invalidate", {"text": ""}, "text"),
        ("invalidate", {"tenants": "a"}, "tenants: not supported"),
        ("forget", {}, "operation: 'forget' does not exist; one of wrong, invalidate"),
    ],
)
def test_orders_that_are_refused(bench: Bench, operation: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        order(bench, operation, **fields)


def test_there_is_nothing_to_order_without_a_cache() -> None:
    with pytest.raises(InvalidRequestError, match="the cache is off here"):
        asyncio.run(operate(None, "invalidate", b"{}"))


# --- the stored form -----------------------------------------------------------------------------------------

LOG_PROBS = st.lists(st.builds(TokenLogProb, st.text(max_size=3), st.floats(-20, 0)), max_size=3)
PIECES = st.lists(st.builds(lambda text, probs: Piece(text, log_probs=probs), st.text(max_size=9), LOG_PROBS))


@given(PIECES)
def test_what_is_stored_comes_back(pieces: list[Piece]) -> None:
    joined = join_pieces(pieces)
    assert len(joined) <= MAX_PIECES
    assert "".join(piece.text for piece in joined) == "".join(piece.text for piece in pieces)
    assert [x for piece in joined for x in piece.log_probs or []] == [
        x for piece in pieces for x in piece.log_probs or []
    ]
    stored = StoredAnswer("simple", "llm_small", joined, 5, 7, is_estimated=True)
    assert StoredAnswer.from_json(stored.to_json()) == stored


@given(st.binary(max_size=40) | st.recursive(st.none() | st.text(), st.lists).map(lambda x: json.dumps(x).encode()))
def test_anything_else_is_no_stored_answer(text: bytes) -> None:
    with pytest.raises(ValueError):
        StoredAnswer.from_json(text)
