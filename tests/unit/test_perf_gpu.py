"""perf/gpu without a GPU: its rows, its arithmetic, and what it takes for an answer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from build.pairs import check_pairs
from orchestrator.engines.vllm import Settings, engine_arguments
from perf.errors import PerfError
from perf.gpu import __main__ as command
from perf.gpu import several, text
from perf.gpu.answers import describe
from perf.gpu.load import make_bodies
from perf.gpu.rows import LLAMA, MAX_STREAMS, SMOLLM2, enlarge, make_row
from perf.gpu.sides import to_flags
from perf.gpu.speed import Prompts, ratios
from perf.sse import Answer


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_measured_rows_are_valid(precision: str) -> None:
    row = make_row("gpu-x", LLAMA, precision=precision, load_format="dummy", max_seq_len=9216)
    assert list(row.engines) == ["llm_small"]
    assert (row.limits.max_running_requests, row.models["llm_small"].max_batch_size) == (MAX_STREAMS, MAX_STREAMS)
    assert row.cache is None and not row.classifiers and not row.readers
    parameters = row.vllm_engines["llm_small"][1]
    assert (parameters.precision, parameters.load_format, parameters.kv_cache_precision) == (precision, "dummy", "auto")
    small = make_row("gpu-text", SMOLLM2, max_seq_len=8192)
    from build.rows import load_models, load_target

    check_pairs(small, load_models(load_target("cpu")))


def test_every_token_of_the_random_model_has_a_text_of_its_own() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    larger = Tokenizer.from_str(json.dumps(enlarge(json.loads(tokenizer.to_str()), 6)))
    assert [larger.decode([each]) for each in range(6)] == ["a", "b", " w2", " w3", " w4", " w5"]
    assert larger.get_vocab_size() == 6


def test_times_become_numbers() -> None:
    answers = [Answer(0.0, [0.010, 0.020, 0.040], 5, {}), Answer(0.001, [0.021], 1, {})]
    found = describe(answers, 0.0)
    assert (found["streams"], found["tokens"], found["events"], found["seconds"]) == (2, 6, 4, 0.04)
    assert (found["tokens_per_s"], found["tokens_per_event"]) == (150.0, 1.5)
    assert (found["ttft_ms"]["p50"], found["gap_ms"]["max"], found["tpot_ms"]["max"]) == (15.0, 20.0, 7.5)
    assert describe([Answer(0.0, [0.5], 1, {})], 0.0)["gap_ms"] is None


def test_the_same_engine_on_vllms_command_line() -> None:
    row = make_row("gpu-x", LLAMA, precision="fp8", load_format="dummy", speculation="ngram", max_seq_len=9216)
    _, parameters = row.vllm_engines["llm_small"]
    values = parameters.model_dump() | {"max_batch_size": 8, "context_window": 9216, "vocab_size": 128256}
    del values["exclude_input_in_output"]
    lists = {key: json.dumps(values[key]) for key in ("gpu_device_ids", "cuda_graph_sizes")}
    flags = to_flags(engine_arguments(Settings.model_validate(values | lists), Path("/m")))
    for words in (
        ["--model", "/m/checkpoint"],
        ["--quantization", "fp8"],
        ["--max-num-seqs", "8"],
        ["--enable-prefix-caching", "--enable-chunked-prefill"],
        ["--no-enable-log-requests", "--disable-log-stats"],
        ["--cudagraph-capture-sizes", "1", "2"],
        ["--structured-outputs-config", '{"backend": "xgrammar"}'],
    ):
        at = flags.index(words[0])
        assert flags[at : at + len(words)] == words


def test_prompts_are_the_same_for_every_side_and_none_twice() -> None:
    assert Prompts(1).take(3, 4) == Prompts(1).take(3, 4)
    prompts = Prompts(1)
    assert prompts.take(3, 16) != prompts.take(3, 16)


def test_bodies() -> None:
    one, two = map(json.loads, make_bodies({"prompts": [[1], [2]], "max_tokens": 3, "seeds": [8, 9]}, "simple"))
    assert (one["prompt"], one["seed"], two["seed"], one["ignore_eos"], one["stream"]) == ([1], 8, 9, True, True)
    (free,) = map(json.loads, make_bodies({"prompts": [[1]], "max_tokens": 3, "ignore_eos": False}, "simple"))
    assert "ignore_eos" not in free and "seed" not in free


def side(rate: float, ttft_ms: float) -> dict[str, Any]:
    return {"loads": {"64": {"tokens_per_s": rate}}, "ttft_ms": {"512": {"p50": ttft_ms}}}


def test_ratios() -> None:
    found = ratios(
        {"bare": side(100, 16.0), "stack": side(95, 20.0), "engine_model": {"ttft_ms": {"512": {"p50": 18.0}}}}
    )
    assert found == {
        "tokens_per_s_over_bare": {"64": 0.95},
        "added_ttft_ms_over_bare": {"512": 4.0},
        "added_ttft_ms_over_engine_model": {"512": 2.0},
    }
    assert ratios({"bare": side(100, 16.0)}) == {}


def test_streams_that_were_mixed_are_found() -> None:
    expected = ["alpha beta", "gamma delta", "alpha gamma"]
    streams = {"texts": ["alpha beta", "gamma dolta", "alpha gamma"], "tokens_per_s": 1.0}
    found = text.compare_streams(streams, expected)
    assert (found["holds"], found["equal"], found["mixed"]) == (True, 2, [])
    found = text.compare_streams({**streams, "texts": ["gamma delta", "alpha beta", "alpha gamma"]}, expected)
    assert (found["holds"], found["mixed"]) == (False, [0, 1])


class Lines:
    """A response, as far as it is read."""

    def __init__(self, *events: str) -> None:
        self._lines = [f"data: {event}\n".encode() for event in events]

    def __iter__(self) -> Any:
        return iter(self._lines)


def test_a_stream_is_joined() -> None:
    deltas = [{"content": "a"}, {"content": "b"}, {}]
    chunks = [{"choices": [{"delta": delta, "finish_reason": "stop" if not delta else None}]} for delta in deltas]
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    lines = Lines(*(json.dumps(each) for each in (*chunks, usage)), "[DONE]")
    found = text.join(text.events(lines))  # type: ignore[arg-type]
    assert (found["text"], found["finish"], found["usage"], found["num_events"]) == ("ab", "stop", usage["usage"], 2)


@pytest.mark.parametrize(("lines", "message"), [((), "without"), (('{"error": {"message": "m"}}',), "an error inside")])
def test_a_stream_that_breaks_is_an_error(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(PerfError, match=message):
        text.join(text.events(Lines(*lines)))  # type: ignore[arg-type]


def test_parts_add_up_in_one_file(tmp_path: Path) -> None:
    command.write(tmp_path / "h100.json", "text", {"a": 1})
    command.write(tmp_path / "h100.json", "chunked", {"b": 2})
    found = json.loads((tmp_path / "h100.json").read_bytes())
    assert (found["text"], found["chunked"], len(found["script_sha256"])) == ({"a": 1}, {"b": 2}, 64)


class Answers:
    """A client that is answered so."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = itertools.cycle(answers)

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return next(self._answers)


