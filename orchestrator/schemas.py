"""JSON schemas as grammars. What a grammar here cannot say is refused with its place: the text follows all the rest.

xgrammar has a converter of its own, which skips what it does not know and lets white space run to the token limit. So
we write the grammar, in which every object is on one line: a space may follow a comma or a colon, and none stands
elsewhere. The texts are some of those that the schema allows, not all: properties come in the schema's order, an object
with `properties` has others only where `additionalProperties` says so, a string writes a character in one way, a
pattern matches as a whole, a number has up to 15 digits.
"""

from __future__ import annotations

import graphlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from orchestrator import regexes
from orchestrator.errors import InvalidRequestError
from orchestrator.grammars import (
    EMPTY,
    MAX_BYTES,
    TEXT,
    GrammarError,
    Part,
    Ranges,
    common,
    either,
    literal,
    one_of,
    optional,
    render,
    repeat,
    sequence,
    without,
)

# Followed, by the type of value that each is about.
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Each says all that there is to say about a value; only `type` may stand beside the last two.
_WHOLE = ("$ref", "anyOf", "oneOf", "const", "enum")
_DEFINITIONS = ("$defs", "definitions")
# They say nothing about what is valid.
_NOTES = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$anchor", *_DEFINITIONS),
    }
)
_KEYWORDS = _NOTES.union({"type"}, _WHOLE, *_OF_TYPE.values())
# Common formats as patterns, some narrower than their standards. February has 28 days, an hour 60 whole minutes.
_DATE = (
    r"[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
    r"02-(?:0[1-9]|1\d|2[0-8]))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?"
_BYTE = r"(?:\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": _DATE + "T" + _TIME,
    "duration": (
        r"P(?:\d{1,4}W|\d{1,4}D(?:T\d{1,4}H)?|"
        r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S))"
    ),
    "email": rf"[a-zA-Z0-9_+-]{{1,20}}(?:\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"https?://{_LABEL}(?:\.{_LABEL}){{0,4}}(?::[1-9]\d{{0,3}})?(?:/[a-zA-Z0-9._~-]*)*",
}
# A whole number of so many digits is the same in every reader's double.
MAX_DIGITS = 15
# Bounds of a number that may have decimals, six of them: so many digits are exact together.
MAX_DECIMALS = 6
_BOUND = 10**9
# Of a property, in characters.
MAX_NAME = 128
MAX_PREFIX = 64
# Each is compared with each.
MAX_ONE_OF = 32

_ESCAPES = {0x9: "t", 0xA: "n", 0xD: "r", 0x22: '"', 0x5C: "\\"}
_UNESCAPED: Ranges = without(TEXT, [(code, code) for code in _ESCAPES])
_COMMA, _COLON = Part("comma", 1), Part("colon", 1)
_ANY, _STRING, _NUMBER, _CHARACTER = Part("any", 1), Part("string", 1), Part("number", 1), Part("character", 1)
_DIGIT, _NOT_ZERO = Part("[0-9]", 1), Part("[1-9]", 1)
_DECIMALS = Part('("." [0-9]{1,15})?', MAX_DIGITS)
_EXPONENT = Part("([eE] [+\\-]? [0-9]{1,2})?", 2)


class _PlacedError(GrammarError):
    """A `GrammarError` whose text begins with the place in the schema."""


def check_schema(schema: Any, param: str) -> None:
    """Raise as `to_grammar` does."""
    to_grammar(schema, param)


def to_grammar(schema: Any, param: str) -> str:
    """The grammar of JSON texts that `schema` allows; whitespace is a space after a comma or a colon, or none.

    Raises `InvalidRequestError` naming `param`, with the place in the schema of what would not be followed.
    """
    try:
        return _Converter(schema).convert(param)
    except GrammarError as error:
        raise InvalidRequestError(str(error), param=param) from error
    except RecursionError:
        raise InvalidRequestError(f"{param}: nests too deep; make it simpler", param=param) from None


