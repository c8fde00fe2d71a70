"""Cuts a text into sentences while it is still coming: what is spoken, or checked, a sentence at a time.

A full stop ends a sentence only if space and then something like a beginning follow: not in 3.14, 98.6°F, v1.2 or
example.com, not behind "Dr." or an initial, not in "e.g. this". Quotes and brackets that close right behind the mark
belong to the sentence. Pieces keep their spaces, so that joined they are the text; and however the text was dealt out,
the cuts are the same.
"""

from __future__ import annotations

import re

# A sentence that finds no end is cut: at its last comma or so, else between words, else anywhere.
MAX_CHARACTERS = 400
# How far behind a mark the cutter looks for a beginning. More closing marks or spaces in a row are no language.
_REACH = 32

_CLOSERS = "\"'”’»)]}」』）】*_`"
_OPENERS = "\"'“‘«([{「『（【*_`¿¡-–—•#"
_WIDE = "。！？｡"  # of scripts that put no space behind them
_MARK = re.compile(rf"[.!?…]+|[{_WIDE}]+|\n")
_CLAUSE = re.compile(r"[,;:—–，；：、]\s*|\s+[-–—]\s+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Behind these a full stop ends no sentence: titles, and what comes before an example.
_NEVER_LAST = _words(
    "mr mrs ms dr prof st sr jr gen col sgt capt lt rev hon gov messrs mme mlle hr sra srta dra lic vs al "
    "e.g i.e z.b d.h p.ej p.ex cf u.a"
)
# Behind these it ends none before a number.
_BEFORE_NUMBERS = _words("no nr art fig eq vol pp ca approx est tel ext")
# Behind these, and behind an initial, it ends one if the next word is one that sentences begin with.
_ABBREVIATIONS = _words(
    "etc inc ltd co corp bros dept univ a.m p.m u.s u.k u.n e.u d.c ph.d b.c a.d bzw usw jan feb mar apr jun jul "
    "aug sep sept oct nov dec min avg sec hrs ft lb lbs oz"
)
_BEGINNINGS = _words(
    "the a an this that these those he she it they we you i his her its their our your my there here what who when "
    "where why how which if in on at for from with as but and or so then now yes no not all some one after before "
    "der die das ein eine er sie es wir ihr ich und aber dann el la los las un una ella ellos yo y pero le les il elle "
    "nous vous je et mais"
)
_WORD_BEFORE = re.compile(r"[^\s" + re.escape(_OPENERS + _CLOSERS) + r"]*\Z")
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})")


class SentenceCutter:
    """Of one text. What it holds is bounded by `MAX_CHARACTERS` and what one `push` brings."""

    def __init__(self) -> None:
        self._held = ""
        self._from = 0  # marks before it are no ends

    def push(self, text: str) -> list[str]:
        """The sentences that became whole with `text`, each with the space behind it."""
        self._held += text
        return self._cut(is_end=False)

    def flush(self) -> list[str]:
        """The text has ended: what is left."""
        pieces = self._cut(is_end=True)
        if self._held:
            pieces.append(self._held)
        self._held, self._from = "", 0
        return pieces

    def _cut(self, *, is_end: bool) -> list[str]:
        pieces = []
        while (end := self._find_end(is_end)) is not None:
            pieces.append(self._held[:end])
            self._held, self._from = self._held[end:], 0
        return pieces

    def _find_end(self, is_end: bool) -> int | None:
        """Where the first sentence ends; None if it has not, or that cannot be told yet."""
        held = self._held
        while (mark := _MARK.search(held, self._from, MAX_CHARACTERS)) is not None:
            if mark.end() == len(held) and not is_end:
                return None  # more of the mark may come
            window = held[mark.end() : mark.end() + _REACH]
            closers = len(window) - len(window.lstrip(_CLOSERS))
            after = window[closers:]
            spaces = len(after) - len(after.lstrip())
            rest = after[spaces:]
            if not rest and len(window) < _REACH and not is_end:
                return None
            before = held[: mark.start()]
            word = _last_word(before)
            is_word_cut = _first_word(rest) == rest.lstrip(_OPENERS).lower() and len(window) < _REACH and not is_end
            if is_word_cut and _needs_next_word(mark[0], word):
                return None
            if before.strip() and _is_end(mark[0], before, word, spaces, rest):
                return mark.end() + closers + spaces
            self._from = mark.end()
        if len(held) < MAX_CHARACTERS + _REACH and not (is_end and len(held) > MAX_CHARACTERS):
            return None
        clauses = [found.end() for found in _CLAUSE.finditer(held, MAX_CHARACTERS // 2, MAX_CHARACTERS)]
        return clauses[-1] if clauses else held.rfind(" ", 1, MAX_CHARACTERS) + 1 or MAX_CHARACTERS


def _is_end(mark: str, before: str, word: str, spaces: int, rest: str) -> bool:
    """Whether `mark` ends a sentence, with `word` the last one before it, and `rest` what follows the spaces."""
    if mark[0] in _WIDE or mark == "\n" or not rest:
        return True
    begins = rest.lstrip(_OPENERS)[:1]
    if not spaces:
        return False
    if mark != ".":
        # "Wait... what" and "Yahoo! has" go on; a question does not.
        return "?" in mark or not begins.islower()
    if begins.islower() or word.lower() in _NEVER_LAST or (begins.isdigit() and word.lower() in _BEFORE_NUMBERS):
        return False
    if _LIST_NUMBER.fullmatch(word) and not before[: len(before) - len(word)].strip():
        return False  # "1. First"
    return not _needs_next_word(mark, word) or _first_word(rest) in _BEGINNINGS


def _needs_next_word(mark: str, word: str) -> bool:
    """Whether only the next word can tell: behind an abbreviation, and an initial."""
    return mark == "." and (word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper()))


def _last_word(text: str) -> str:
    found = _WORD_BEFORE.search(text)
    return found[0] if found else ""


def _first_word(text: str) -> str:
    found = re.match(r"[^\W\d_]*", text.lstrip(_OPENERS))
    return found[0].lower() if found else ""
