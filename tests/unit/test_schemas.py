"""A schema that would not be followed is refused, with the place of the keyword."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import InvalidRequestError
from orchestrator.schemas import check_schema

FOLLOWED: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"not": {"type": "string"}, "multipleOf": {"enum": [{"not": 1}]}}},
    {"anyOf": [{"type": "integer", "minimum": 1}, {"const": {"if": 1}}], "description": "x"},
    {"$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"},
    {"type": "object", "additionalProperties": False, "required": ["a"], "properties": {"a": True}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 1},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"multipleOf": 7}, "s.multipleOf: guided decoding does not follow"),
    ({"properties": {"a": {"uniqueItems": True}}}, "s.properties.a.uniqueItems: "),
    ({"anyOf": [{"allOf": []}]}, "s.anyOf[0].allOf: "),
    ({"items": {"not": {}}}, "s.items.not: "),
    ({"if": {}, "then": {}}, "s.if: "),
    ({"$ref": "#"}, "s.$ref: '#' leads nowhere"),
    ({"$ref": "http://example.com/x"}, "s.$ref: 'http://example.com/x' leads nowhere"),
    ({"$ref": "#/$defs/B", "$defs": {"A": {}}}, "s.$ref: '#/$defs/B' leads nowhere"),
    ({"$ref": 5}, "s.$ref: '5' leads nowhere"),
    ({"items": 5}, "s.items: must be a schema"),
    ({"properties": {"a": [1]}}, "s.properties.a: must be a schema"),
    ({"properties": 5}, "s.properties: guided decoding does not follow"),
]


@pytest.mark.parametrize("schema", FOLLOWED)
def test_followed(schema: dict[str, Any]) -> None:
    check_schema(schema, "s")


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as got:
        check_schema(schema, "s")
    assert got.value.message.startswith(message)
    assert got.value.param == "s"
