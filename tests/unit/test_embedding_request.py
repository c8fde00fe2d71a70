"""`/v1/embeddings`: every field checked, every fault named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import Embedder
from orchestrator.contracts import EMBEDDING_DIMENSIONS
from orchestrator.embedding.request import MAX_INPUTS, EmbeddingRequest, parse_embedding_request
from orchestrator.errors import ApiError, InvalidRequestError
from orchestrator.request import MAX_REQUEST_BYTES

EMBEDDER = Embedder(name="mini", max_input_tokens=8, vocab_size=1000, cls_id=101, sep_id=102, pad_id=0)


def parse(**fields: Any) -> tuple[EmbeddingRequest, list[str | list[int]]]:
    return parse_embedding_request(json.dumps({"model": "embedding", **fields}).encode(), EMBEDDER)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a text", ["a text"]),
        (["one", "two"], ["one", "two"]),
        ([5], [[101, 5, 102]]),
        ([101, 5, 102], [[101, 5, 102]]),
        ([[5, 6], [7]], [[101, 5, 6, 102], [101, 7, 102]]),
        (["x"] * MAX_INPUTS, ["x"] * MAX_INPUTS),
    ],
)
def test_every_form_of_input(given: Any, inputs: list[Any]) -> None:
    request, found = parse(input=given, encoding_format="base64", dimensions=EMBEDDING_DIMENSIONS, user="me")
    assert found == inputs
    assert request.encoding_format == "base64"


def test_defaults() -> None:
    request, _ = parse(input="a", model="mini")
    assert (request.encoding_format, request.dimensions) == ("float", None)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input: required"),
        ({"input": None}, "input", r"a text, a list of token ids, or a list of either \(got null\)"),
        ({"input": 5}, "input", r"a list of either \(got 5\)"),
        ({"input": ""}, "input", "input: must not be empty"),
        ({"input": []}, "input", r"input: must hold 1 to 256 inputs \(got 0\)"),
        ({"input": ["x"] * 257}, "input", r"input: must hold 1 to 256 inputs \(got 257\)"),
        ({"input": ["a", ""]}, "input[1]", r"input\[1\]: must not be empty"),
        ({"input": [[1], []]}, "input[1]", r"input\[1\]: must not be empty"),
        ({"input": ["a", 1]}, "input[1]", r"input\[1\]: .*all of them the same \(got 1\)"),
        ({"input": [1, "a"]}, "input[0]", r"input\[0\]: must be a text or a list of token ids"),
        ({"input": ["a", [1]]}, "input[1]", r"all of them the same \(got \[1\]\)"),
        ({"input": [True]}, "input[0]", r"\(got True\)"),
        ({"input": [1.5]}, "input[0]", r"\(got 1\.5\)"),
        ({"input": [[1, True]]}, "input[0]", r"token ids are integers from 0 to 999 \(got True\)"),
        ({"input": [-1]}, "input", r"input: token ids are integers from 0 to 999 \(got -1\)"),
        ({"input": [[7], [1000]]}, "input[1]", r"from 0 to 999 \(got 1000\)"),
        ({"input": [1] * 7}, "input", r"input: has 9 tokens; the embedder takes at most 8"),
        (
            {"input": "a", "model": "llm_small"},
            "model",
            r"model: 'llm_small' makes no embeddings; one of embedding, mini",
        ),
        ({"input": "a", "model": None}, "model", "model: .*string"),
        ({"input": "a", "dimensions": 256}, "dimensions", r"dimensions: Input should be 384 \(got 256\)"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", r"'float' or 'base64' \(got 'int8'\)"),
        ({"input": "a", "truncate": True}, "truncate", "truncate: not supported; remove it"),
    ],
)
def test_faults_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(
        InvalidRequestError if fields.get("model") != "llm_small" else ApiError, match=message
    ) as caught:
        parse(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request is not JSON"),
        (b"[]", "the request: "),
        (b'{"input": ' + b"[" * 65 + b"]" * 65 + b"}", "nests 66 levels deep"),
        (b" " * (MAX_REQUEST_BYTES + 1), "at most 1048576 are allowed"),
        (b'{"input": "\\ud800", "model": "mini"}', "the request is not JSON"),
    ],
)
def test_bodies_that_are_no_request(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        parse_embedding_request(body, EMBEDDER)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1005) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


@given(values)
def test_any_input_is_read_or_refused_by_name(value: Any) -> None:
    try:
        _, inputs = parse(input=value)
    except InvalidRequestError as error:
        assert error.param is not None and error.param.startswith("input")
        return
    for each in inputs:
        assert each
        if isinstance(each, list):
            assert (each[0], each[-1]) == (EMBEDDER.cls_id, EMBEDDER.sep_id)
            assert len(each) <= EMBEDDER.max_input_tokens
            assert all(type(item) is int and 0 <= item < EMBEDDER.vocab_size for item in each)


def test_the_schema_has_the_model_s_dimensions() -> None:
    assert EmbeddingRequest.model_json_schema()["properties"]["dimensions"]["anyOf"][0]["const"] == EMBEDDING_DIMENSIONS
