"""Mends typing errors in a question by the words of another: only what is no word becomes one, and names stay."""

from __future__ import annotations

import functools
import re

from orchestrator.cache.lexicon import Lexicon, words

_WORD = re.compile(r"(?<![\w'@./-])[^\W\d_]{2,}(?![\w'@/-])")
# The words that ask: without them a question has no kind. They are looked for also where the other question has none.
_ASKING = words("what how where when which who why does can should please could would difference many much")


def mend(text: str, other: str, lexicon: Lexicon) -> str:
    """`text` with each word that is none replaced by the nearest word of `other`, if that is near enough."""
    candidates: frozenset[str] | None = None
    for word in _WORD.findall(text):
        wrong = word.lower()
        if _is_known(wrong, lexicon) and not (
            len(wrong) <= 3 and word == wrong and lexicon.word(wrong).usage == "rare"  # "si", "ot", "hte"
        ):
            continue
        if candidates is None:
            candidates = frozenset(each.lower() for each in _WORD.findall(other))
        if wrong in candidates or wrong in _little_words(lexicon):
            continue
        found = [each for each in candidates if is_typo(word, each, lexicon)]
        if not found and lexicon.language == "en":
            found = [each for each in _ASKING if is_typo(word, each, lexicon)]
        if found:
            right = min(found, key=lambda each: (edit_distance(wrong, each), each))
            text = re.sub(rf"\b{re.escape(word)}\b", right, text)
    return text


def _is_known(word: str, lexicon: Lexicon) -> bool:
    if (word,) in lexicon.groups or word in _little_words(lexicon) or word in lexicon.polite:
        return True
    return lexicon.language == "en" and (lexicon.bases(word) != {word} or lexicon.word(word).usage != "unknown")


@functools.lru_cache(maxsize=8)
def _little_words(lexicon: Lexicon) -> frozenset[str]:
    asking = _ASKING if lexicon.language == "en" else frozenset()
    return asking | lexicon.drop | lexicon.strong | lexicon.weak | lexicon.pronouns | lexicon.conjunctions


def is_typo(wrong: str, right: str, lexicon: Lexicon) -> bool:
    """Whether `wrong`, which is no word, is `right` mistyped, a word of the other question.

    Names are too near to each other for most errors, and so are words where no list says what is one.
    """
    lowered = wrong.lower()
    is_swap = len(lowered) == len(right) and sorted(lowered) == sorted(right)
    if lowered[0] != right[0] and not is_swap:
        return False
    distance = edit_distance(lowered, right)
    shorter = min(len(lowered), len(right))
    # A letter too many, too few or two in the wrong order; another letter may be another word.
    is_slip = distance == 1 and (is_swap or len(lowered) != len(right))
    if right in _little_words(lexicon):
        return is_slip or (distance == 1 and shorter >= 4)
    if lexicon.language != "en":
        # Not at the end, where words are inflected, unless letters are only swapped.
        return is_slip and shorter >= 5 and (is_swap or (shorter >= 6 and lowered[-2:] == right[-2:]))
    usages = {lexicon.word(base).usage for base in lexicon.bases(right)}
    if usages & {"verb", "common", "rare"} and not wrong[0].isupper():
        return is_slip if shorter <= 3 else distance <= (2 if max(len(lowered), len(right)) >= 7 else 1)
    return is_slip and shorter >= (4 if is_swap else 5 if "name" in usages else 6)


def edit_distance(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour; 3 for anything above 2 in length alone."""
    if abs(len(one) - len(other)) > 2:
        return 3
    before: list[int] = []
    above: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, above, row = above, row, [i]
        for j, other_letter in enumerate(other, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other_letter))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == other_letter:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
    return row[-1]
