"""NVIDIA's tensors as an engine request: what is honoured, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from orchestrator.contracts import ENGINE_INPUTS
from orchestrator.engines import EngineRefusal, EngineRequest
from orchestrator.engines.parsing import parse_engine_request

DTYPES = {
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_FP16": np.float16,
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_STRING": np.object_,
}
SPECS = {spec.name: spec for spec in ENGINE_INPUTS}
HONOURED = {
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "temperature", "runtime_top_k",
    "runtime_top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "seed",
    "exclude_input_in_output", "streaming", "stop", "return_log_probs", "stop_words_list", "bad_words_list",
    "guided_decoding_guide_type", "guided_decoding_guide",
}  # fmt: skip


def tensor(name: str, value: Any) -> np.ndarray:
    """`value` in the tensor's type; a single one as [1] (Triton has taken the 1 of a batched scalar away)."""
    return np.array([value] if np.isscalar(value) else value, dtype=DTYPES[SPECS[name].dtype])


def tensors(**values: Any) -> dict[str, np.ndarray]:
    given = {"input_ids": [[5, 6, 7]], "input_lengths": 3, "request_output_len": 16, **values}
    return {name: tensor(name, value) for name, value in given.items() if value is not None}


def guided(guide_type: Any, guide: Any) -> dict[str, Any]:
    return {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}


def nested(num_levels: int) -> str:
    return '{"a":' * (num_levels - 1) + "{}" + "}" * (num_levels - 1)


def refusal(**values: Any) -> str:
    with pytest.raises(EngineRefusal) as got:
        parse_engine_request("id", tensors(**values), exclude_input=True)
    return str(got.value)


def test_the_least_a_client_sends() -> None:
    parsed = parse_engine_request("id", tensors(), exclude_input=True)
    request = parsed.request
    assert (request.request_id, request.input_ids, request.max_new_tokens) == ("id", [5, 6, 7], 16)
    assert (request.end_id, request.sample, request.seed) == (None, False, None)
    assert (parsed.streaming, parsed.exclude_input) == (False, True)


def test_a_request_without_an_id_gets_one() -> None:
    ids = {parse_engine_request("", tensors(), exclude_input=True).request.request_id for _ in range(10)}
    assert len(ids) == 10
    assert "" not in ids


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"end_id": 2}, {"end_id": 2}),
        ({"end_id": -1}, {"end_id": None}),
        ({"pad_id": 2}, {}),
        ({"runtime_top_k": 1}, {"sample": False}),
        ({"runtime_top_k": 0}, {"sample": True, "top_k": 0}),
        ({"runtime_top_k": 50}, {"sample": True, "top_k": 50}),
        ({"runtime_top_p": 0.5}, {"sample": True, "top_k": 0, "top_p": 0.5}),
        ({"temperature": 0.5}, {"sample": False, "temperature": 0.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": -2.0, "frequency_penalty": 2.0}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"min_tokens": 16}, {"min_tokens": 16}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"num_return_sequences": 1, "beam_width": 1, "return_perf_metrics": False}, {}),
        ({}, {"stop_words": [], "bad_words": [], "log_probs": False, "guide_type": None, "guide": None}),
        ({"return_log_probs": True}, {"log_probs": True}),
        ({"stop_words_list": [[[5, 6, 7], [1, 3, -1]]]}, {"stop_words": [[5], [6, 7]]}),
        ({"bad_words_list": [[[5], [1]]]}, {"bad_words": [[5]]}),
        ({"guided_decoding_guide_type": "json"}, {"guide_type": "json", "guide": None}),
        ({"guided_decoding_guide_type": "json", "guided_decoding_guide": ""}, {"guide_type": "json", "guide": None}),
        ({"guided_decoding_guide_type": b"regex", "guided_decoding_guide": "é+".encode()}, {"guide": "é+"}),
        (guided("json_schema", nested(64)), {"guide_type": "json_schema", "guide": nested(64)}),
        (guided("ebnf_grammar", "x" * (16 << 10)), {"guide": "x" * (16 << 10)}),
    ],
)
def test_what_is_honoured(values: dict[str, Any], expected: dict[str, Any]) -> None:
    request = parse_engine_request("id", tensors(**values), exclude_input=True).request
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_scalar_may_come_in_both_shapes(shape: tuple[int, ...]) -> None:
    sent = {**tensors(), "streaming": np.ones(shape, bool), "end_id": np.full(shape, 2, np.int32)}
    parsed = parse_engine_request("id", sent, exclude_input=True)
    assert parsed.streaming
    assert parsed.request.end_id == 2


