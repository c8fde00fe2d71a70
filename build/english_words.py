"""The table of English words that the guards of the semantic cache read, made from Princeton's WordNet 3.0.

    python -m build.english_words WORDNET_FOLDER

`WORDNET_FOLDER` holds `index.noun`, `data.noun`, … (`/usr/share/wordnet` of Debian's `wordnet-base`). The table is
kept in the tree, because words do not change with a target; this file says how it was made. A line of it:

    word <tab> class <tab> words of the same meaning <tab> words derived from it
    irregular form <tab> = <tab> its base forms

class: `verb` (seen in WordNet's tagged texts, mostly as one), `common` (seen as something else), `rare` (not seen), or
`name` (always written with a capital). Relations are kept between seen words alone.
Two words have the same meaning if they share a synset that is among the leading senses of both.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_OUT = Path(__file__).parents[1] / "orchestrator" / "cache" / "lexicon" / "english_words.tsv"
_PARTS = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_WORD = re.compile(r"[A-Za-z]{2,16}")
# A sense counts for a word if it is one of the first three of its part of speech and at least this share of all its
# uses: beyond that WordNet's senses are those of dictionaries, not of users ("get" and "father").
_MAX_RANK = 3
_MIN_SHARE = 0.15


class _Pointer(NamedTuple):
    """From a synset's word `own` to word `other` of the synset at `offset` of another part of speech."""

    own: int
    part: str
    offset: int
    other: int


class _Synset(NamedTuple):
    words: list[str]
    derived: list[_Pointer]


def main(folder: Path) -> None:
    ranks, shares = _leading_senses(folder)
    synsets = {part: dict(_read_data(folder / f"data.{name}")) for part, name in _PARTS.items()}
    same: dict[str, set[str]] = defaultdict(set)
    derived: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, str] = {}
    for part, by_offset in synsets.items():
        for offset, synset in by_offset.items():
            lowered = [word.lower() for word in synset.words]
            for word in synset.words:
                if _WORD.fullmatch(word):
                    _classify(classes, word, shares.get((word.lower(), part, offset), 0.0) > 0)
            leading = [
                word
                for word in lowered
                if ranks.get((word, part, offset), 99) <= _MAX_RANK
                and shares.get((word, part, offset), 0.0) >= _MIN_SHARE
            ]
            for word in leading:
                same[word].update(set(leading) - {word})
            for pointer in synset.derived:
                target = synsets[pointer.part][pointer.offset]
                derived[lowered[pointer.own]].add(target.words[pointer.other].lower())
    seen = {word for word, own in classes.items() if own == "common"}
    verbs = _mostly_verbs(shares) & seen
    lines = []
    for word in sorted(classes):
        fields = [word, "verb" if word in verbs else classes[word]]
        if word in seen:
            fields += [",".join(sorted((each[word] - {word}) & seen)) for each in (same, derived)]
        lines.append("\t".join(fields).rstrip("\t"))
    lines += [f"{form}\t=\t{','.join(sorted(bases))}" for form, bases in sorted(_irregular_forms(folder).items())]
    _OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{_OUT}: {len(lines)} lines")


def _classify(classes: dict[str, str], word: str, common: bool) -> None:
    own = "name" if word != word.lower() else "common" if common else "rare"
    order = ("name", "rare", "common")
    classes[word.lower()] = max(classes.get(word.lower(), own), own, key=order.index)


def _mostly_verbs(shares: dict[tuple[str, str, int], float]) -> set[str]:
    totals: dict[str, float] = defaultdict(float)
    for (word, part, _), share in shares.items():
        totals[word] += share if part == "v" else 0.0
    return {word for word, share in totals.items() if share > 0.5}


def _leading_senses(folder: Path) -> tuple[dict[tuple[str, str, int], int], dict[tuple[str, str, int], float]]:
    """For each (word, part, offset): the sense's rank from 1, and its share of the word's uses in the tagged texts."""
    counts: dict[tuple[str, str, int], int] = {}
    for line in (folder / "cntlist.rev").read_text(encoding="utf-8").splitlines():
        key, sense_number, count = line.split()
        word, _, rest = key.partition("%")
        counts[word, "nvara"[int(rest[0]) - 1], int(sense_number)] = int(count)
    ranks: dict[tuple[str, str, int], int] = {}
    weights: dict[tuple[str, str, int], float] = {}
    totals: dict[str, float] = defaultdict(float)
    for part, name in _PARTS.items():
        for line in _lines(folder / f"index.{name}"):
            fields = line.split()
            word, num_senses = fields[0], int(fields[2])
            for rank, offset in enumerate(fields[-num_senses:], 1):
                key3 = (word, part, int(offset))
                ranks[key3] = rank
                # A sense never seen still exists: less so, the later it stands.
                weights[key3] = counts.get((word, part, rank), 0) + 0.5 / rank
                totals[word] += weights[key3]
    return ranks, {key: weight / totals[key[0]] for key, weight in weights.items()}


def _read_data(path: Path) -> Iterator[tuple[int, _Synset]]:
    for line in _lines(path):
        fields = line.partition(" | ")[0].split()
        num_words = int(fields[3], 16)
        words = [re.sub(r"\(\w+\)$", "", word) for word in fields[4 : 4 + 2 * num_words : 2]]
        pointers = fields[5 + 2 * num_words :]
        derived = [
            _Pointer(int(indices[:2], 16) - 1, part, int(offset), int(indices[2:], 16) - 1)
            for symbol, offset, part, indices in zip(*(pointers[start::4] for start in range(4)))
            if symbol in ("+", "\\") and part in _PARTS and indices != "0000"
        ]
        yield int(fields[0]), _Synset(words, derived)


def _irregular_forms(folder: Path) -> dict[str, set[str]]:
    forms: dict[str, set[str]] = defaultdict(set)
    for name in ("noun", "verb"):
        for line in (folder / f"{name}.exc").read_text(encoding="utf-8").splitlines():
            form, *bases = line.split()
            if _WORD.fullmatch(form):
                forms[form].update(filter(_WORD.fullmatch, bases))
    return {form: bases for form, bases in forms.items() if bases}


def _lines(path: Path) -> list[str]:
    """Without the licence that each file begins with."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("  ")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
