"""A schema becomes a grammar, or is refused with the place of what would not be followed."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator import grammars
from orchestrator.errors import InvalidRequestError
from orchestrator.schemas import FORMATS, to_grammar

NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
FOLLOWED: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"not": {"type": "string"}, "multipleOf": {"enum": [{"not": 1}]}}},
    {"anyOf": [{"type": "integer", "minimum": 1}, {"const": {"if": 1}}], "description": "x"},
    {"$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"},
    {"$defs": {"N": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/N", "title": "a list"},
    {"definitions": {"a/b": {"type": "null"}}, "$ref": "#/definitions/a~1b"},
    {"type": "object", "additionalProperties": False, "required": ["a"], "properties": {"a": True}},
    {"type": "object", "required": ["b"], "properties": {"a": {}}},
    {"type": "object", "properties": {"a": False, '"\\\x00\n': {}}, "additionalProperties": {"type": "null"}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 1},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "string", "pattern": "^[a-z]{1,3}$", "minLength": 1, "maxLength": 3},
    {"type": "number", "exclusiveMinimum": -1, "maximum": 1},
    {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
    {"oneOf": [{"const": 1}, {"const": 2}, {"type": "string"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")
        ]
    },
    *({"type": "string", "format": name} for name in FORMATS),
]
LOOP = {"A": {"$ref": "#/$defs/B"}, "B": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/A"}]}}
REFUSED: list[tuple[Any, str]] = [
    ({"multipleOf": 7}, "s.multipleOf: guided decoding does not follow"),
    ({"properties": {"a": {"uniqueItems": True}}}, "s.properties.a.uniqueItems: "),
    ({"anyOf": [{"allOf": []}]}, "s.anyOf[0].allOf: "),
    ({"items": {"not": {}}}, "s.items.not: "),
    ({"if": {}, "then": {}}, "s.if: "),
    # references
    ({"$ref": "#"}, "s.$ref: '#' leads nowhere"),
    ({"$ref": "http://example.com/x"}, "s.$ref: 'http://example.com/x' leads nowhere"),
    ({"$ref": "#/$defs/B", "$defs": {"A": {}}}, "s.$ref: '#/$defs/B' leads nowhere"),
    ({"$ref": "#/properties/a", "properties": {"a": {}}}, "s.properties: is not followed beside $ref"),
    ({"$ref": 5}, "s.$ref: '5' leads nowhere"),
    ({"$defs": 5}, "s.$defs: must be an object"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"minItems": "x"}}}, "s.$ref(#/$defs/A).minItems: must be"),
    ({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, "s: #/$defs/A leads back to itself"),
    ({"$defs": LOOP, "$ref": "#/$defs/B"}, "s: #/$defs/"),
    ({"$defs": {"A": {"items": LOOP["A"]}, **LOOP}, "items": {"$ref": "#/$defs/A"}}, "s: #/$defs/"),
    (
        {
            "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}},
            "properties": {"x": {"$ref": "#/$defs/A"}},
        },
        "s: a value of #/$defs/A never ends",
    ),
    ({"$defs": {"A": {"items": {"$ref": "#/$defs/A"}, "minItems": 1}}, "$ref": "#/$defs/A"}, "s: a value of #/$defs/A"),
    # what stands beside
    ({"$ref": "#/$defs/A", "$defs": {"A": {}}, "enum": [1]}, "s.enum: is not followed beside $ref"),
    ({"anyOf": [{}], "properties": {}}, "s.properties: is not followed beside anyOf"),
    ({"anyOf": [{}], "type": "object"}, "s.type: is not followed beside anyOf"),
    ({"enum": ["ab"], "maxLength": 1}, "s.maxLength: is not followed beside enum"),
    ({"const": 1, "enum": [1]}, "s.enum: is not followed beside const"),
    ({"type": "integer", "enum": ["x"]}, 's.enum: "x" is not of type integer'),
    ({"type": "string", "const": True}, "s.const: true is not of type string"),
    ({"type": "integer", "maxLength": 3}, "s.maxLength: says nothing about type integer"),
    # types
    ({"type": []}, "s.type: []; must be one or a list of object, "),
    ({"type": "nonsense"}, 's.type: "nonsense"; must be'),
    ({"type": {"a": 1}}, 's.type: {"a": 1}; must be'),
    ({"enum": []}, "s.enum: must be a list of one or more values"),
    ({"enum": 5}, "s.enum: must be a list"),
    ({"anyOf": []}, "s.anyOf: must be a list of schemas"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "s.oneOf: a value may match both [0] and [1]"),
    ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "s.oneOf: a value may match both"),
    ({"oneOf": [{"const": n} for n in range(33)]}, "s.oneOf: 33 schemas; at most 32 are compared"),
    ({"oneOf": [{}, {"type": "null"}]}, "s.oneOf: a value may match both"),
    ({"properties": {"a": {"const": "\ud800"}}}, "s.properties.a.const: holds half of a surrogate pair"),
    ({"enum": [float("inf")]}, "s.enum: holds NaN or Infinity"),
    (
        {"$defs": {"A": {"oneOf": [{"required": [[]]}, {"required": 5}]}}, "$ref": "#/$defs/A"},
        "s.$ref(#/$defs/A).oneOf",
    ),
    # objects and arrays
    ({"items": 5}, "s.items: must be a schema"),
    ({"properties": {"a": [1]}}, "s.properties.a: must be a schema"),
    ({"properties": 5}, "s.properties: must be an object"),
    ({"required": "a"}, "s.required: must be a list of names"),
    ({"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "s.required.b: allows no value"),
    ({"properties": {"a": False}, "required": ["a"]}, "s.properties.a: allows no value"),
    ({"properties": {"a" * 129: {}}}, f"s.properties.{'a' * 80}: a name of 129 characters; at most 128"),
    ({"prefixItems": []}, "s.prefixItems: must be a list of 1 to 64"),
    ({"prefixItems": [{}], "items": False, "minItems": 2}, "s.minItems: 2, but items and prefixItems allow 1"),
    ({"minItems": 2, "maxItems": 1}, "s.minItems: 2 is more than maxItems, 1"),
    ({"maxItems": -1}, "s.maxItems: must be a whole number"),
    ({"maxItems": True}, "s.maxItems: must be a whole number"),
    ({"maxItems": float("nan")}, "s.maxItems: must be a whole number"),
    ({"maxItems": float("inf")}, "s.maxItems: must be a whole number"),
    ({"maxItems": 5000}, "s: counts up to 9998 characters or values; at most 4096"),
    # strings
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "s.maxLength: pattern allows longer texts"),
    ({"pattern": "a*", "minLength": 1}, "s.minLength: pattern allows shorter texts"),
    ({"type": "string", "format": "uuid", "maxLength": 3}, "s.maxLength: format allows longer texts"),
    ({"format": "date", "pattern": "x"}, "s.format: is not followed beside pattern"),
    ({"format": "color"}, "s.format: 'color' is not followed; one of date, "),
    ({"pattern": "(?=a)"}, "s.pattern: has lookaround"),
    ({"pattern": 5}, "s.pattern: must be a string"),
    ({"maxLength": 5000}, "s: counts up to 5000 characters or values; at most 4096"),
    # numbers
    ({"type": "number", "minimum": 0.5, "maximum": 0.6}, "s: 0.5 as the bound of a number is not followed"),
    ({"type": "integer", "minimum": 0.5, "maximum": 0.6}, "s: no integer lies between its bounds"),
    ({"type": "number", "minimum": 2, "maximum": 1}, "s: no number lies between its bounds"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "s: no number lies"),
    ({"type": "integer", "minimum": 10**10}, "s.minimum: must be a number from -1000000000 to 1000000000"),
    ({"type": "integer", "minimum": True}, "s.minimum: must be a number"),
    (False, "s: allows no value"),
    (5, "s: must be a schema"),
]


@pytest.mark.parametrize("schema", FOLLOWED)
def test_followed(schema: dict[str, Any]) -> None:
    assert to_grammar(schema, "s").startswith("root ::= ")


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as got:
        to_grammar(schema, "s")
    assert got.value.message.startswith(message)
    assert got.value.param == "s"


def root(schema: Any) -> str:
    """Without what keeps alternatives apart."""
    return to_grammar(schema, "s").splitlines()[0].removeprefix("root ::= ").replace("apart ", "")


def test_properties_in_their_order() -> None:
    two = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    a, b = r'("\u0022a\u0022" colon "null")', r'("\u0022b\u0022" colon "null")'

    def rules(*required: str) -> list[str]:
        return to_grammar({**two, "required": list(required)}, "s").splitlines()[:2]

    assert rules("b", "a") == [f'root ::= ("{{" ({a} (comma members0)) "}}")', f"members0 ::= {b}"]
    assert rules("a") == [f'root ::= ("{{" ({a} ((comma members0)?)) "}}")', f"members0 ::= {b}"]
    assert rules("b") == [f'root ::= ("{{" (apart ({a} (comma members0)) | apart members0) "}}")', f"members0 ::= {b}"]
    all_or_none = f"((apart ({a} ((comma members0)?)) | apart members0)?)"
    assert rules() == [f'root ::= ("{{" {all_or_none} "}}")', f"members0 ::= {b}"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"minimum": 0, "maximum": 99}, '("0" | [1-9] | ([1-9] [0-9]))'),
        ({"minimum": 7, "maximum": 7}, '"7"'),
        ({"minimum": -3, "exclusiveMaximum": 0}, r'("\u002d" [1-3])'),
        ({"exclusiveMinimum": 18.5, "maximum": 21}, '(("1" "9") | ("2" [0-1]))'),
    ],
)
def test_integers(bounds: dict[str, float], text: str) -> None:
    assert root({"type": "integer", **bounds}) == text


def test_a_schema_as_large_as_a_request_may_hold() -> None:
    schema = {"properties": {f"name_{n}": {"type": "string"} for n in range(350)}}
    assert len(json.dumps(schema)) < 16 << 10
    assert len(to_grammar(schema, "s")) < grammars.MAX_BYTES


def as_regex(text: str) -> str:
    """An expression of a grammar as Python writes it; comma and colon without their spaces."""
    text = text.replace("comma", '","').replace("colon", '":"').replace("apart ", "")
    parts = re.findall(r'"[^"]*"|\[[^]]*\]|[()|?*+]|\{[0-9,]+\}|\s', text)
    assert "".join(parts) == text
    return "".join(f"(?:{re.escape(json.loads(part))})" if part[0] == '"' else part.strip() for part in parts)


_BOUNDS = st.integers(-1200, 1200)


def within(schema: dict[str, Any], value: Decimal) -> bool:
    checks = {"minimum": value.__ge__, "maximum": value.__le__}
    checks |= {"exclusiveMinimum": value.__gt__, "exclusiveMaximum": value.__lt__}
    return all(checks[keyword](bound) for keyword, bound in schema.items() if keyword in checks)


@given(
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), _BOUNDS, min_size=1
    ),
    _BOUNDS,
    st.integers(0, 999_999),
)
def test_bounds(bounds: dict[str, int], whole: int, decimals: int) -> None:
    try:
        patterns = {name: as_regex(root({"type": name, **bounds})) for name in ("integer", "number")}
    except InvalidRequestError:
        assume(False)
    for value in (whole, *bounds.values()):
        is_within = within(bounds, Decimal(value))
        assert (re.fullmatch(patterns["integer"], str(value)) is not None) == is_within
        assert (re.fullmatch(patterns["number"], str(value)) is not None) == is_within
    text = f"{whole}.{decimals:06}".rstrip("0").removesuffix(".")
    is_written = re.fullmatch(patterns["number"], text) is not None
    assert is_written == within(bounds, Decimal(text)) or Decimal(text) == 0


@pytest.mark.parametrize(
    ("key", "is_free"),
    [("", False), ("a", False), ("abc", False), ("é", False), ("b", True), ("ab", True), ("abcd", True), ("aé", True)],
)
def test_a_further_property_has_a_name_of_its_own(key: str, is_free: bool) -> None:
    names = {name: {"type": "null"} for name in ("", "a", "abc", "é", '"')}
    grammar = to_grammar({"properties": names, "additionalProperties": {"type": "boolean"}}, "s")
    rules = dict(line.split(" ::= ") for line in grammar.splitlines())
    others = re.sub(r"class\d+", lambda match: rules[match[0]], rules["members0"])
    assert (re.fullmatch(as_regex(others), f'"{key}":true') is not None) == is_free


_NAMES = st.sampled_from(["a", "b", "type", "$defs", "x/y", "", "\ud800"])
_VALUES = st.none() | st.booleans() | st.floats() | st.integers(-3, 5000) | _NAMES | st.just("#/$defs/a")
_KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "$ref", "$defs", "anyOf", "oneOf", "properties", "required", "additionalProperties"),
        *("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum"),
        *("maximum", "exclusiveMinimum", "exclusiveMaximum", "title"),
    ]
)
_ANYTHING = st.recursive(
    _VALUES | st.sampled_from(["string", "object", "integer", "number", "array"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYWORDS | _NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(_KEYWORDS, _ANYTHING, max_size=5))
def test_anything_is_taken_or_refused(schema: dict[str, Any]) -> None:
    try:
        grammar = to_grammar(schema, "s")
    except InvalidRequestError as error:
        assert error.message.startswith("s")
    else:
        assert grammar.isascii()
