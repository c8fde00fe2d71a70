"""Where a request's time went: its stages in `rt`, in histograms, and as a trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import InProcessEngines, RecordingSink
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tokenizers import Tokenizer

from orchestrator.call import Call
from orchestrator.config import load_tiers
from orchestrator.engines.scripted import ScriptedStepper, Settings
from orchestrator.latencies import Histogram, Latencies, TokenGaps
from orchestrator.pipeline import Pipeline
from orchestrator.stages import Stage, Stages
from orchestrator.streaming.chunks import Choice
from orchestrator.tracing import Traces, create_traces
from orchestrator.triton.latency_metrics import LatencyMetrics

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Iterator[Traces]:
    traces = Traces(exporter)
    yield traces
    traces.close()


@pytest.fixture
def pipeline(artifact: Callable[[str], Path], tokenizer: Tokenizer, traces: Traces) -> Pipeline:
    settings = Settings(engine="scripted", max_batch_size=8, context_window=8192, vocab_size=49152)
    engines = InProcessEngines(lambda: ScriptedStepper(tokenizer, settings))
    root = artifact("scripted")
    return Pipeline(load_tiers(root / "tiers.toml"), root, engines, traces=traces)


def run(pipeline: Pipeline, *, traceparent: str = "", **script: object) -> RecordingSink:
    body = {"messages": [{"role": "user", "content": f"#script {json.dumps(script)}"}], "stream": True}
    sink = RecordingSink()
    asyncio.run(pipeline.run(Call(json.dumps(body).encode(), {"traceparent": traceparent}, sink)))
    return sink


def test_stages_add_up_to_the_whole(pipeline: Pipeline) -> None:
    rt = run(pipeline, text="One two three.").events[-1]["rt"]
    assert list(rt["stages_ms"]) == ["admit", "reserve", "route", "queue", "prefill", "decode"]
    assert sum(rt["stages_ms"].values()) == pytest.approx(rt["total_ms"], abs=0.01)
    before = [took for stage, took in rt["stages_ms"].items() if stage != "decode"]
    assert sum(before) == pytest.approx(rt["ttft_ms"], abs=1)


@given(st.lists(st.sampled_from(["lookup", "queue", "prefill"])))
def test_stages_have_no_gaps(entered: list[Stage]) -> None:
    stages = Stages(1.0)
    for stage in entered:
        stages.enter(stage)
    spans = stages.spans(1e9)
    assert (spans[0].stage, spans[0].started_s, spans[-1].ended_s) == ("admit", 1.0, 1e9)
    assert all(one.ended_s == other.started_s and one.stage != other.stage for one, other in pairwise(spans))


def test_a_trace_below_the_callers(pipeline: Pipeline, traces: Traces, exporter: InMemorySpanExporter) -> None:
    rt = run(pipeline, traceparent=PARENT, text="One two three.").events[-1]["rt"]
    traces.close()
    *stages, request = exporter.get_finished_spans()
    assert request.parent is not None and request.context is not None
    assert (f"{request.context.trace_id:x}", f"{request.parent.span_id:x}") == (
        PARENT.split("-")[1].lstrip("0"),
        PARENT.split("-")[2],
    )
    assert [span.name for span in stages] == list(rt["stages_ms"])
    assert all(span.parent is not None and span.parent.span_id == request.context.span_id for span in stages)

    def took_ns(span: object) -> int:
        return span.end_time - span.start_time  # type: ignore[attr-defined, no-any-return]

    assert sum(map(took_ns, stages)) == pytest.approx(took_ns(request), rel=0.02)
    attributes = dict(request.attributes or {})
    assert (attributes["gen_ai.usage.output_tokens"], attributes["rt.cache"], attributes["rt.outcome"]) == (
        4,
        "bypass",
        "ok",
    )
    assert "One two" not in str(attributes)


@pytest.mark.parametrize("traceparent", ["", "00-zz-1-01", "x" * 5000])
def test_a_trace_of_its_own_also_of_what_failed(
    pipeline: Pipeline, traces: Traces, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    sink = run(pipeline, traceparent=traceparent, text=7)
    assert sink.error is not None
    traces.close()
    request = exporter.get_finished_spans()[-1]
    assert request.parent is None
    assert (request.status.is_ok, request.status.description) == (False, sink.error.code)


@pytest.mark.parametrize("text", ["One two three.", 7])
def test_neither_key_nor_text_is_in_a_trace(
    pipeline: Pipeline, traces: Traces, exporter: InMemorySpanExporter, text: object
) -> None:
    """Of an answer, and of a request that failed."""
    key = "rt-0123456789abcdefghijklmnopqrstuvwxyz"
    script = {"role": "user", "content": f"#script {json.dumps({'text': text})}"}
    body = {"messages": [{"role": "system", "content": "a secret"}, script]}
    parameters = {"authorization": f"Bearer {key}", "traceparent": PARENT}
    asyncio.run(pipeline.run(Call(json.dumps(body).encode(), parameters, RecordingSink())))
    traces.close()
    told = " ".join(span.to_json() for span in exporter.get_finished_spans())
    assert "rt.outcome" in told
    assert not any(secret in told for secret in (key, key[3:], "a secret", "One two"))


def test_no_collector_no_traces() -> None:
    assert create_traces({}) is None and create_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


def test_latencies_of_an_answer(pipeline: Pipeline) -> None:
    for _ in range(2):
        run(pipeline, text="One two three.")
    run(pipeline, text=7)  # what fails is in none
    latencies, labels = pipeline.latencies, ("simple", "bypass", "interactive")
    for histogram in (latencies.ttft, latencies.total, latencies.queue):
        assert {labels: sum(counts) for labels, counts in histogram.counts.items()} == {labels: 2}
    assert sum(latencies.itl.counts["simple",]) == 2 * 3  # of 4 tokens each


def test_an_event_of_several_tokens_is_several_gaps() -> None:
    gaps, choice = TokenGaps(), Choice(0)
    for num_tokens in (1, 4, 4, 5):
        choice.num_tokens = num_tokens
        gaps.note(choice)
    assert [num for _, num in gaps.gaps] == [3, 1]


def test_a_histogram_as_prometheus_reads_it() -> None:
    latencies = Latencies()
    latencies.itl = Histogram((0.01, 0.1))
    metrics = LatencyMetrics(latencies)
    for seconds, times in ((0.005, 3), (0.01, 1), (0.05, 2), (7.0, 1)):
        latencies.itl.observe(seconds, ("simple",), times)
    metrics.publish()
    family = metrics._itl
    assert {key: metric.value for key, metric in family._buckets._family.metrics.items()} == {  # type: ignore[attr-defined]
        "simple0.01": 4,
        "simple0.1": 6,
        "simple+Inf": 7,
    }
    assert family._sum._family.metrics["simple"].value == pytest.approx(7.125)  # type: ignore[attr-defined]
