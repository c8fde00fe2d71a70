"""What of two questions' writing has to be the same, though their words are: signs, code, quotations, capitals.

It is looked at before anything is put into lower case or mended. A rule here may cost a hit, and never makes one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from itertools import pairwise
from typing import NamedTuple

from orchestrator.cache.lexicon import Lexicon, load_lexicon

# What stands between two spaces and has one of these is code, or a formula.
_CODE = re.compile(
    r"[\[\]{}=<>|\\^~²³&*+]|\w\(|(?<!\w)[/%#!.-]{2,}|^\.$|(?<!\w)![\w(]|^!|\$(?!\d)|(?<=\w)::?(?=\w)|\.\w+\("
)
# Punctuation that no word stands before: "??" and "?." of C#, but not what ends a text.
_OPERATOR = re.compile(r"(?:(?<![^\s\"'`(“„«])|(?<=[\u4e00-\u9fff]))[?!.:;,]{2,}|(?<=\w)(?:\?\.|[?!:]{2,})(?=\w)")
_MARK = re.compile(r"(?<!\S)[?!.:;,](?=\s+\w)")
_ENDS = re.compile(r"[?!]+|\.+")
# An operation: in a text with one, brackets say what is done first.
_OPERATION = re.compile(
    r"[\w)] ?[+*×÷^%=<>&|]+ ?[\w(]|[\d)] ?[-/] ?[\d(]|[\w)] [-/] [\w(]"
    r"|[\d)] (?:plus|minus|times|divided|mal|geteilt|fois|divisé|por|más|menos|moins)\b|\b(?:not|and|or|xor) \("
)
_AROUND = ' .?"“”„«»`'
_BEFORE, _AFTER = "¿¡'\"`“”‘’«»", ".,;:!?'\"`“”‘’«»…"
_QUOTED = re.compile(r"\"[^\"]*\"|“[^”]*”|«[^»]*»|„[^“”]*[“”]|`[^`]*`|(?<!\w)'[^']+'(?!\w)")
_QUOTE = re.compile(r"[\"“”„«»`]|(?<!\w)'|'(?!\w)")
# What stands behind such an order's colon, or behind "this sentence:", is what it is done to.
_ORDER = re.compile(
    r"^(?:(?:\w+ )?(?:translate|correct|spell|fix|rewrite|rephrase|reverse|proofread|check|make|write|count|classify)\b"
    r"[^:]*|[^:]*\b(?:sentence|phrase|paragraph|text|passage|word|verse|line|code)s?): ([\"“„«`].+[\"“”»`]|.+)",
    re.IGNORECASE | re.DOTALL,
)
# A question about a word itself.
_ABOUT_WORDS = re.compile(
    r"\b(?:spell(?:ed|ing|t)?|plurals?|singular|syllables?|rhymes?|uppercase|lowercase|grammatical(?:ly)?|palindrome)\b"
    r"|\bhow many (?:letters|words|vowels|\w's|\w are in)\b",
    re.IGNORECASE,
)
_FACE = re.compile(r"[:;=8][-']?[()\[\]/|DPpOo*]")
_NEGATIVE = re.compile(r"(?<![\w)\].,:/–-])[-−]\d[\d.,]*")
_MEASURE = re.compile(r"\d ?([a-zA-Z]{1,4}(?:/[a-zA-Z]+)?)(?![a-zA-Z0-9_])")
_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*", re.ASCII)
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
# "MBps" and "Mbps", "mW" and "MW": longer words are written with capitals as people like it.
_MAX_UNIT = 4
_LITTLE = frozenset(("us", "it", "who", "may"))  # and the US, IT, the WHO, May
_POLITE = frozenset(("sie", "ihnen", "ihr", "ihre", "ihren", "ihrem"))  # German, with a capital: you
# "Who would win" is not "who won"; "I would like to know", "would you", "what would be" say no more than others.
_WOULD = re.compile(r"\bwould(?:n't| not)?(?! (?:you|i|we|it|that|like|love|be|anyone|anybody|someone|somebody)\b)")
_POLITE_WOULD = re.compile(r"\b(?:i|you|we)(?:'d| would)\b")


class Writing(NamedTuple):
    """One text as it is written; `code` are its pieces of code, flags, negative numbers and signs, sorted."""

    code: tuple[str, ...]
    marks: tuple[str, ...]  # punctuation that stands alone within the text
    quoted: tuple[str, ...]
    object: tuple[str, ...]  # what an order, or a question about words, is about
    measures: tuple[str, ...]  # what stands behind numbers, such as "MB/s"
    words: tuple[str, ...]
    lowered: frozenset[str]
    # Words with a capital within a sentence, by their lower case; none where capitals say nothing.
    capitals: frozenset[str]
    is_shouted: bool
    minds_capitals: bool  # the writer begins with one, and does not begin most words with one


def _signs(text: str) -> list[str]:
    """Pictures, arrows, signs of mathematics; and faces of punctuation."""
    signs = [letter for letter in text if ord(letter) > 127 and unicodedata.category(letter) in ("So", "Sm")]
    return signs + [chunk for chunk in text.split() if _FACE.fullmatch(chunk)]


def _operators(text: str) -> list[str]:
    return [
        found[0]
        for found in _OPERATOR.finditer(text)
        if text[found.end() :].strip(_AFTER + ")") or not _ENDS.fullmatch(found[0])
    ]


def _bracketed(text: str) -> list[str]:
    """The pieces of an operation that have a bracket, such as "(2" and "3)"."""
    text = text.replace("（", "(").replace("）", ")")
    if "(" not in text or not _OPERATION.search(text):
        return []
    return [chunk for chunk in map(_strip, text.split()) if ("(" in chunk) != (")" in chunk)]


def is_shouted(text: str) -> bool:
    """Whether several words are all in capitals, which then say nothing."""
    return text.isupper() and len(_WORD.findall(text)) > 2


def _strip(chunk: str) -> str:
    """Without the punctuation around it, if there is anything else."""
    bare = chunk.lstrip(_BEFORE).rstrip(_AFTER)
    return bare if any(letter.isalnum() for letter in bare) else chunk.lstrip(_BEFORE)


@functools.lru_cache(maxsize=4096)
def look_at(text: str) -> Writing:
    code = [chunk for chunk in map(_strip, text.split()) if _CODE.search(chunk)]
    words = tuple(_WORD.findall(text))
    inner = [word for word in words[1:] if word != "I"]
    num_capitals = sum(word[0].isupper() for word in inner)
    are_told_apart = bool(inner) and num_capitals * 2 <= len(inner) and words[0][0].isupper()
    within = re.findall(r"(?<![.?!:]\s)(?<=\s)[A-ZÀ-Þ][\w']*", text) if are_told_apart else []
    return Writing(
        tuple(
            sorted(
                [
                    *code,
                    *_NEGATIVE.findall(text),
                    *_FLAG.findall(unicodedata.normalize("NFKC", text)),
                    *_signs(text),
                    *_operators(text),
                    *_bracketed(text),
                ]
            )
        ),
        tuple(_MARK.findall(text)),
        tuple(_QUOTED.findall(text)),
        (*_ORDER.findall(text), *([text[:1].lower() + text[1:]] if _ABOUT_WORDS.search(text) else [])),
        tuple(_MEASURE.findall(text)),
        words,
        frozenset(word for word in words if word.islower()),
        frozenset(word.lower() for word in within),
        is_shouted(text),
        are_told_apart,
    )


def rejecting_writing(cached: str, asked: str, language: str) -> str | None:
    """The guard that will not have the two texts share an answer for how they are written, or None."""
    one, other = look_at(cached), look_at(asked)
    if one.code != other.code:
        return "identifier"
    if one.marks and other.marks and one.marks != other.marks:
        return "identifier"
    if _differ_where_both(one.quoted, other.quoted) or _differ_where_both(one.object, other.object):
        return "words"
    if _differ_in_units(one, other, language):
        return "identifier"
    if language == "en" and (_differ_in_names(one, other) or _differ_in_names(other, one)):
        return "name"
    if language == "de" and (_differ_in_nouns(one, other) or _differ_in_nouns(other, one)):
        return "name"
    lexicon = load_lexicon(language)
    if _differ_in_joins(one, other, lexicon):
        return "scope"
    if _differ_in_gender(one, other, lexicon):
        return "name"
    if _find(lexicon.superlative, cached) != _find(lexicon.superlative, asked):
        return "superlative"
    if _find(lexicon.cases, cached) != _find(lexicon.cases, asked):
        return "roles"
    if _differ_in_owner(one, other, lexicon) or _differ_in_owner(other, one, lexicon):
        return "roles"
    if language == "en" and _says_would(cached) != _says_would(asked):
        return "modality"
    return None


def _differ_where_both(texts: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Where one side does without, its words have to do."""
    mine, theirs = ({_QUOTE.sub("", text).strip(_AROUND) for text in each} for each in (texts, others))
    return bool(mine and theirs) and mine != theirs


