"""What the guards know about words: one TOML file a language, written by hand, and WordNet's English words.

A `Lexicon` is read once and never changed. Frames are patterns that turn the many ways to ask into one:
"could you tell me how I can …", "what is the way to …" become the question kind `how` and what is left.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import snowballstemmer
from pydantic import Field

from orchestrator.config import Row, read_toml


def words(text: str) -> frozenset[str]:
    """The words of a list that is written as one text."""
    return frozenset(text.split())


_FOLDER = Path(__file__).parent
_PART = re.compile(r"<([a-z]+)>")
_SNOWBALL = {"en": "porter", "es": "spanish", "de": "german", "fr": "french"}


class _File(Row):
    """One language's TOML file; lists of words are texts, separated by spaces."""

    parts: dict[str, str] = Field(default_factory=dict)
    prefixes: list[str]
    suffixes: list[str]
    frames: list[list[str]]
    groups: list[str]
    drop: str
    soft: str = ""
    pronouns: str = ""
    contractions: list[list[str]] = Field(default_factory=list)
    strong: str = ""
    weak: str = ""
    conjunctions: str = ""
    past: str = ""
    present: str = ""
    perfect: str = ""
    future: str = ""
    months: str = ""
    numbers: str = ""
    ordinals: str = ""
    graded: str = ""
    apart: list[str] = Field(default_factory=list)
    polite: str = ""
    polite_marks: str = ""
    people: str = ""
    querying: str = ""
    asking: str = "(?!)"
    subordinate: str = "(?!)"
    superlative: str = "(?!)"
    cases: str = "(?!)"
    genders: dict[str, str] = Field(default_factory=dict)
    own: str = ""
    others: str = ""
    both: str = ""
    either: str = ""

    def written_out(self, patterns: list[str]) -> list[str]:
        """`patterns` with each `<name>` replaced by that part; a part may be made of other parts."""
        while any(_PART.search(pattern) for pattern in patterns):
            patterns = [_PART.sub(lambda found: self.parts[found[1]], pattern) for pattern in patterns]
        return patterns


class Word(NamedTuple):
    """One English word of WordNet: how it is used, and its relations."""

    usage: str  # verb, common, rare or name
    related: frozenset[str]


_UNKNOWN = Word("unknown", frozenset())


@dataclass(frozen=True, eq=False)
class Lexicon:
    """One language. `groups` gives the groups of a word or phrase, a phrase being a tuple of base forms."""

    language: str
    prefixes: re.Pattern[str]
    suffixes: re.Pattern[str]
    frames: tuple[tuple[re.Pattern[str], str], ...]
    contractions: tuple[tuple[re.Pattern[str], str], ...]
    drop: frozenset[str]
    soft: frozenset[str]
    pronouns: frozenset[str]
    strong: frozenset[str]
    weak: frozenset[str]
    conjunctions: frozenset[str]
    tenses: dict[str, str]
    months: dict[str, int]
    numbers: dict[str, str]
    graded: dict[str, tuple[str, str]]
    polite: frozenset[str]
    polite_marks: frozenset[str]
    people: frozenset[str]
    querying: frozenset[str]
    asking: re.Pattern[str]
    subordinate: re.Pattern[str]
    superlative: re.Pattern[str]
    cases: re.Pattern[str]
    genders: dict[str, str]
    own: frozenset[str]
    others: frozenset[str]
    both: frozenset[str]
    either: frozenset[str]
    words: dict[str, Word]
    irregular: dict[str, tuple[str, ...]]
    groups: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)
    longest_phrase: int = 1
    apart: frozenset[frozenset[str]] = frozenset()

    def bases(self, word: str) -> frozenset[str]:
        """The base forms that `word` may have, itself among them."""
        return _bases(self.language, word)

    def groups_of(self, phrase: str) -> frozenset[str]:
        """Of what is written so, and not of its base form."""
        return self.groups.get(tuple(phrase.split()), frozenset())

    def word(self, word: str) -> Word:
        return self.words.get(word, _UNKNOWN)


