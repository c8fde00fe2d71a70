"""Parts of a grammar in xgrammar's EBNF, which all our engines use, each with the size that it has when unrolled."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Characters and values that a counted part stands for when its copies are written out, as xgrammar does.
MAX_SIZE = 4096
# Of a grammar.
MAX_BYTES = 64 << 10

Ranges = Sequence[tuple[int, int]]

# Code points that a text may hold, first and last of each run: neither control characters nor surrogates, which UTF-8
# cannot spell, nor the replacement character, which stands for what is no text.
TEXT: Ranges = ((0x9, 0xA), (0xD, 0xD), (0x20, 0x7E), (0xA0, 0xD7FF), (0xE000, 0xFFFC), (0xFFFE, 0x10FFFF))

# In UTF-8: the first code point that has so many bytes, and how many have the same first byte.
_WIDTHS = ((0, 0x80), (0x80, 0x40), (0x800, 0x1000), (0x10000, 0x40000), (0x110000, 0))

# The rule of nothing.
_APART = "apart"

# A class of characters beyond ASCII, with its count.
_WIDE_CLASS = re.compile(r"\[[^]]*\\(?:u(?!00[0-7])|U)[^]]*\](?:[*+?]|\{[0-9,]+\})?")


class GrammarError(ValueError):
    """What cannot be written as a grammar that an engine follows; the text says why and what helps."""


class Part(NamedTuple):
    """An expression that can stand anywhere in a rule, and its size."""

    text: str
    size: int


EMPTY = Part('""', 0)


def literal(text: str) -> Part:
    """Exactly `text`."""
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        raise GrammarError("holds half of a surrogate pair, which no text can hold; leave it out")
    return Part('"' + "".join(map(_escape, map(ord, text))) + '"', len(text)) if text else EMPTY


def one_of(ranges: Ranges) -> Part:
    """One character of these."""
    if not ranges:
        raise GrammarError("allows no character that a text can hold; leave it out")
    runs = [run for low, high in ranges for run in _split(low, high)]
    return Part("[" + "".join(_escape(a) if a == b else f"{_escape(a)}-{_escape(b)}" for a, b in runs) + "]", 1)


def sequence(parts: Iterable[Part]) -> Part:
    """One after the other."""
    parts = [part for part in parts if part is not EMPTY]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    return _limited(f"({' '.join(part.text for part in parts)})", sum(part.size for part in parts))


def either(parts: Iterable[Part], *, begin_apart: bool = False) -> Part:
    """One of them; with `begin_apart` none can go on where another ends, as far as they begin alike.

    Others are kept apart by an empty rule. xgrammar 0.1 joins what alternatives have in common at the beginning and at
    the end, which makes a loop where both meet: for ``"abcabc" | "abc"`` it takes the text "abcabcabc".
    """
    parts = list(dict.fromkeys(parts))
    if len(parts) == 1:
        return parts[0]
    texts = [part.text for part in parts]
    if not begin_apart and not all(part.size <= 1 and part.text[0] in '"[' for part in parts):
        texts = [f"{_APART} {text}" for text in texts]
    return _limited(f"({' | '.join(texts)})", sum(part.size for part in parts))


def repeat(part: Part, low: int, high: int | None) -> Part:
    """From `low` to `high` of them; any number from `low` on with None."""
    if high == 0 or part is EMPTY:
        return EMPTY
    if low == high == 1:
        return part
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    count = counts.get((low, high), f"{{{low},{'' if high is None else high}}}")
    size = part.size * max(1, low, high or 0)
    if size > max(MAX_SIZE, part.size):
        raise GrammarError(f"counts up to {size} characters or values; at most {MAX_SIZE} are allowed")
    return _limited(f"({part.text}{count})", size)


def optional(part: Part) -> Part:
    return repeat(part, 0, 1)


def without(ranges: Ranges, excluded: Ranges) -> list[tuple[int, int]]:
    """The characters of `ranges` that are not in `excluded`, in order."""
    left = sorted(ranges)
    for first, last in excluded:
        left = [
            run
            for low, high in left
            for run in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if run[0] <= run[1]
        ]
    return left


def common(ranges: Ranges, others: Ranges) -> list[tuple[int, int]]:
    """The characters that are in both."""
    return without(ranges, without([(0, 0x10FFFF)], others))


def render(rules: Mapping[str, str], more: Mapping[str, str] | None = None) -> str:
    """The grammar of these rules, root among them, and of `more`, which stay as they are.

    Each class of characters beyond ASCII gets a rule of its own, with its count. After another rule in a sequence
    xgrammar 0.1 misreads it as it looks ahead: for ``[a]+ [\\u4e00-\\u9fff] [a]`` it takes the token "ay".
    """
    classes: dict[str, str] = {}
    text = "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())
    text = _WIDE_CLASS.sub(lambda match: classes.setdefault(match[0], f"class{len(classes)}"), text)
    others = {name: rule for rule, name in classes.items()} | dict(more or {})
    text += "".join(f"{name} ::= {rule}\n" for name, rule in others.items())
    return f'{text}{_APART} ::= ""\n' if f"{_APART} " in text else text


def _split(first: int, last: int) -> list[tuple[int, int]]:
    """The range in pieces of which each holds all characters of some first bytes of UTF-8, or some of one.

    Ranges across them xgrammar 0.1 takes apart wrongly: it lets in bytes that are no UTF-8 and leaves characters out.
    """
    pieces = []
    for (start, step), (end, _) in itertools.pairwise(_WIDTHS):
        low, high = max(first, start), min(last, end - 1)
        if start == 0 and low <= high:
            pieces.append((low, high))
            continue
        while low <= high:
            if low % step == 0 and low + step <= high + 1:
                stop = (high + 1) // step * step - 1
            else:
                stop = min(high, low // step * step + step - 1)
            pieces.append((low, stop))
            low = stop + 1
    return pieces


def _limited(text: str, size: int) -> Part:
    if len(text) > MAX_BYTES:
        raise GrammarError(f"needs a grammar of {len(text)} bytes; at most {MAX_BYTES} are allowed, make it simpler")
    return Part(text, size)


def _escape(code: int) -> str:
    """A code point in a string or a class of characters; whatever has a meaning there becomes a number."""
    if 0x20 <= code < 0x7F and chr(code) not in '\\"[]^-':
        return chr(code)
    # Not \x, which takes all the hexadecimal digits that come.
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