@pytest.mark.parametrize(
    ("models_own", "sent", "expected"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_exclude_input(models_own: bool, sent: bool | None, expected: bool) -> None:
    sent_tensors = tensors(exclude_input_in_output=sent)
    assert parse_engine_request("id", sent_tensors, exclude_input=models_own).exclude_input is expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": None}, "input_ids: required unless stop is true"),
        ({"input_ids": [[]]}, "input_ids: shape [1, 0]; must be [1, tokens] with at least one token"),
        ({"input_ids": [[1, 2, 3], [4, 5, 6]]}, "input_ids: shape [2, 3]; must be [1, tokens]"),
        ({"input_ids": [5, 6, 7]}, "input_ids: shape [3]; must be [1, tokens]"),
        ({"input_lengths": 2}, "input_lengths: 2, but input_ids has 3 tokens"),
        ({"input_lengths": [3, 3]}, "input_lengths: shape [2]; must hold one value"),
        ({"request_output_len": 0}, "request_output_len: 0 is out of range; allowed is at least 1"),
        ({"end_id": -2}, "end_id: -2 is out of range; allowed is at least -1"),
        ({"temperature": 0.0}, "temperature: 0.0 is out of range; allowed is 0.001 to 100.0"),
        ({"temperature": float("nan")}, "temperature: nan is out of range"),
        ({"runtime_top_k": -1}, "runtime_top_k: -1 is out of range; allowed is at least 0"),
        ({"runtime_top_p": 0.0}, "runtime_top_p: 0.0 is out of range; allowed is 1e-07 to 1.0"),
        ({"runtime_top_p": 1.5}, "runtime_top_p: 1.5 is out of range"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is out of range"),
        ({"presence_penalty": 2.5}, "presence_penalty: 2.5 is out of range; allowed is -2.0 to 2.0"),
        ({"frequency_penalty": -2.5}, "frequency_penalty: -2.5 is out of range"),
        ({"min_tokens": 17}, "min_tokens: 17 is out of range; allowed is 0 to 16"),
        ({"beam_width": 2}, "beam_width: this engine supports only 1 (got [2])"),
        ({"num_return_sequences": 4}, "num_return_sequences: this engine supports only 1 (got [4])"),
        ({"return_perf_metrics": True}, "return_perf_metrics: this engine supports only False (got [True])"),
        ({"beam_width": []}, "beam_width: shape [0]; must hold one value"),
        ({"stop": []}, "stop: shape [0]; must hold one value"),
        ({"stop_words_list": [[5], [1]]}, "stop_words_list: shape [2, 1]; must be [1, 2, n]"),
        ({"bad_words_list": [[[5], [2]]]}, "bad_words_list: ends [2]; must ascend from at least 1 to at most 1"),
        ({"embedding_bias": [[1.0]]}, "embedding_bias: this engine has no bias on logits; leave it out"),
        (
            {"guided_decoding_guide": "a"},
            "guided_decoding_guide: needs guided_decoding_guide_type, one of json, json_schema, regex, ebnf_grammar",
        ),
        (guided("structural_tag", "{}"), "guided_decoding_guide_type: 'structural_tag'; must be one of json, json_sch"),
        (guided("json", "{}"), "guided_decoding_guide: type json takes no guide; leave it out or use type json_schema"),
        (guided("regex", ""), "guided_decoding_guide: required with guided_decoding_guide_type regex"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: required with guided_decoding_guide_type"),
        (guided("regex", "é" * 513), "guided_decoding_guide: 1026 bytes; regex may have 1024"),
        (guided("ebnf_grammar", "x" * 16385), "guided_decoding_guide: 16385 bytes; ebnf_grammar may have 16384"),
        (guided("json_schema", "x" * 16385), "guided_decoding_guide: 16385 bytes; json_schema may have 16384"),
        (guided("json_schema", '{"a": '), "guided_decoding_guide: the schema is not JSON: Expecting value"),
        (guided("json_schema", nested(65)), "guided_decoding_guide: the schema nests too deep; at most 64 levels"),
        (guided("json_schema", "[" * 16384), "guided_decoding_guide: the schema nests too deep; at most 64 levels"),
        (guided("regex", b"\xff"), "guided_decoding_guide: not UTF-8"),
        (guided("regex", "\ud800"), "guided_decoding_guide: not UTF-8"),
        (guided(["json", "json"], "{}"), "guided_decoding_guide_type: shape [2]; must be [1, 1]"),
    ],
)
def test_a_refusal_names_the_tensor(values: dict[str, Any], message: str) -> None:
    assert message in refusal(**values)


@pytest.mark.parametrize("name", [spec.name for spec in ENGINE_INPUTS if spec.name not in HONOURED])
def test_every_other_tensor_is_refused_by_name(name: str) -> None:
    spec = SPECS[name]
    value = np.full([1, *(abs(size) for size in spec.dims)], 3, dtype=DTYPES[spec.dtype])
    with pytest.raises(EngineRefusal, match=f"^{name}: this engine "):
        parse_engine_request("id", {**tensors(), name: value}, exclude_input=True)


# --- whatever comes ------------------------------------------------------------------------------------------

ARRAYS = st.one_of(
    arrays.arrays(
        st.sampled_from([np.int32, np.int64, np.uint64, np.float32, np.float16, np.bool_, np.uint8]),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
    ),
    arrays.arrays(
        np.object_,
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=2),
        elements=st.one_of(
            st.binary(max_size=20),
            st.text(max_size=20),
            st.sampled_from([b"json", b"json_schema", b"regex", b'{"type": "object"}', b"{" * 300]),
        ),
    ),
    # Word lists that are nearly right.
    arrays.arrays(np.int32, st.tuples(st.just(1), st.just(2), st.integers(0, 4)), elements=st.integers(-2, 4)),
)
NAMES = st.one_of(st.sampled_from(sorted(SPECS)), st.sampled_from(sorted(HONOURED)), st.text(max_size=5))


@given(sent=st.dictionaries(NAMES, ARRAYS, max_size=6), complete=st.booleans())
def test_any_tensors_are_a_request_or_a_refusal_by_name(sent: dict[str, np.ndarray], complete: bool) -> None:
    given_tensors = {**(tensors() if complete else {}), **sent}
    try:
        request = parse_engine_request("id", given_tensors, exclude_input=True).request
    except EngineRefusal as refusal:
        name, _, reason = str(refusal).partition(": ")
        assert reason
        assert name in {*given_tensors, "input_ids", "guided_decoding_guide"}
        assert re.search("must|allowed|only|leave it out|required|needs|not |at most|may have|but", reason), refusal
    else:
        assert isinstance(request, EngineRequest)
        assert all(all(isinstance(token_id, int) for token_id in word) and word for word in request.stop_words)