@functools.lru_cache(maxsize=50_000)
def _bases(language: str, word: str) -> frozenset[str]:
    if language == "en":
        lexicon = load_lexicon("en")
        bases = {word, *lexicon.irregular.get(word, ())}
        for ending, others in _ENGLISH_ENDINGS:
            if word.endswith(ending) and len(word) - len(ending) >= 2:
                stem = word[: -len(ending)]
                doubled = len(stem) > 2 and stem[-1] == stem[-2] and ending in ("ed", "ing")
                found = {
                    base
                    for base in [stem + other for other in others] + ([stem[:-1]] if doubled else [])
                    if len(base) > 1 and lexicon.word(base).usage in ("verb", "common", "rare")
                }
                bases |= found
                if found or ending == "'s":
                    break
        return frozenset(bases)
    stemmer = _stemmer(language)
    return frozenset((word,)) if stemmer is None or not word.isalpha() else frozenset((stemmer.stemWord(word),))


_ENGLISH_ENDINGS = (
    ("'s", ("",)),
    ("ies", ("y", "ie")),
    ("es", ("", "e")),
    ("s", ("",)),
    ("ied", ("y",)),
    ("ed", ("", "e")),
    ("ing", ("", "e")),
)


@functools.lru_cache(maxsize=8)
def _stemmer(language: str) -> snowballstemmer.stemmer | None:
    return snowballstemmer.stemmer(_SNOWBALL[language]) if language in _SNOWBALL else None


@functools.lru_cache(maxsize=8)
def load_lexicon(language: str) -> Lexicon:
    """The lexicon of `language` (en, es, de, fr, zh); raises `ConfigError` for a wrong file."""
    file = read_toml(_FOLDER / f"{language}.toml", _File)
    words, irregular, phrasal = _read_english() if language == "en" else ({}, {}, {})
    tenses = {
        word: tense
        for tense, listed in (
            ("past", file.past),
            ("present", file.present),
            ("perfect", file.perfect),
            ("future", file.future),
        )
        for word in listed.split()
    }
    return _with_groups(
        Lexicon(
            language=language,
            prefixes=_any_of(
                file.written_out(file.prefixes),
                r"^\W*(?:",
                r")[\s,.:;!?—–-]*" if language == "zh" else r")(?!(?<=\w)\w)[\s,.:;!?—–-]*",
            ),
            suffixes=_any_of(file.written_out(file.suffixes), r"[\s,.:;!?—–-]*(?<!\w)(?:", r")\W*$"),
            frames=tuple(
                (_whole_words(pattern, language), kind)
                for pattern, (_, kind) in zip(file.written_out([frame[0] for frame in file.frames]), file.frames)
            ),
            contractions=tuple((re.compile(pattern), text) for pattern, text in file.contractions),
            drop=frozenset(file.drop.split()),
            soft=frozenset(file.soft.split()),
            pronouns=frozenset(file.pronouns.split()),
            strong=frozenset(file.strong.split()),
            weak=frozenset(file.weak.split()),
            conjunctions=frozenset(file.conjunctions.split()),
            tenses=tenses,
            months={name: number for number, name in enumerate(file.months.split(), 1)},
            numbers=_numbers(file),
            graded=_graded(file.graded.split()) if language == "en" else {},
            polite=frozenset(file.polite.split()) | frozenset(file.polite_marks.split()),
            polite_marks=frozenset(file.polite_marks.split()),
            people=frozenset(file.people.split()),
            querying=frozenset(file.querying.split()),
            asking=re.compile(rf"(?<=[\s,:])(?:{file.asking})(?!\w)"),
            subordinate=re.compile(rf"(?:{file.subordinate})(?!\w)"),
            superlative=re.compile(rf"\b(?:{file.superlative})\b"),
            cases=re.compile(rf"\b(?:{file.cases})\b"),
            genders=file.genders,
            own=frozenset(file.own.split()),
            others=frozenset(file.others.split()),
            both=frozenset(file.both.split()),
            either=frozenset(file.either.split()),
            words=words,
            irregular=irregular,
        ),
        file,
        phrasal,
    )


