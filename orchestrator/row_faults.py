"""What pydantic finds wrong with a table, for who wrote it: key, what is allowed, and the value that came."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

MAX_VALUE_CHARS = 80


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> list[str]:
    """One line for each fault; of an unknown key also the nearest known ones, where `model`, the whole, is given."""
    lines = []
    for fault in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text = f"no such key{_known_keys(model, fault['loc'])}"
        lines.append(f"{key}: {text}{_given(fault['type'], fault['input'])}")
    return lines


def _given(kind: str, value: object) -> str:
    """Nothing where the text says it: a check of a whole table names what it found."""
    if kind == "missing" or (kind == "value_error" and isinstance(value, (dict, list))):
        return ""
    text = repr(value)
    return f" (got {text if len(text) <= MAX_VALUE_CHARS else f'{text[:MAX_VALUE_CHARS]}…'})"


def _known_keys(model: type[BaseModel] | None, loc: tuple[int | str, ...]) -> str:
    if model is None:
        return ""
    schema = model.model_json_schema()
    node: dict[str, Any] | None = schema
    for part in loc[:-1]:
        node = None if node is None else _find_part(schema, node, part)
    known = [] if node is None else _list_keys(schema, node)
    near = difflib.get_close_matches(str(loc[-1]), known)
    if near:
        return f"; is it {' or '.join(near)}?"
    return f"; allowed: {', '.join(known)}" if known else ""


def _list_keys(schema: dict[str, Any], node: dict[str, Any]) -> list[str]:
    """Of a table, also where there may be none."""
    node = _resolve(schema, node)
    keys = list(node.get("properties", {}))
    return keys + [key for each in node.get("anyOf", ()) for key in _list_keys(schema, each)]


def _find_part(schema: dict[str, Any], node: dict[str, Any], part: int | str) -> dict[str, Any] | None:
    """The schema of what is at `part` of a table, a list, or a union, of which pydantic tells the tag or the class."""
    node = _resolve(schema, node)
    tagged = node.get("discriminator", {}).get("mapping", {}).get(part)
    if tagged is not None:
        return {"$ref": tagged} if isinstance(tagged, str) else dict(tagged)
    if part in node.get("properties", {}):
        return dict(node["properties"][part])
    for each in (node.get("additionalProperties"), *node.get("patternProperties", {}).values(), node.get("items")):
        if isinstance(each, dict):
            return dict(each)
    found = (_find_part(schema, each, part) for each in node.get("anyOf", ()))
    return next((each for each in found if each is not None), None)


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    name = node.get("$ref", "").rpartition("/")[2]
    return dict(schema["$defs"][name]) if name else node
