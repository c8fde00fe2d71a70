"""Regular expressions as grammars: the part of Python's syntax that says which texts match as a whole, and no more.

What else it has (anchors inside, lookaround, references back, flags, possessive and atomic groups) is refused. Where
Python and ECMAScript, whose patterns JSON schemas hold, mean different characters, those are taken that both mean:
``\\d`` and ``\\w`` are ASCII's, ``.`` is no line break of either. Lazy counts match what greedy ones do.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from orchestrator.errors import InvalidRequestError
from orchestrator.grammars import (
    TEXT,
    GrammarError,
    Part,
    Ranges,
    common,
    either,
    one_of,
    render,
    repeat,
    sequence,
    without,
)

# Python's own parser, so that a text means here what it means there.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

# Groups within groups.
MAX_DEPTH = 32

_ALL: Ranges = ((0, 0x10FFFF),)
_ASCII: Ranges = ((0, 0x7F),)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x9, 0xD), (0x20, 0x20))
# Those of Python (str.isspace) and of ECMAScript (WhiteSpace and LineTerminator) together.
_ALL_SPACES: Ranges = (
    *((0x9, 0xD), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_NO_LINE_BREAKS: Ranges = without(TEXT, ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)))
_NOT_ASCII = without(_ALL, _ASCII)
# A class of characters: what both languages mean by it, and what either does, which is what [^...] has to leave out.
_CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "CATEGORY_DIGIT": (_DIGITS, (*_DIGITS, *_NOT_ASCII)),
    "CATEGORY_NOT_DIGIT": (without(_ASCII, _DIGITS), without(_ALL, _DIGITS)),
    "CATEGORY_WORD": (_WORDS, (*_WORDS, *_NOT_ASCII)),
    "CATEGORY_NOT_WORD": (without(_ASCII, _WORDS), without(_ALL, _WORDS)),
    "CATEGORY_SPACE": (_SPACES, _ALL_SPACES),
    "CATEGORY_NOT_SPACE": (without(_ALL, _ALL_SPACES), without(_ALL, _SPACES)),
}
_STARTS = {"AT_BEGINNING", "AT_BEGINNING_STRING"}
_ENDS = {"AT_END", "AT_END_STRING"}
_NOT_FOLLOWED = {
    "AT": "an anchor that is not at the start or the end",
    "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround",
    "GROUPREF": "a reference back to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive count",
}


class Matching(NamedTuple):
    """What matches, and how many characters it has at least and at most (or more than any text has)."""

    part: Part
    min_length: int
    max_length: int


def check_regex(regex: str, param: str) -> None:
    """Raise as `to_grammar` does."""
    to_grammar(regex, param)


def to_grammar(regex: str, param: str) -> str:
    """The grammar of the texts that `regex` matches as a whole; raises `InvalidRequestError` naming `param`."""
    try:
        return render({"root": parse(regex).part.text})
    except GrammarError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from error


def parse(regex: str, spell: Callable[[Ranges], Part] = one_of) -> Matching:
    """`regex` as part of a grammar; `spell` writes one character of those given. Raises `GrammarError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what a coming Python will read differently
            tree = _parser.parse(regex)
    except (re.error, OverflowError, FutureWarning, DeprecationWarning) as error:
        raise GrammarError(f"is no regular expression: {error}") from error
    except RecursionError:
        raise GrammarError(f"nests too deep; at most {MAX_DEPTH} groups within groups are allowed") from None
    if tree.state.flags & ~re.UNICODE:
        raise GrammarError("sets flags, which guided decoding does not follow; leave them out")
    return Matching(_sequence(_trim(tree), spell, 0), *tree.getwidth())


def _trim(tree: Iterable[Any]) -> list[Any]:
    """Without the anchors at both ends, which say nothing about a text that has to match as a whole."""
    nodes = list(tree)
    while nodes and _is_anchor(nodes[0], _STARTS):
        del nodes[0]
    while nodes and _is_anchor(nodes[-1], _ENDS):
        del nodes[-1]
    if len(nodes) == 1 and nodes[0][0].name == "BRANCH":
        return [(nodes[0][0], (None, [_trim(branch) for branch in nodes[0][1][1]]))]
    if len(nodes) == 1 and nodes[0][0].name == "SUBPATTERN":
        return [(nodes[0][0], (*nodes[0][1][:3], _trim(nodes[0][1][3])))]
    return nodes


def _is_anchor(node: Any, names: set[str]) -> bool:
    return bool(node[0].name == "AT" and node[1].name in names)


def _sequence(nodes: Iterable[Any], spell: Callable[[Ranges], Part], depth: int) -> Part:
    if depth > MAX_DEPTH:
        raise GrammarError(f"nests too deep; at most {MAX_DEPTH} groups within groups are allowed")
    return sequence(_node(operation.name, value, spell, depth) for operation, value in nodes)


def _node(operation: str, value: Any, spell: Callable[[Ranges], Part], depth: int) -> Part:
    if operation == "LITERAL":
        return spell(common(TEXT, ((value, value),)))
    if operation == "NOT_LITERAL":
        return spell(without(TEXT, ((value, value),)))
    if operation == "ANY":
        return spell(_NO_LINE_BREAKS)
    if operation == "IN":
        return spell(_members(value))
    if operation == "BRANCH":
        return either([_sequence(branch, spell, depth + 1) for branch in value[1]])
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, nodes = value
        return repeat(_sequence(nodes, spell, depth + 1), low, None if high == _parser.MAXREPEAT else high)
    if operation == "SUBPATTERN":
        _, added_flags, removed_flags, nodes = value
        if added_flags or removed_flags:
            raise GrammarError("sets flags, which guided decoding does not follow; leave them out")
        return _sequence(nodes, spell, depth + 1)
    what = _NOT_FOLLOWED.get(operation, operation.lower())
    raise GrammarError(f"has {what}, which guided decoding does not follow; leave it out")


def _members(items: list[Any]) -> list[tuple[int, int]]:
    """The characters of ``[...]``."""
    is_negated = items[0][0].name == "NEGATE"
    ranges: list[tuple[int, int]] = []
    for operation, value in items:
        if operation.name == "LITERAL":
            ranges.append((value, value))
        elif operation.name == "RANGE":
            ranges.append(value)
        elif operation.name == "CATEGORY":
            ranges += _CLASSES[value.name][is_negated]
    return without(TEXT, ranges) if is_negated else common(TEXT, ranges)
