"""Engine `vllm` with a stand-in for AsyncLLM: what reaches vLLM, what comes of it, and how each request ends."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.engines import Chunk, EngineRefusal, EngineRequest
from orchestrator.engines.process import PYTHON_VARIABLE, ProcessEngine
from orchestrator.engines.vllm import (
    Settings,
    check_request,
    engine_arguments,
    load_engine,
    make_params,
    sampling_arguments,
    visible_devices,
)
from orchestrator.engines.vllm_relay import Relay

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "standins" / "vllm"
REFUSED, FAILS, DIES = 31, 32, 33
TIMEOUT_S = 20.0

PARAMETERS = {
    "engine": "vllm",
    "max_batch_size": "64",
    "precision": "bf16",
    "kv_cache_precision": "auto",
    "load_format": "safetensors",
    "tp_size": "1",
    "gpu_device_ids": "[0]",
    "gpu_memory_share": "0.85",
    "max_seq_len": "1024",
    "max_num_tokens": "512",
    "enable_kv_cache_reuse": "true",
    "enable_chunked_context": "true",
    "cuda_graph_sizes": "[]",
    "speculation": "none",
    "num_draft_tokens": "4",
    "max_ngram_size": "3",
    "max_responses_per_s": "4000",
    "context_window": "8192",
    "vocab_size": "49152",
}
SETTINGS = Settings.model_validate(PARAMETERS)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in as the package `vllm`."""
    monkeypatch.syspath_prepend(str(STANDIN))
    yield
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    return tmp_path


# --- what reaches vLLM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"max_num_tokens": "0"}, "max_num_tokens"),
        ({"speculation": "eagle"}, "'none' or 'ngram'"),
        ({"max_num_token": "512"}, "Extra inputs are not permitted"),
        ({"gpu_device_ids": "[]"}, "gpu_device_ids"),
        ({"precision": "int4"}, "'bf16' or 'fp8'"),
    ],
)
def test_a_wrong_parameter_is_named(changed: dict[str, str], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Settings.model_validate({**PARAMETERS, **changed})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {"quantization": None, "kv_cache_dtype": "auto", "max_model_len": 1024, "max_num_batched_tokens": 512}),
        ({"precision": "fp8", "kv_cache_precision": "fp8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ({"tp_size": "2", "gpu_device_ids": "[0, 1]"}, {"tensor_parallel_size": 2}),
        ({"enable_kv_cache_reuse": "false"}, {"enable_prefix_caching": False}),
        ({"enable_chunked_context": "false"}, {"enable_chunked_prefill": False}),
        ({"cuda_graph_sizes": "[1, 8]"}, {"cudagraph_capture_sizes": [1, 8]}),
        ({"load_format": "dummy"}, {"load_format": "dummy"}),
        (
            {"speculation": "ngram"},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
        ),
    ],
)
def test_parameters_become_engine_arguments(changed: dict[str, str], expected: dict[str, Any]) -> None:
    arguments = engine_arguments(Settings.model_validate({**PARAMETERS, **changed}), Path("/m"))
    assert {key: arguments[key] for key in expected} == expected
    assert (arguments["model"], arguments["tokenizer"]) == ("/m/checkpoint", "/m/tokenizer")
    assert ("cudagraph_capture_sizes" in arguments) == ("cuda_graph_sizes" in changed)
    assert ("speculative_config" in arguments) == ("speculation" in changed)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": [], "logprobs": None, "detokenize": False}),
        ({"end_id": 2}, {"stop_token_ids": [2], "ignore_eos": True}),
        ({"min_tokens": 3}, {"min_tokens": 3, "max_tokens": 8}),
        (
            {"sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 2**63 + 1},
            {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 2**63 + 1},
        ),
        ({"sample": True, "temperature": 0.001}, {"temperature": 0.01}),
        ({"temperature": 0.7, "top_k": 1, "top_p": 0.5}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        (
            {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
        ({"log_probs": True}, {"logprobs": 0}),
    ],
)
def test_fields_become_sampling_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    arguments = sampling_arguments(EngineRequest("a", [40, 41], 8, **fields))
    assert {key: arguments[key] for key in expected} == expected


def test_every_field_of_a_request_has_a_place() -> None:
    """A field that is new must be thought of here: in the parameters, or in one of the other places."""
    elsewhere = {"request_id", "input_ids", "stop_words", "bad_words", "guide_type", "guide", "prompt", "lora"}
    renamed = {
        "max_new_tokens": "max_tokens",
        "end_id": "stop_token_ids",
        "log_probs": "logprobs",
        "sample": "temperature",
    }
    arguments = sampling_arguments(EngineRequest("a", [40], 8))
    for each in dataclasses.fields(EngineRequest):
        assert each.name in elsewhere or renamed.get(each.name, each.name) in arguments, each.name


def test_guides_and_bad_words_reach_vllm(vllm: None) -> None:
    schema = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false}'
    request = EngineRequest("a", [40], 8, end_id=2, guide_type="json_schema", guide=schema, bad_words=[[5, 6]])
    params = make_params(request)
    assert params.structured_outputs.grammar.startswith("root ::=")
    assert params._bad_words_token_ids == [[5, 6]]
    assert params.output_kind.name == "DELTA"
    assert make_params(EngineRequest("a", [40], 8)).structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_new_tokens": 1023}, r"input_ids, request_output_len: 2 \+ 1023 tokens are more than .* 1024"),
        ({"input_ids": [49152]}, "input_ids: ids must be 0 to 49151"),
        ({"stop_words": [[-5]]}, "stop_words_list: ids must be"),
        ({"bad_words": [[99999]]}, "bad_words_list: ids must be"),
        ({"end_id": 60000}, "end_id: ids must be"),
        ({"guide_type": "json"}, "guided_decoding_guide_type: needs end_id"),
        ({"guide_type": "json", "end_id": 2, "min_tokens": 1}, "guided_decoding_guide_type: .* leave min_tokens out"),
    ],
)
def test_what_cannot_run_is_refused_by_name(fields: dict[str, Any], text: str) -> None:
    request = EngineRequest(**{"request_id": "a", "input_ids": [40, 41], "max_new_tokens": 8, **fields})
    with pytest.raises(EngineRefusal, match=text):
        check_request(request, SETTINGS)