def _differ_in_units(one: Writing, other: Writing, language: str) -> bool:
    if language == "zh" or (one.minds_capitals and other.minds_capitals):
        measures = {measure.lower(): measure for measure in other.measures}
        if any(measures.get(measure.lower(), measure) != measure for measure in one.measures):
            return True
    if one.is_shouted or other.is_shouted:
        quiet = other if one.is_shouted else one
        return one.is_shouted != other.is_shouted and any(
            not measure.islower() and not measure.isupper() for measure in quiet.measures
        )
    theirs = {word.lower(): word for word in other.words if _may_be_unit(word)}
    return any(theirs.get(word.lower(), word)[1:] != word[1:] for word in one.words if _may_be_unit(word))


def _may_be_unit(word: str) -> bool:
    return 2 <= len(word) <= _MAX_UNIT and not word.islower()


def _differ_in_names(named: Writing, plain: Writing) -> bool:
    """ "how do I get Polish shoes", "how do I polish shoes": both writers mind their capitals."""
    if not plain.minds_capitals:
        return False
    lexicon = load_lexicon("en")
    return any(
        word in plain.lowered
        and word not in plain.capitals
        and word not in named.lowered
        and (word in _LITTLE or any(lexicon.word(base).usage in ("verb", "common") for base in lexicon.bases(word)))
        for word in named.capitals - {"i"}
    )