class _Converter:
    """One schema's rules; what is referred to becomes a rule of its own."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of the rules, by reference
        self._targets: dict[str, Any] = {}  # schemas by reference
        self._leads_to: dict[str, set[str]] = {}  # references to those that they stand for, with no value between
        self._one_ofs: list[tuple[list[Any], str]] = []  # looked at when all that they refer to is known to be sound

    def convert(self, param: str) -> str:
        root = self._value(self._root, param, "")
        try:
            graphlib.TopologicalSorter(self._leads_to).prepare()
        except graphlib.CycleError as error:
            raise _PlacedError(f"{param}: {error.args[1][0]} leads back to itself without a value between") from None
        self._check_ends(param)
        for options, where in self._one_ofs:
            self._check_disjoint(options, where)
        grammar = render({"root": root.text, **self._rules}, _BASIC_RULES)
        if len(grammar) > MAX_BYTES:
            raise _PlacedError(f"{param}: needs a grammar of {len(grammar)} bytes; at most {MAX_BYTES} are allowed")
        return grammar

    def _value(self, schema: Any, path: str, inside: str) -> Part:
        """A value of `schema`; `inside` is the reference that stands for just this value, or empty."""
        if schema is True:
            return _ANY
        if schema is False:
            raise _PlacedError(f"{path}: allows no value; leave it out")
        if not isinstance(schema, dict):
            raise _PlacedError(f"{path}: must be a schema, an object or a bool")
        for keyword in schema:
            if keyword in _DEFINITIONS and not isinstance(schema[keyword], dict):
                raise _PlacedError(f"{path}.{keyword}: must be an object, a schema for each name")
            if keyword not in _KEYWORDS:
                raise _PlacedError(f"{path}.{keyword[:80]}: guided decoding does not follow this keyword; leave it out")
        whole = [keyword for keyword in _WHOLE if keyword in schema]
        if not whole:
            return self._typed(schema, path)
        keyword, where = whole[0], f"{path}.{whole[0]}"
        may_stand_beside = {keyword, "type"} if keyword in ("const", "enum") else {keyword}
        for other in schema:
            if other not in may_stand_beside and other not in _NOTES:
                raise _PlacedError(f"{path}.{other}: is not followed beside {keyword}; write both into one schema")
        if keyword == "$ref":
            return self._reference(schema[keyword], where, inside)
        if keyword in ("const", "enum"):
            return self._listed(schema, keyword, path)
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise _PlacedError(f"{where}: must be a list of schemas, one or more")
        if keyword == "oneOf":
            self._one_ofs.append((options, where))
        return _at(where, lambda: either(self._value(each, f"{where}[{n}]", inside) for n, each in enumerate(options)))

    # --- references ------------------------------------------------------------------------------------------

    def _find(self, reference: Any, where: str) -> Any:
        """What ``#/$defs/Name`` or ``#/definitions/Name`` (or something in it) refers to."""
        parts = reference.split("/") if isinstance(reference, str) else []
        target: Any = self._root if len(parts) > 2 and parts[0] == "#" and parts[1] in _DEFINITIONS else None
        for part in parts[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if target is None:
            raise _PlacedError(f"{where}: {str(reference)[:80]!r} leads nowhere; '#/$defs/Name' does")
        return target

    def _reference(self, reference: Any, where: str, inside: str) -> Part:
        target = self._find(reference, where)
        if inside:
            self._leads_to.setdefault(inside, set()).add(reference)
        if reference not in self._names:
            self._names[reference] = name = f"ref{len(self._names)}"
            self._targets[reference] = target
            self._rules[name] = self._value(target, f"{where}({reference[:80]})", reference).text
        return Part(self._names[reference], 1)

    def _check_ends(self, param: str) -> None:
        """Raise for a schema whose values have no end, as an object that requires one of its own kind."""
        ending: set[str] = set()
        while new := {name for name in self._targets.keys() - ending if _ends(self._targets[name], ending)}:
            ending |= new
        for name in self._targets.keys() - ending:
            raise _PlacedError(f"{param}: a value of {name[:80]} never ends; let it do without another of its kind")
        if not _ends(self._root, ending):
            raise _PlacedError(f"{param}: a value never ends")

    def _name(self, part: Part, kind: str) -> Part:
        """A rule for `part`, so that it is not written out in each place; what is short stays as it is."""
        if part.size <= 1:
            return part
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = part.text
        return Part(name, 1)

    # --- listed values, alternatives -------------------------------------------------------------------------

    def _listed(self, schema: dict[str, Any], keyword: str, path: str) -> Part:
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise _PlacedError(f"{path}.enum: must be a list of one or more values")
        types = _types(schema, path) if "type" in schema else _TYPES
        for value in values:
            if not _type_of(value) & set(types):
                raise _PlacedError(f"{path}.{keyword}: {_shorten(value)} is not of type {' or '.join(types)}")
        return _at(f"{path}.{keyword}", lambda: either(map(_json, values)))

    def _check_disjoint(self, options: list[Any], where: str) -> None:
        """Raise unless a value can match one of them only, which is told by their types, values or one property."""
        if len(options) > MAX_ONE_OF:
            raise _PlacedError(f"{where}: {len(options)} schemas; at most {MAX_ONE_OF} are compared, use anyOf")
        contents = [self._content(each, where) for each in options]
        for (m, one), (n, other) in itertools.combinations(enumerate(contents), 2):
            if not one.is_disjoint(other):
                raise _PlacedError(
                    f"{where}: a value may match both [{m}] and [{n}]; use anyOf, or a required property with a const"
                )

    def _content(self, schema: Any, where: str) -> _Content:
        for _ in range(len(self._targets)):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._find(schema["$ref"], where)
        if not isinstance(schema, dict):
            return _Content(None, None, {})
        properties = schema.get("properties", {})
        tags = {name: _values(properties[name]) for name in schema.get("required", ()) if name in properties}
        listed = _values(schema)
        if listed is not None:
            return _Content(frozenset().union(*listed.values()), frozenset(listed), {})
        types = None
        if "type" in schema:
            types = frozenset("number" if name == "integer" else name for name in _as_list(schema["type"]))
        return _Content(types, None, {name: frozenset(values) for name, values in tags.items() if values is not None})

    # --- values of a type ------------------------------------------------------------------------------------

    def _typed(self, schema: dict[str, Any], path: str) -> Part:
        spoken_of = [name for name, keywords in _OF_TYPE.items() if not keywords.isdisjoint(schema)]
        types = _types(schema, path) if "type" in schema else spoken_of
        for name in spoken_of:
            if name not in types and not (name == "number" and "integer" in types):
                keyword = next(each for each in schema if each in _OF_TYPE[name])
                raise _PlacedError(f"{path}.{keyword}: says nothing about type {' or '.join(types)}; leave it out")
        write: Mapping[str, Callable[[], Part]] = {
            "object": lambda: self._object(schema, path),
            "array": lambda: self._array(schema, path),
            "string": lambda: _string(schema, path),
            "number": lambda: _number(*_bounds(schema, path)),
            "integer": lambda: _integer(*_bounds(schema, path)),
            "boolean": lambda: Part('("true" | "false")', 1),
            "null": lambda: Part('"null"', 1),
        }
        return _at(path, lambda: either(write[name]() for name in types)) if types else _ANY

    def _object(self, schema: dict[str, Any], path: str) -> Part:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise _PlacedError(f"{path}.properties: must be an object, a schema for each name")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _PlacedError(f"{path}.required: must be a list of names")
        others = schema.get("additionalProperties", not (properties or required))
        more = schema.get("additionalProperties", True)
        members: list[tuple[Part, bool]] = []
        for name, each in {**properties, **{name: more for name in required if name not in properties}}.items():
            where = f"{path}.properties.{name[:80]}" if name in properties else f"{path}.required.{name[:80]}"
            if len(name) > MAX_NAME:
                raise _PlacedError(f"{where}: a name of {len(name)} characters; at most {MAX_NAME} are allowed")
            if each is False and name not in required:
                continue  # it must not be there
            member = _at(where, lambda: sequence([_json(name), _COLON, self._value(each, where, "")]))  # noqa: B023
            members.append((member, name in required))
        if others is not False:
            value = self._value(others, f"{path}.additionalProperties", "")
            key = _key_beside({*properties, *required})
            members.append((sequence([key, _COLON, value]), False))
        return _at(path, lambda: self._members(members, others is not False))

    def _members(self, members: list[tuple[Part, bool]], has_others: bool) -> Part:
        """The members, each with whether it is required, in order; the last any number of times with `has_others`."""
        # The members from one on that are there. Each of these is a rule, which has the comma before it in one place:
        # of 150 optional properties it compiles in 30 ms, and in 1,700 ms if each place spells all that may follow.
        rest, may_be_empty = EMPTY, True
        for index, (member, is_required) in reversed(list(enumerate(members))):
            if has_others and index == len(members) - 1:
                rest = sequence([member, repeat(sequence([_COMMA, member]), 0, None)])
                continue
            rest = self._name(rest, "members")
            after = sequence([_COMMA, rest]) if rest is not EMPTY else EMPTY
            begun = sequence([member, optional(after) if may_be_empty else after])
            rest = begun if is_required or rest is EMPTY else either([begun, rest])
            may_be_empty = may_be_empty and not is_required
        return sequence([literal("{"), optional(rest) if may_be_empty else rest, literal("}")])

    def _array(self, schema: dict[str, Any], path: str) -> Part:
        first = schema.get("prefixItems", [])
        if "prefixItems" in schema and (not isinstance(first, list) or not 1 <= len(first) <= MAX_PREFIX):
            raise _PlacedError(f"{path}.prefixItems: must be a list of 1 to {MAX_PREFIX} schemas")
        # Like an object with properties, an array with prefixItems has others only when the schema speaks of them.
        other = schema.get("items", not first)
        low, high = _counts(schema, "minItems", "maxItems", path)
        if other is False:
            high = len(first) if high is None else min(high, len(first))
            if low > high:
                raise _PlacedError(f"{path}.minItems: {low}, but items and prefixItems allow {high} at most")
        items = [self._value(each, f"{path}.prefixItems[{n}]", "") for n, each in enumerate(first)][:high]
        rest = EMPTY
        if other is not False and high != 0:
            item = self._name(self._value(other, f"{path}.items", ""), "item")
            if not items:
                items.append(item)
            more = None if high is None else high - len(items)
            rest = _at(path, lambda: repeat(sequence([_COMMA, item]), max(0, low - len(items)), more))
        for index in range(len(items) - 1, -1, -1):
            rest = sequence([*([_COMMA] if index else []), items[index], rest])
            rest = rest if index < low else optional(rest)
        return sequence([literal("["), rest, literal("]")])


_T = TypeVar("_T")


def _at(where: str, write: Callable[[], _T]) -> _T:
    """What `write` returns; what it raises without a place gets this one."""
    try:
        return write()
    except _PlacedError:
        raise
    except GrammarError as error:
        raise _PlacedError(f"{where}: {error}") from error


def _spell(ranges: Ranges) -> Part:
    """One character of these, as a JSON string has it."""
    parts = [one_of(plain)] if (plain := common(_UNESCAPED, ranges)) else []
    escaped = [code for code in _ESCAPES if common(ranges, ((code, code),))]
    if not parts and not escaped:
        return one_of(())
    # The escapes begin alike, and have two characters: none goes on where another ends.
    return either(parts + [literal("\\" + _ESCAPES[code]) for code in escaped], begin_apart=True)


def _json(value: Any) -> Part:
    try:
        return literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    except GrammarError:
        raise
    except ValueError:
        raise GrammarError("holds NaN or Infinity, which JSON has not; leave it out") from None


# --- the rest of an object, an array and a string -------------------------------------------------------------------


def _key_beside(names: set[str]) -> Part:
    """A property's name that is none of `names`; it has no escapes, so that there is one way to write it."""

    def rest(tails: set[str]) -> list[Part]:
        if not tails:
            return [sequence([repeat(one_of(_UNESCAPED), 0, None), literal('"')])]
        heads = {tail[0] for tail in tails if tail}
        excluded = [(ord(head), ord(head)) for head in sorted(heads)]
        ways = [sequence([one_of(without(_UNESCAPED, excluded)), *rest(set())])]
        for head, code in zip(sorted(heads), excluded, strict=True):
            if common(_UNESCAPED, (code,)):
                ways.append(sequence([literal(head), either(rest({tail[1:] for tail in tails if tail[:1] == head}))]))
        return ways if "" in tails else [*ways, literal('"')]

    return sequence([literal('"'), either(rest(names))])


def _string(schema: dict[str, Any], path: str) -> Part:
    low, high = _counts(schema, "minLength", "maxLength", path)
    given = [keyword for keyword in ("pattern", "format") if keyword in schema]
    if not given:
        return _STRING if (low, high) == (0, None) else _quoted(repeat(_CHARACTER, low, high))
    if len(given) == 2:
        raise _PlacedError(f"{path}.format: is not followed beside pattern; leave one of them out")
    keyword, where = given[0], f"{path}.{given[0]}"
    text = schema[keyword]
    if not isinstance(text, str):
        raise _PlacedError(f"{where}: must be a string")
    if keyword == "format" and text not in FORMATS:
        raise _PlacedError(f"{where}: {text[:80]!r} is not followed; one of {', '.join(FORMATS)}, or leave it out")
    matching = _at(where, lambda: regexes.parse(FORMATS[text] if keyword == "format" else text, _spell))
    if low > matching.min_length:
        raise _PlacedError(f"{path}.minLength: {keyword} allows shorter texts; say in it how long they are")
    if high is not None and high < matching.max_length:
        raise _PlacedError(f"{path}.maxLength: {keyword} allows longer texts; say in it how long they are")
    return _quoted(matching.part)


def _quoted(part: Part) -> Part:
    return sequence([literal('"'), part, literal('"')])


def _counts(schema: dict[str, Any], low_keyword: str, high_keyword: str, path: str) -> tuple[int, int | None]:
    for keyword in (low_keyword, high_keyword):
        value = schema.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or value % 1 != 0:
            raise _PlacedError(f"{path}.{keyword}: must be a whole number, 0 or more")
    low = int(schema.get(low_keyword, 0))
    high = int(schema[high_keyword]) if high_keyword in schema else None
    if high is not None and low > high:
        raise _PlacedError(f"{path}.{low_keyword}: {low} is more than {high_keyword}, {high}")
    return low, high


# --- numbers ---------------------------------------------------------------------------------------------------------


def _bounds(schema: dict[str, Any], path: str) -> tuple[Any, ...]:
    """``(low, high, low is excluded, high is excluded, path)``, None for no bound."""
    found: list[tuple[Any, bool]] = []
    for keyword, exclusive, tighter in (
        ("minimum", "exclusiveMinimum", max),
        ("maximum", "exclusiveMaximum", min),
    ):
        for each in (keyword, exclusive):
            value = schema.get(each, 0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _BOUND:
                raise _PlacedError(f"{path}.{each}: must be a number from {-_BOUND} to {_BOUND}")
        given = [schema[each] for each in (keyword, exclusive) if each in schema]
        bound = tighter(given) if given else None
        found.append((bound, exclusive in schema and schema[exclusive] == bound))
    (low, excludes_low), (high, excludes_high) = found
    if low is not None and high is not None and (low > high or (low == high and (excludes_low or excludes_high))):
        raise _PlacedError(f"{path}: no number lies between its bounds")
    return low, high, excludes_low, excludes_high, path


def _integer(low: Any, high: Any, excludes_low: bool, excludes_high: bool, path: str) -> Part:
    if low is not None:
        low = math.floor(low) + 1 if excludes_low else math.ceil(low)
    if high is not None:
        high = math.ceil(high) - 1 if excludes_high else math.floor(high)
    if low is not None and high is not None and low > high:
        raise _PlacedError(f"{path}: no integer lies between its bounds")
    ways = []
    if low is None or low < 0:
        most = None if low is None else -low
        ways.append(sequence([literal("-"), _digits(1 if high is None or high >= 0 else -high, most)]))
    if high is None or high >= 0:
        ways.append(_digits(0 if low is None or low < 0 else low, high))
    return either(ways)


def _digits(low: int, high: int | None) -> Part:
    """The whole numbers from `low`, 0 or more, to `high`."""
    ways = [literal("0")] if low == 0 else []
    low = max(low, 1)
    last = 10**MAX_DIGITS - 1 if high is None else high
    while low <= last:
        length = len(str(low))
        end = min(last, 10**length - 1)
        if low == 10 ** (length - 1) and high is None:  # the longer ones are all there
            ways.append(sequence([_NOT_ZERO, repeat(_DIGIT, length - 1, MAX_DIGITS - 1)]))
            break
        ways.append(_between(str(low), str(end)))
        low = end + 1
    return either(ways)


def _between(low: str, high: str) -> Part:
    """The numbers from `low` to `high`, which have as many digits."""
    if low == high:
        return literal(low)
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(_DIGIT, len(low), len(low))
    rest = len(low) - 1
    first, last = ord(low[0]), ord(high[0])
    if first == last:
        return sequence([literal(low[0]), _between(low[1:], high[1:])])
    ways = []
    if rest and set(low[1:]) != {"0"}:
        ways.append(sequence([literal(low[0]), _between(low[1:], "9" * rest)]))
        first += 1
    if rest and set(high[1:]) != {"9"}:
        ways.append(sequence([literal(high[0]), _between("0" * rest, high[1:])]))
        last -= 1
    if first <= last:
        ways.append(sequence([one_of([(first, last)]), repeat(_DIGIT, rest, rest)]))
    return either(ways)


def _number(low: Any, high: Any, excludes_low: bool, excludes_high: bool, path: str) -> Part:
    if low is None and high is None:
        return _NUMBER
    for bound in (low, high):
        if bound is not None and bound % 1 != 0:
            raise _PlacedError(f"{path}: {bound} as the bound of a number is not followed; take a whole number")
    ways = []
    if low is None or low < 0:
        least, excludes_least = (0, False) if high is None or high > 0 else (-int(high), excludes_high)
        most = None if low is None else -int(low)
        ways.append(sequence([literal("-"), _decimals(least, most, excludes_least, excludes_low)]))
    if high is None or high > 0 or (high == 0 and not excludes_high):
        least, excludes_least = (0, False) if low is None or low < 0 else (int(low), excludes_low)
        ways.append(_decimals(least, None if high is None else int(high), excludes_least, excludes_high))
    return either(ways)


def _decimals(low: int, high: int | None, excludes_low: bool, excludes_high: bool) -> Part:
    """The numbers from `low`, 0 or more, to `high`, with up to MAX_DECIMALS decimals."""
    if low == high:
        return literal(str(low))
    ways = []
    if excludes_low:
        some = [
            sequence([literal("." + "0" * n), _NOT_ZERO, repeat(_DIGIT, 0, MAX_DECIMALS - 1 - n)])
            for n in range(MAX_DECIMALS)
        ]
        ways.append(sequence([literal(str(low)), either(some)]))
    first, last = low + excludes_low, _BOUND if high is None else high - 1
    if first <= last:
        decimals = sequence([literal("."), repeat(_DIGIT, 1, MAX_DECIMALS)])
        ways.append(sequence([_digits(first, last), optional(decimals)]))
    if high is not None and not excludes_high:
        ways.append(literal(str(high)))
    return either(ways)


# --- what a schema says, without converting it -----------------------------------------------------------------------


def _types(schema: dict[str, Any], path: str) -> list[str]:
    given = schema["type"]
    types = given if isinstance(given, list) else [given]
    if not types or not all(isinstance(name, str) and name in _TYPES for name in types):
        raise _PlacedError(f"{path}.type: {_shorten(given)}; must be one or a list of {', '.join(_TYPES)}")
    return list(dict.fromkeys(types))


def _type_of(value: Any) -> set[str]:
    """The types that a value has: 1 is an integer and a number."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if value % 1 == 0 else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


class _Content(NamedTuple):
    """What a schema says of its values: their types, all of them, some properties' values; None when it does not."""

    types: frozenset[str] | None
    values: frozenset[str] | None
    tags: dict[str, frozenset[str]]

    def is_disjoint(self, other: _Content) -> bool:
        if self.values is not None and other.values is not None:
            return self.values.isdisjoint(other.values)
        if self.types is None or other.types is None:
            return False
        if self.types.isdisjoint(other.types):
            return True
        return self.types | other.types == {"object"} and any(
            values.isdisjoint(other.tags[name]) for name, values in self.tags.items() if name in other.tags
        )


def _values(schema: Any) -> dict[str, set[str]] | None:
    """All values of `schema`, as JSON compares them, and their types; None when it does not list them."""
    if not isinstance(schema, dict) or not ("const" in schema or "enum" in schema):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return {json.dumps(_normal(value), sort_keys=True): _type_of(value) - {"integer"} for value in values}


def _normal(value: Any) -> Any:
    """With one way to write each number: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return {name: _normal(each) for name, each in value.items()} if isinstance(value, dict) else value


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether it has a value of finite length, when those references that are `ending` have."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"] in ending
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return any(_ends(each, ending) for each in schema[keyword])
    if "type" in schema and not {"object", "array"}.issuperset(_as_list(schema["type"])):
        return True
    return all(_ends(each, ending) for each in _needed(schema))


def _needed(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that each object and each array of `schema` has a value of."""
    properties = schema.get("properties", {})
    yield from (properties.get(name, schema.get("additionalProperties", True)) for name in schema.get("required", ()))
    low, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    yield from first[: int(low)]
    if low > len(first):
        yield schema.get("items", True)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:80] + "..."


_BASIC_RULES = {
    "comma": '"," " "?',
    "colon": '":" " "?',
    "character": _spell(TEXT).text,
    "string": r'"\"" character* "\""',
    "number": sequence([optional(literal("-")), _digits(0, None), _DECIMALS, _EXPONENT]).text,
    "object": '"{" (string colon any (comma string colon any)*)? "}"',
    "array": '"[" (any (comma any)*)? "]"',
    "any": 'object | array | string | number | "true" | "false" | "null"',
}