# --- the relay -----------------------------------------------------------------------------------------------


class Written:
    """The messages of a relay, by request."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def chunks(self, request_id: str) -> list[Chunk]:
        return [Chunk(*each["chunks"][request_id]) for each in self.messages if request_id in each.get("chunks", {})]

    async def until_finished(self, *request_ids: str) -> None:
        while not all(self.chunks(each) and self.chunks(each)[-1].finished for each in request_ids):
            await asyncio.sleep(0.001)


def run(
    work: Callable[[Relay, Written, Any], Any], model_dir: Path, max_responses_per_s: float = 1e9, **changed: str
) -> None:
    """Run `work` with a relay in front of the stand-in."""

    async def main() -> None:
        settings = Settings.model_validate({**PARAMETERS, **changed})
        written, relays = Written(), []
        engine = load_engine(settings, model_dir, lambda share: relays[0].note_usage(share))

        def prepare(request: EngineRequest) -> Any:
            check_request(request, settings)
            return make_params(request)

        relays.append(Relay(engine, prepare, max_responses_per_s, written.messages.append))
        await work(relays[0], written, engine)

    asyncio.run(main())


def add(request_id: str, input_ids: list[int], max_new_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"add": dataclasses.asdict(EngineRequest(request_id, input_ids, max_new_tokens, **fields))}


def test_tokens_come_one_by_one_and_end_once(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, _: Any) -> None:
        relay.do(add("a", [40, 41, 42], 5, log_probs=True))
        relay.do(add("b", [50, 51], 9, end_id=2))
        await written.until_finished("a", "b")
        a, b = written.chunks("a"), written.chunks("b")
        assert [each.token_ids for each in a] == [[40], [41], [42], [40], [41]]
        assert [each.log_probs for each in a] == [[-0.5]] * 5
        assert [each.finished for each in a] == [False] * 4 + [True]
        assert [each.token_ids for each in b] == [[50], [51], [2]]
        assert all(each.log_probs is None for each in b)

    run(work, model_dir)


def test_what_comes_together_is_one_message(vllm: None, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_ITL_MS", "0")

    async def work(relay: Relay, written: Written, _: Any) -> None:
        for number in range(16):
            relay.do(add(str(number), [40], 4))
        await written.until_finished(*map(str, range(16)))
        assert len(written.messages) <= 8
        assert all(sum(len(chunk.token_ids) for chunk in written.chunks(str(number))) == 4 for number in range(16))

    run(work, model_dir)


def test_many_streams_get_their_tokens_in_groups(vllm: None, model_dir: Path) -> None:
    """16 streams and 80 responses a second: a stream's turn is every 200 ms. Its first token never waits."""

    async def work(relay: Relay, written: Written, _: Any) -> None:
        for number in range(16):
            relay.do(add(str(number), [40 + number, 90], 300))
        await written.until_finished(*map(str, range(16)))
        for number in range(16):
            chunks = written.chunks(str(number))
            assert [each for chunk in chunks for each in chunk.token_ids] == [40 + number, 90] * 150
            assert len(chunks[0].token_ids) == 1
            assert len(chunks) < 60

    run(work, model_dir, max_responses_per_s=80)


def test_what_waits_goes_out_though_no_step_comes(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, engine: Any) -> None:
        relay.do(add("a", [40], 100))
        while not written.chunks("a"):
            await asyncio.sleep(0.001)
        engine._itl_s = 1000  # from the next token on
        await asyncio.sleep(0.1)
        num_tokens = sum(len(each.token_ids) for each in written.chunks("a"))
        assert num_tokens == engine._live["a"] - 1
        relay.do({"stop": "a"})
        await written.until_finished("a")

    run(work, model_dir, max_responses_per_s=50)


