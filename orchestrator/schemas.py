"""Which JSON schemas guided decoding follows: xgrammar, which all our engines use, skips what it does not know."""

from __future__ import annotations

from typing import Any

from orchestrator.errors import InvalidRequestError

# Hold a name for each schema.
_MAPS = {"properties", "$defs", "definitions"}
# Hold a list of schemas.
_LISTS = {"anyOf", "oneOf", "prefixItems"}
# Hold one schema, or a bool.
_SCHEMAS = {"items", "additionalProperties"}
# Followed, or saying nothing about what is valid.
_PLAIN = {
    *("type", "enum", "const", "required", "pattern", "format", "$ref", "minLength", "maxLength"),
    *("minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$anchor"),
}


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raises `InvalidRequestError` for a keyword that would be ignored, or a reference that leads nowhere new."""
    _check(schema, schema, param, param)


def _check(schema: Any, root: dict[str, Any], path: str, param: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{path}: must be a schema, an object or a bool", param=param)
    for keyword, value in schema.items():
        where = f"{path}.{keyword[:80]}"
        if keyword in _MAPS and isinstance(value, dict):
            for name, each in value.items():
                _check(each, root, f"{where}.{name[:80]}", param)
        elif keyword in _LISTS and isinstance(value, list):
            for index, each in enumerate(value):
                _check(each, root, f"{where}[{index}]", param)
        elif keyword in _SCHEMAS:
            _check(value, root, where, param)
        elif keyword == "$ref":
            _check_reference(value, root, where, param)
        elif keyword not in _PLAIN:
            raise InvalidRequestError(
                f"{where}: guided decoding does not follow this keyword; leave it out", param=param
            )


def _check_reference(reference: Any, root: dict[str, Any], where: str, param: str) -> None:
    """``#/$defs/Name`` and ``#/definitions/Name``, to something that is there."""
    parts = reference.split("/") if isinstance(reference, str) else []
    target: Any = root
    if len(parts) > 1 and parts[0] == "#":
        for part in parts[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        if target is not None:
            return
    raise InvalidRequestError(f"{where}: {str(reference)[:80]!r} leads nowhere; '#/$defs/Name' does", param=param)
