"""Mends typing errors in a question by the words of another: only what is no word becomes one, and names stay."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from typing import Literal, NamedTuple

from orchestrator.cache.languages import strip_accents
from orchestrator.cache.lexicon import Lexicon, words

_WORD = re.compile(r"(?<![\w'@./-])[^\W\d_]{2,}(?![\w'@/-])")
_LETTERS = re.compile(r"(?<!')[^\W\d_]+(?!')")  # "didn't" is not "didn t"
# The words that ask: without them a question has no kind. They are looked for also where the other question has none.
_ASKING = words("what how where when which who why does can should please could would difference many much the")

# Words that are written for each other, and are words; of those that a question can be about, as "principal" and
# "principle", nobody can tell which one is meant.
_CONFUSED: dict[str, frozenset[str]] = {
    word: frozenset(group.split()) - {word}
    for group in (
        "by buy bye",
        "write right",
        "from form",
        "there their",
        "your youre",
        "lose loose",
        "than then",
        "weather whether wether",
        "advice advise",
        "quiet quite",
        "where were wear",
        "hear here",
        "of off",
        "which witch",
        "to too",
        "passed past",
        "breath breathe",
        "choose chose",
        "untied united",
        "covert convert",
    )
    for word in group.split()
}
# Letters that sound alike in Spanish, German or French.
_SOUNDS = str.maketrans("áàâäéèêëíìîïóòôöúùûüñçczvykm", "aaaaeeeeiiiioooouuuunsssbicn", "h")
# Consonants that are doubled or not by mistake; "poison" and "poisson", "pero" and "perro" are other words.
_DOUBLED = re.compile(r"([bcdfglmnpt])\1")
_ES = ("ses", "xes", "zes", "ches", "shes", "oes", "ies")


class _Written(NamedTuple):
    """What of a text decides whether there is anything to mend, in lower case: made once, compared with many others."""

    words: frozenset[str]
    joined: frozenset[str]  # each word and the one behind it, written together
    joined_letters: frozenset[str]  # the same of what `_split_glued` takes for words
    confused: frozenset[str]  # those of `_CONFUSED`
    doubtful: frozenset[str]  # those that may be typing errors


@functools.lru_cache(maxsize=1 << 13)
def _look_at(text: str, lexicon: Lexicon) -> _Written:
    found = [(match[0], match.start() == 0) for match in _WORD.finditer(text)]
    words = [word.lower() for word, _ in found]
    doubtful = frozenset(
        word.lower()
        for word, is_first in found
        if word.lower() not in _little_words(lexicon) and _doubt(word, is_first=is_first, lexicon=lexicon) != "none"
    )
    return _Written(
        frozenset(words),
        frozenset(map("".join, pairwise(words))),
        frozenset(map("".join, pairwise(_LETTERS.findall(text.lower())))),
        frozenset(words) & _CONFUSED.keys() if lexicon.language == "en" else frozenset(),
        doubtful,
    )


def _may_differ(text: str, other: str, lexicon: Lexicon) -> bool:
    """Whether anything of `text` could be mended by `other`; most often nothing can, and this is soon known."""
    mine, theirs = _look_at(text, lexicon), _look_at(other, lexicon)
    return not (
        mine.doubtful <= theirs.words
        and mine.joined.isdisjoint(theirs.words)
        and mine.words.isdisjoint(theirs.joined_letters)
        and all(_CONFUSED[word].isdisjoint(theirs.words) for word in mine.confused - theirs.words)
    )


def mend(text: str, other: str, lexicon: Lexicon) -> str:
    """`text` with each word that is none replaced by the nearest word of `other`, if that is near enough."""
    if not _may_differ(text, other, lexicon):
        return text
    theirs = frozenset(word.lower() for word in _WORD.findall(other))
    text = _split_glued(_close_compounds(text, theirs), other, lexicon)
    own = frozenset(word.lower() for word in _WORD.findall(text))
    for found in _WORD.finditer(text):
        word, wrong = found[0], found[0].lower()
        if wrong in theirs:
            continue
        if lexicon.language == "en" and wrong in _CONFUSED:
            candidates = _CONFUSED[wrong] & theirs - own
            if candidates:
                text = _replace(text, word, min(candidates))
                continue
        doubt = _doubt(word, is_first=found.start() == 0, lexicon=lexicon)
        if doubt == "none" or wrong in _little_words(lexicon):
            continue
        near = [each for each in theirs if is_typo(word, each, lexicon, is_first=found.start() == 0)]
        if doubt == "slip":
            # "jon" is no slip of "john"
            near = [each for each in near if _is_slip(wrong, each) and lexicon.word(each).usage != "name"]
        elif not near and lexicon.language == "en":
            near = [each for each in _ASKING if is_typo(word, each, lexicon)]
        if near:
            right = min(
                near, key=lambda each: (edit_distance(wrong, each), each in own, not _is_slip(wrong, each), each)
            )
            text = _replace(text, word, right)
    return text


def _replace(text: str, word: str, right: str) -> str:
    return re.sub(rf"(?<![\w']){re.escape(word)}(?![\w'])", right, text)


def _close_compounds(text: str, theirs: frozenset[str]) -> str:
    """ "screen shot" becomes "screenshot" where the other question writes it so."""
    for one, other in zip(_WORD.findall(text), _WORD.findall(text)[1:]):
        if (one + other).lower() in theirs and len(one) > 1 and len(other) > 1:
            text = re.sub(rf"\b{re.escape(one)}[ -]{re.escape(other)}\b", one + other, text)
    return text


def _split_glued(text: str, other: str, lexicon: Lexicon) -> str:
    """ "mypassword" becomes "my password" where the other question writes it so; "MySQL" is not its "SQL".

    Only where a list says what is a word: "illégal" is not "-il légal".
    """
    if lexicon.language != "en":
        return text
    theirs = _LETTERS.findall(other.lower())
    apart = {one + following: f"{one} {following}" for one, following in pairwise(theirs)}
    for word in {found[0] for found in _WORD.finditer(text)}:
        wrong = word.lower()
        if wrong in apart and wrong not in theirs and not _is_known(wrong, lexicon):
            text = _replace(text, word, apart[wrong])
    return text


@functools.lru_cache(maxsize=1 << 14)  # the same words come with each near question
def _doubt(word: str, *, is_first: bool, lexicon: Lexicon) -> Literal["none", "slip", "all"]:
    """What `word` may be: no typing error; one if letters only slipped, being a word of sorts; or any."""
    wrong = word.lower()
    if not _is_known(wrong, lexicon):
        return "all"
    if lexicon.language != "en" or (wrong,) in lexicon.groups or wrong in lexicon.polite:
        return "none"
    usage = lexicon.word(wrong).usage
    if usage == "rare" and word == wrong:
        return "all" if len(wrong) <= 3 else "slip"  # "si", "hte"; "aborad" is a word as well
    if usage == "name" and (word == wrong or is_first):
        return "slip"  # "my oder"
    # "boling" would be a form of "bole".
    is_form = usage == "unknown" and wrong not in lexicon.irregular and wrong.endswith(("ed", "ing"))
    is_verb = any(lexicon.word(base).usage == "verb" for base in lexicon.bases(wrong))
    return "slip" if is_form and not is_verb else "none"


def _is_known(word: str, lexicon: Lexicon) -> bool:
    if (word,) in lexicon.groups or word in _little_words(lexicon) or word in lexicon.polite:
        return True
    if lexicon.language == "en" and word.removesuffix("s") in _ASKING and not word.endswith("ss"):
        return True  # "whens": an apostrophe is missing; "doess" is none
    if lexicon.language != "en":
        return False
    # "doees" is no form of "doe": only these endings take "es".
    inflected = word in lexicon.irregular or not word.endswith("es") or word.endswith(_ES) or word[:-1] in lexicon.words
    return lexicon.word(word).usage != "unknown" or (inflected and lexicon.bases(word) != {word})


@functools.lru_cache(maxsize=8)
def _little_words(lexicon: Lexicon) -> frozenset[str]:
    asking = _ASKING if lexicon.language == "en" else frozenset()
    return asking | lexicon.drop | lexicon.strong | lexicon.weak | lexicon.pronouns | lexicon.conjunctions


def is_typo(wrong: str, right: str, lexicon: Lexicon, *, is_first: bool = False) -> bool:
    """Whether `wrong`, which is no word, is `right` mistyped, a word of the other question.

    Names are too near to each other for most errors, and so are words where no list says what is one.
    """
    lowered = wrong.lower()
    is_swap = len(lowered) == len(right) and sorted(lowered) == sorted(right)
    if lowered[0] != right[0] and not is_swap:
        # "nife", "creenshot"
        return right[1:] == lowered and len(lowered) >= 4 and lexicon.word(right).usage in ("verb", "common")
    distance = edit_distance(lowered, right)
    shorter = min(len(lowered), len(right))
    # A letter too many, too few or two in the wrong order; another letter may be another word.
    is_slip = distance == 1 and (is_swap or len(lowered) != len(right))
    if right in _little_words(lexicon):
        return is_slip or (distance == 1 and shorter >= 4)
    if lexicon.language != "en":
        # A letter more may be another word: "poison", "poisson".
        if is_slip and is_swap and shorter >= 5:
            return True
        if strip_accents(lowered) == strip_accents(right):
            return False  # "pêcher", "pécher"; one side may do without accents, which is no error
        if shorter >= 6 and _DOUBLED.sub(r"\1", lowered) == _DOUBLED.sub(r"\1", right):
            return True
        return shorter >= 6 and lowered.translate(_SOUNDS) == right.translate(_SOUNDS)
    usages = {lexicon.word(base).usage for base in lexicon.bases(right)}
    is_word = usages & {"verb", "common", "rare"} or (usages == {"unknown"} and _is_known(right, lexicon))  # "everyone"
    if is_word and (is_first or not wrong[0].isupper()):
        return is_slip if shorter <= 3 else distance <= (2 if max(len(lowered), len(right)) >= 7 else 1)
    if "name" in usages and wrong == lowered and len(right) > len(lowered):
        return is_slip and shorter >= 4  # "japn"; but "malik" is not "mali", nor "Sara" "Sarah"
    if "name" in usages and wrong == lowered and distance == 1 and shorter >= 9:
        return True  # "pythagorian"
    return is_slip and shorter >= (4 if is_swap else 5 if "name" in usages else 6)


def _is_slip(wrong: str, right: str) -> bool:
    """Whether a letter is too many, too few or two are swapped."""
    return edit_distance(wrong, right) == 1 and (len(wrong) != len(right) or sorted(wrong) == sorted(right))


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
