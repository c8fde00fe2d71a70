"""What guided decoding takes it follows: the real model's tokenizer, the real compiler, tokens at random."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openvino_genai as genai
import pytest
import regex as matcher
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from orchestrator import regexes, schemas
from orchestrator.engines import EngineRefusal
from orchestrator.engines.guide_checker import Guide, GuideChecker
from orchestrator.engines.guides import GuideCompiler
from orchestrator.errors import InvalidRequestError

VOCAB_SIZE = 49152
NUM_TOKENS = 40
NUM_SEEDS = 5

Generate = Callable[..., Iterator[str]]


@pytest.fixture(scope="module")
def tokenizer(artifact: Callable[[str], Path]) -> genai.Tokenizer:
    return genai.Tokenizer(str(artifact("cpu") / "model_repository" / "llm_small" / "1" / "openvino"))


@pytest.fixture(scope="module")
def generate(tokenizer: genai.Tokenizer) -> Generate:
    """Texts that came to their end, for so many seeds."""
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE)

    def generate(guide: Guide, num_seeds: int = NUM_SEEDS) -> Iterator[str]:
        for seed in range(num_seeds):
            token_ids = compiler.generate(guide, NUM_TOKENS, seed, may_end=True)
            if len(token_ids) < NUM_TOKENS:
                text = tokenizer.decode(token_ids)
                assert "\ufffd" not in text
                yield text

    return generate


@pytest.fixture(scope="module")
def checker(artifact: Callable[[str], Path]) -> Iterator[GuideChecker]:
    folder = artifact("cpu") / "model_repository" / "llm_small" / "1" / "openvino"
    command = (sys.executable, "-m", "orchestrator.engines.guides", str(folder), str(VOCAB_SIZE))
    with contextlib.closing(GuideChecker(command)) as checker:
        yield checker


def is_taken(checker: GuideChecker, guide: Guide) -> bool:
    try:
        while not checker.check(guide):
            time.sleep(0.002)
    except EngineRefusal:
        return False
    return True


CHARACTERS = ["a", "b", "é", "深", "\U0001f600", "-", " ", r"\n", r"\.", "/", '"', r"\\", "#", r"\d", r"\w", r"\s"]
CLASSES = [r"\S", r"\D", r"\W", ".", "[a-f]", "[^a-z]", r"[\w.]", r'[^\s"]', r"[^\d]", r"[\u4e00-\u9fff]", r"[a\]^-]"]
MORE_CLASSES = [r"[^\W]", r"[^\D]", r"[\s\S]", r"[\x20-\x7e]", "[À-ÿ]", r"[^\w\s]", r"[^\S]"]
ATOMS = st.sampled_from([*CHARACTERS, *CLASSES, *MORE_CLASSES])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}"])).map(
            lambda two: f"({two[0]}){two[1]}"
        )
    ),
    max_leaves=6,
)

BOUND = st.integers(-2000, 2000)
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={"minimum": BOUND, "maximum": BOUND, "exclusiveMinimum": BOUND, "exclusiveMaximum": BOUND},
)
STRINGS = (
    st.fixed_dictionaries({"type": st.just("string"), "pattern": REGEXES})
    | st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(list(schemas.FORMATS))})
    | st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": st.just(2), "maxLength": st.just(5)})
)
VALUES: list[Any] = [1, -2.5, "x", 'é"\\\n', None, True, [1, {}], {"a": "\n"}]
SIMPLE = st.sampled_from([{"type": "boolean"}, {"type": ["null", "string"]}, {}, True, {"$ref": "#/$defs/A"}])
NAMES = ["a", "ab", "b", "é", "x y", '"', "\\", "n\n", "", "{", "a:b"]


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)},
        optional={
            "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=3),
            "additionalProperties": inner | st.booleans(),
        },
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner | st.booleans(),
            "prefixItems": st.lists(inner, min_size=1, max_size=3),
            "minItems": st.integers(0, 3),
            "maxItems": st.integers(1, 5),
        },
    )


SCHEMAS = st.recursive(
    SIMPLE
    | NUMBERS
    | STRINGS
    | st.fixed_dictionaries({"enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3)}),
    lambda inner: (
        _objects(inner)
        | _arrays(inner)
        | st.dictionaries(st.sampled_from(["anyOf", "oneOf"]), st.lists(inner, min_size=1, max_size=3), max_size=1)
    ),
    max_leaves=8,
)
real_compiler = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("regex", [r"(a)+[\u4e00-\u9fff]a", r"(a|b)+[\u4e00-\u9fff]a", "(ab?|é)[^a-z]é{2}", r"a+.\s.b"])
def test_a_class_beyond_ascii_after_a_group(generate: Generate, regex: str) -> None:
    for text in generate(Guide("regex", regex)):
        assert re.fullmatch(regex, text), text


@pytest.mark.parametrize("regex", ["(?:(abc){2}|abc)", "abcabc|abc", "(?:(深){2}|深)", "(aba|a)+b", "x(aba|a|ab)"])
def test_alternatives_with_a_beginning_and_an_end_in_common(generate: Generate, regex: str) -> None:
    for text in generate(Guide("regex", regex), 40):
        assert re.fullmatch(regex, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["abcabc", "abc"]},
        {"enum": [123123, 123]},
        {"type": "number", "minimum": 1001},
        {"enum": ["", "a", "aa"]},
    ],
)
def test_values_with_a_beginning_and_an_end_in_common(generate: Generate, schema: dict[str, Any]) -> None:
    for text in generate(Guide("json_schema", json.dumps(schema)), 40):
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


@pytest.mark.timeout(300)
@real_compiler
@given(regex=REGEXES)
def test_a_regex_that_is_taken_is_followed(generate: Generate, checker: GuideChecker, regex: str) -> None:
    try:
        regexes.check_regex(regex, "r")
    except InvalidRequestError:
        assume(False)
    guide = Guide("regex", regex)
    assume(is_taken(checker, guide))  # by the process that tries them: some would be followed for ever
    for text in generate(guide):
        with contextlib.suppress(TimeoutError):  # a matcher that goes back may take for ever where a grammar does not
            assert matcher.fullmatch(regex, text, timeout=1), text


@pytest.mark.timeout(300)
@real_compiler
@given(schema=SCHEMAS, definition=SCHEMAS)
def test_a_schema_that_is_taken_is_followed(generate: Generate, schema: Any, definition: Any) -> None:
    schema = {"anyOf": [schema], "$defs": {"A": definition}}
    try:
        schemas.check_schema(schema, "s")
    except InvalidRequestError:
        assume(False)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for text in generate(Guide("json_schema", json.dumps(schema))):
        assert validator.is_valid(json.loads(text)), text


def test_white_space_is_a_space_after_a_comma_or_a_colon(generate: Generate) -> None:
    schema = {"type": "object", "properties": {name: {"enum": [1, [2]]} for name in "abc"}, "required": ["a", "b", "c"]}
    texts = list(generate(Guide("json_schema", json.dumps(schema))))
    assert texts
    for text in texts:
        assert not re.search(r"[^,:] |  |[\n\t]", text)
    for text in generate(Guide("json", None)):
        assert isinstance(json.loads(text), dict)