def _differ_in_nouns(one: Writing, other: Writing) -> bool:
    """ "Das Wort Weise", "das Wort weise": where nouns have capitals on both sides."""
    if one.minds_capitals and other.minds_capitals and not one.capitals & _POLITE <= other.capitals:
        return not (one.capitals & _POLITE).isdisjoint(other.lowered)
    return bool(other.capitals) and not (one.capitals - one.lowered).isdisjoint(other.lowered - other.capitals)


def _differ_in_joins(one: Writing, other: Writing, lexicon: Lexicon) -> bool:
    def said(writing: Writing) -> tuple[bool, bool]:
        return not lexicon.both.isdisjoint(writing.lowered), not lexicon.either.isdisjoint(writing.lowered)

    return {said(one), said(other)} == {(True, False), (False, True)}


def _differ_in_gender(one: Writing, other: Writing, lexicon: Lexicon) -> bool:
    mine, theirs = _genders(one, lexicon), _genders(other, lexicon)
    return any(set(theirs.get(noun, genders)).isdisjoint(genders) for noun, genders in mine.items())


def _genders(writing: Writing, lexicon: Lexicon) -> dict[str, str]:
    lowered = [word.lower() for word in writing.words]
    return {noun: lexicon.genders[article] for article, noun in pairwise(lowered) if article in lexicon.genders}


def _find(pattern: re.Pattern[str], text: str) -> list[str]:
    return sorted(pattern.findall(text.lower()))


def _differ_in_owner(one: Writing, other: Writing, lexicon: Lexicon) -> bool:
    return (
        not lexicon.own.isdisjoint(one.lowered)
        and lexicon.others.isdisjoint(one.lowered)
        and lexicon.own.isdisjoint(other.lowered)
        and not lexicon.others.isdisjoint(other.lowered)
    )


def _says_would(text: str) -> bool:
    return _WOULD.search(_POLITE_WOULD.sub("", text.lower())) is not None