def completion(text: str, cache: str, finish: str = "stop", **rt: Any) -> dict[str, Any]:
    choice = {"message": {"content": text}, "finish_reason": finish}
    return {"status": 200, "body": {"choices": [choice], "rt": {"cache": cache, **rt}}}


def test_what_two_servers_share() -> None:
    first = Answers(completion("a", "miss"))
    assert several.share_hits(first, Answers(completion("a", "exact")))["holds"]  # type: ignore[arg-type]
    for wrong in (completion("a", "miss"), completion("b", "exact")):
        assert not several.share_hits(first, Answers(wrong))["holds"]  # type: ignore[arg-type]
    cut = Answers(completion("a", "miss", "length"))
    assert not several.share_hits(cut, cut)["holds"]  # type: ignore[arg-type]

    shared = [completion("a", "miss", shared=True)] * (several.NUM_TOGETHER // 2 - 1)
    flight = Answers(completion("a", "miss"), *shared)
    assert several.fly(flight, Answers(completion("a", "exact")))["holds"]  # type: ignore[arg-type]
    assert not several.fly(flight, Answers(completion("b", "exact")))["holds"]  # type: ignore[arg-type]

    half = Answers({"status": 200}, {"status": 429})
    assert several.spend(half, half)["holds"]  # type: ignore[arg-type]
    assert not several.spend(half, Answers({"status": 200}))["holds"]  # type: ignore[arg-type]