def test_a_stop_ends_it_now_and_aborts(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, engine: Any) -> None:
        relay.do(add("a", [40], 500, log_probs=True))
        relay.do(add("b", [50], 20))
        while len(written.chunks("a")) < 3:
            await asyncio.sleep(0.001)
        relay.do({"stop": "a"})
        relay.do({"stop": "a"})
        relay.do({"stop": "unknown"})
        await written.until_finished("a", "b")
        assert written.chunks("a")[-1] == Chunk([], finished=True)
        assert sum(each.finished for each in written.chunks("a")) == 1
        assert engine.aborted == ["a"]
        assert len([each for chunk in written.chunks("b") for each in chunk.token_ids]) == 20
        assert [each["kv_cache_usage"] for each in written.messages if "kv_cache_usage" in each][-1] == 0.0

    run(work, model_dir)


def test_a_stop_before_the_first_step(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, engine: Any) -> None:
        relay.do(add("a", [40], 500))
        relay.do({"stop": "a"})
        await written.until_finished("a")
        await asyncio.sleep(0.02)
        assert written.chunks("a") == [Chunk([], finished=True)]
        assert engine._live == {}

    run(work, model_dir)


def test_stop_words_end_it_and_abort(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, engine: Any) -> None:
        relay.do(add("a", [40, 41, 42, 43], 500, stop_words=[[99], [41, 42]]))
        await written.until_finished("a")
        assert [each for chunk in written.chunks("a") for each in chunk.token_ids] == [40, 41, 42]
        await asyncio.sleep(0.02)
        assert engine.aborted == ["a"]

    run(work, model_dir)


def test_refusals_and_failures_are_the_requests_own(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, _: Any) -> None:
        relay.do(add("window", [40], 5000))
        relay.do(add("guide", [REFUSED], 8, guide_type="json", end_id=2))
        relay.do(add("refused", [REFUSED], 8))
        relay.do(add("fails", [FAILS, 40], 8))
        relay.do(add("fine", [40], 8))
        await written.until_finished("window", "guide", "refused", "fails", "fine")
        errors = {name: written.chunks(name)[-1].error for name in ("window", "guide", "refused", "fails", "fine")}
        assert errors == {
            "window": "input_ids, request_output_len: 1 + 5000 tokens are more than the context window of 1024",
            "guide": "guided_decoding_guide: no such grammar",
            "refused": "input_ids: no such grammar",
            "fails": "the engine failed: RuntimeError: this one failed",
            "fine": None,
        }
        assert not relay.end.done()

    run(work, model_dir)


def test_a_dead_engine_is_told(vllm: None, model_dir: Path) -> None:
    async def work(relay: Relay, written: Written, _: Any) -> None:
        relay.do(add("a", [DIES, 40], 8))
        with pytest.raises(RuntimeError, match="the core is dead"):
            await asyncio.wait_for(relay.end, TIMEOUT_S)

    run(work, model_dir)


# --- the whole process ---------------------------------------------------------------------------------------


@pytest.fixture
def engine(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessEngine]:
    python = tmp_path / "engine-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{STANDIN}:{ROOT}" exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    process = ProcessEngine(PARAMETERS, model_dir)
    yield process
    process.close()


def collect(engine: ProcessEngine, request: EngineRequest) -> list[Chunk]:
    inbox: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    engine.add(request, inbox.put)
    chunks = [inbox.get(timeout=TIMEOUT_S)]
    while not chunks[-1].finished:
        chunks.append(inbox.get(timeout=TIMEOUT_S))
    return chunks


def test_the_process_answers_stops_and_dies(engine: ProcessEngine) -> None:
    chunks = collect(engine, EngineRequest("a", [40, 41], 4))
    assert [each for chunk in chunks for each in chunk.token_ids] == [40, 41, 40, 41]
    assert engine.kv_cache_usage() == 0.0
    inbox: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    engine.add(EngineRequest("b", [40], 900), inbox.put)
    inbox.get(timeout=TIMEOUT_S)
    engine.stop("b")
    deadline_s = time.monotonic() + TIMEOUT_S
    while not inbox.get(timeout=TIMEOUT_S).finished:
        assert time.monotonic() < deadline_s
    failed = collect(engine, EngineRequest("c", [DIES, 40], 8))
    assert failed[-1].error == "the engine failed: RuntimeError: the core is dead"


def test_a_python_that_is_not_there_is_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(RuntimeError, match=f"{PYTHON_VARIABLE}: no /nowhere/python in PATH"):
        ProcessEngine(PARAMETERS, model_dir)


def test_its_gpus_are_counted_among_those_it_may_see() -> None:
    assert visible_devices([0, 1], "") == "0,1"
    assert visible_devices([0], "1") == "1"  # the second of two Tritons, with a GPU each
    assert visible_devices([1, 0], "4,GPU-6f") == "GPU-6f,4"
    with pytest.raises(ValueError, match="gpu_device_ids: \\[0, 1\\], but CUDA_VISIBLE_DEVICES=3 leaves 1"):
        visible_devices([0, 1], "3")
