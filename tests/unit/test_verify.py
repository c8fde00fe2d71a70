"""Comparisons of plans and engines with what they were made from: the sums, and what is too far off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build import verify_engine, verify_plan
from build.errors import BuildError
from build.onnx_graph import save_samples
from build.verify_engine import BITS, LIMITS, Judged, Measures, find_fault, summarise
from build.verify_plan import compare, fits

# --- plans -------------------------------------------------------------------------------------------------

ONE = {"embedding": np.array([[0.6, 0.8]], np.float32), "ids": np.array([[1, 2, 3, 4]], np.int32)}


def test_equal_results() -> None:
    found = compare([ONE, ONE], [ONE, ONE])
    assert found == {"embedding": {"cosine": 1.0, "largest_difference": 0.0}, "ids": {"agreement": 1.0}}
    assert verify_plan.find_fault(found, "fp32") is None


def test_differences_are_counted_over_all_samples() -> None:
    other = {"embedding": np.array([[0.8, 0.6]], np.float32), "ids": np.array([[1, 2, 3, 5]], np.int32)}
    found = compare([ONE, ONE], [ONE, other])
    assert found["embedding"] == {"cosine": 0.98, "largest_difference": 0.2}
    assert found["ids"] == {"agreement": 0.875}
    assert verify_plan.find_fault(found, "fp16") == (
        "embedding: cosine to ONNX Runtime's result is 0.98; precision 'fp16' must have at least 0.999; take a higher "
        "precision, or set runtime = 'onnxruntime' for it in the target's row"
    )
    assert "ids: agreement" in (verify_plan.find_fault({"ids": found["ids"]}, "int8") or "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.ones((1, 3), np.float32), r"embedding: has shape \(1, 3\), ONNX Runtime's has \(1, 2\)"),
        (np.array([[1, np.nan]], np.float32), r"numbers that are infinite or none \(NaN\); set precision = 'fp32'"),
        (np.array([[1, np.inf]], np.float32), r"numbers that are infinite or none"),
    ],
)
def test_what_is_no_result(given: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        compare([ONE], [{**ONE, "embedding": given}])


def test_the_first_profile_that_fits() -> None:
    profiles = [{"x": [[1, 1], [2, 8], [4, 8]]}, {"x": [[1, 9], [2, 64], [4, 64]]}]
    shapes = {(4, 8): 0, (1, 9): 1, (5, 8): None, (1, 65): None}
    assert {shape: fits({"x": np.zeros(shape)}, profiles) for shape in shapes} == shapes


def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"name": "embedding_encoder", "precision": "fp16"}))
    save_samples([{"x": np.zeros(1)}], tmp_path / "samples.npz")
    monkeypatch.setattr(verify_plan, "run_reference", lambda model, samples: [ONE])
    results = [ONE]
    monkeypatch.setattr(verify_plan, "run_plan", lambda plan, description, samples: results)
    words = ["--plan", str(tmp_path), "--graph", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    assert verify_plan.main(words) == 0
    told = json.loads((tmp_path / "out" / "verified.json").read_bytes())
    assert told["num_samples"] == 1 and told["outputs"]["ids"] == {"agreement": 1.0}
    results[0] = {**ONE, "embedding": -ONE["embedding"]}
    assert verify_plan.main([*words[:-1], str(tmp_path / "worse")]) == 1
    assert not (tmp_path / "worse").exists()


# --- engines -----------------------------------------------------------------------------------------------


def test_an_equal_model() -> None:
    measures = summarise([Judged(5, 0.5, 5, 0.5), Judged(6, 1.5, 6, 1.5)])
    assert measures == Measures(2, 1.0, round(math.e, 4), round(math.e, 4))
    assert all(find_fault(measures, precision) is None for precision in BITS)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 8), st.floats(0, 8)), min_size=1))
def test_an_engine_is_never_better_than_the_original(tokens: list[tuple[bool, float, float]]) -> None:
    judged = [Judged(1, best + (0 if same else more), 1 if same else 2, best) for same, best, more in tokens]
    measures = summarise(judged)
    assert 0 <= measures.token_agreement <= 1
    assert measures.perplexity >= measures.perplexity_best >= 1


@pytest.mark.parametrize(
    ("measures", "precision", "message"),
    [
        (
            Measures(100, 0.95, 2.0, 2.0),
            "bf16",
            "token_agreement is 0.95 over 100 tokens; precision 'bf16' must have at",
        ),
        (Measures(100, 0.95, 2.0, 2.0), "fp8", None),
        (
            Measures(100, 0.95, 3.0, 2.0),
            "fp8",
            "perplexity is 3.0, 1.50 times the original's own 2.0; precision 'fp8' ma",
        ),
        (Measures(100, 0.7, 2.0, 2.0), "int4_awq", "token_agreement is 0.7"),
    ],
)
def test_what_is_too_far_off(measures: Measures, precision: str, message: str | None) -> None:
    fault = find_fault(measures, precision)
    assert fault is None if message is None else fault is not None and message in fault


def test_no_answer_and_no_number() -> None:
    with pytest.raises(BuildError, match="continued none of the texts"):
        summarise([])
    with pytest.raises(BuildError, match="no number"):
        summarise([Judged(1, math.inf, 2, 0.1)])


def test_fewer_bits_may_be_further_off() -> None:
    assert sorted(LIMITS) == [4, 8, 16]
    assert LIMITS[16][0] > LIMITS[8][0] > LIMITS[4][0] and LIMITS[16][1] < LIMITS[8][1] < LIMITS[4][1]


def test_the_engine_s_answers_come_without_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's API as it is used; the library is in NVIDIA's container alone."""
    calls: list[Any] = []

    class LLM:
        def __init__(self, model: str, tokenizer: str) -> None:
            calls.append((model, tokenizer))

        def generate(self, inputs: list[dict[str, list[int]]], sampling: Any) -> list[Any]:
            calls.append((inputs, sampling.max_tokens, sampling.top_k))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7, 8, 2])]) for _ in inputs]

        def shutdown(self) -> None:
            calls.append("shutdown")

    library, engines = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm._tensorrt_engine")
    library.SamplingParams = lambda **values: SimpleNamespace(**values)  # type: ignore[attr-defined]
    engines.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm", library)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm._tensorrt_engine", engines)
    answers = verify_engine.continue_texts(Path("engine"), Path("original"), [[1], [1, 2]], 2)
    assert answers == [[7, 8], [7, 8]]
    assert calls == [
        ("engine", "original"),
        ([{"prompt_token_ids": [1]}, {"prompt_token_ids": [1, 2]}], verify_engine.MAX_NEW_TOKENS, 1),
        "shutdown",
    ]