def _whole_words(pattern: str, language: str) -> re.Pattern[str]:
    """A frame never ends within a word, except where words are not told apart."""
    return re.compile(pattern if language == "zh" else rf"(?:{pattern})(?!(?<=\w)\w)")


def _any_of(patterns: list[str], before: str, after: str) -> re.Pattern[str]:
    return re.compile(before + "|".join(patterns or ["(?!)"]) + after)


def _numbers(file: _File) -> dict[str, str]:
    """Words that are numbers: "two" is 2, "second" is #2."""
    cardinal = {word: str(number) for number, word in enumerate(file.numbers.split())}
    return {**cardinal, **{word: f"#{number}" for number, word in enumerate(file.ordinals.split()) if number}}


def _graded(adjectives: list[str]) -> dict[str, tuple[str, str]]:
    """ "cheapest" is ("cheap", "most"), "cheaper" is ("cheap", "more")."""
    forms = {"better": ("good", "more"), "best": ("good", "most"), "worse": ("bad", "more"), "worst": ("bad", "most")}
    for base in adjectives:
        stem = base[:-1] if base[-1] == "e" else base[:-1] + "i" if base[-1] == "y" else base
        if len(base) <= 4 and base[-1] in "gtdmn" and base[-2] in "aio" and base[-3] not in "aeiou":
            stem += base[-1]
        forms[stem + "er"], forms[stem + "est"] = (base, "more"), (base, "most")
    return forms


def _read_english() -> tuple[dict[str, Word], dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The words, the irregular forms' bases, and the verbs that a phrasal verb stands for."""
    words: dict[str, Word] = {}
    irregular: dict[str, tuple[str, ...]] = {}
    phrasal: dict[str, tuple[str, ...]] = {}
    for line in (_FOLDER / "english_words.tsv").read_text(encoding="utf-8").splitlines():
        word, usage, *relations = line.split("\t")
        if usage == "=":
            irregular[word] = tuple(relations[0].split(","))
        elif usage == "~":
            phrasal[word] = tuple(relations[0].split(","))
        else:
            related = frozenset(",".join(relations).split(",")) - {""}
            words[word] = Word(usage, related) if related else Word(usage, _UNKNOWN.related)
    return words, irregular, phrasal


def _with_groups(lexicon: Lexicon, file: _File, phrasal: dict[str, tuple[str, ...]]) -> Lexicon:
    groups: dict[tuple[str, ...], set[str]] = {}
    for number, line in enumerate(file.groups):
        for phrase in line.split(";"):
            groups.setdefault(tuple(phrase.split()), set()).add(f"={number}")
    for phrase, verbs in phrasal.items():
        if tuple(phrase.split()) not in groups:  # what is listed by hand says all that it may mean
            for each in (phrase, *verbs):
                groups.setdefault(tuple(each.split()), set()).add(f"~{phrase}")
    if lexicon.language != "en":  # stems are no words there, so a listed word's stem has to be listed too
        for words, own in list(groups.items()):
            if len(words) == 1:
                groups.setdefault(tuple(_bases(lexicon.language, words[0])), set()).update(own)
    apart = frozenset(
        frozenset((one.strip(), other.strip()))
        for line in file.apart
        for one in line.split(";")
        for other in line.split(";")
        if one != other
    )
    return Lexicon(
        **{
            **lexicon.__dict__,
            "groups": {phrase: frozenset(own) for phrase, own in groups.items()},
            "longest_phrase": max((len(phrase) for phrase in groups), default=1),
            "apart": apart,
        }
    )
