"""The table of English words that the guards of the semantic cache read, made from Princeton's WordNet 3.0.

    python -m build.english_words WORDNET_FOLDER ARTIFACT

`WORDNET_FOLDER` holds `index.noun`, `data.noun`, … (`/usr/share/wordnet` of Debian's `wordnet-base`); `ARTIFACT` is a
built target, for its sentence embedder. The table is kept in the tree, because words do not change with a target; this
file says how it was made. A line of it:

    word <tab> class <tab> words of the same meaning <tab> words derived from it
    irregular form <tab> = <tab> its base forms
    phrasal verb <tab> ~ <tab> verbs of the same meaning

class: `verb` (seen in WordNet's tagged texts, mostly as one), `common` (seen as something else), `rare` (not seen), or
`name` (always written with a capital). Relations are kept between seen words alone.
Two words have the same meaning if they share a synset that is among the leading senses of both; or any synset, or
adjectives similar by WordNet, and the embedder finds them near as well: WordNet alone has the senses of dictionaries,
the embedder alone finds opposites and neighbours near ("hot" and "cold", "debit" and "credit"). Antonyms never do.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perf.embedder import ArtifactEmbedder

_OUT = Path(__file__).parents[1] / "orchestrator" / "cache" / "lexicon" / "english_words.tsv"
_PARTS = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_WORD = re.compile(r"[A-Za-z]{2,16}")
# A sense counts for a word if it is one of the first three of its part of speech and at least this share of all its
# uses: beyond that WordNet's senses are those of dictionaries, not of users ("get" and "father").
_MAX_RANK = 3
_MIN_SHARE = 0.15
# What the embedder has to find for words that share a lesser sense, and for similar adjectives: below it, pairs read at
# random from the table were more often wrong than right.
_MIN_COSINE = {"synonym": 0.55, "similar": 0.75, "phrasal": 0.45}
# How often a word has to be seen in the tagged texts to be compared.
_MIN_COUNT = 2
_PARTICLES = frozenset(["up", "down", "out", "off", "away", "back"])

_Embed = Callable[[str], npt.NDArray[np.float32] | None]


class _Pointer(NamedTuple):
    """From a synset's word `own` to word `other` of the synset at `offset` of another part of speech."""

    own: int
    part: str
    offset: int
    other: int


class _Synset(NamedTuple):
    words: list[str]
    derived: list[_Pointer]
    similar: list[int]  # offsets, of adjectives
    antonyms: list[_Pointer]


def main(folder: Path, artifact: Path) -> None:
    counts = _counts(folder)
    ranks, shares = _leading_senses(folder, counts)
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
    embed = functools.cache(ArtifactEmbedder(artifact).embed)
    often: dict[str, int] = defaultdict(int)
    for (word, _, _), count in counts.items():
        often[word] += count
    compared = {word for word in seen if often[word] >= _MIN_COUNT and word.isalpha()}
    for one, other in _near_words(synsets, compared, embed):
        same[one].add(other)
        same[other].add(one)
    verbs = _mostly_verbs(shares) & seen
    lines = []
    for word in sorted(classes):
        fields = [word, "verb" if word in verbs else classes[word]]
        if word in seen:
            fields += [",".join(sorted((each[word] - {word}) & seen)) for each in (same, derived)]
        lines.append("\t".join(fields).rstrip("\t"))
    lines += [f"{form}\t=\t{','.join(sorted(bases))}" for form, bases in sorted(_irregular_forms(folder).items())]
    lines += [
        f"{phrase}\t~\t{','.join(sorted(own))}"
        for phrase, own in sorted(_phrasal_verbs(synsets["v"], ranks, compared, embed).items())
    ]
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


def _near_words(synsets: dict[str, dict[int, _Synset]], words: set[str], embed: _Embed) -> set[tuple[str, str]]:
    """Pairs of `words` that WordNet relates and the embedder finds near."""
    candidates: dict[tuple[str, str], float] = {}
    antonyms: set[tuple[str, str]] = set()

    def relate(ones: Iterable[str], others: Iterable[str], min_cosine: float) -> None:
        for one in words.intersection(ones):
            for other in words.intersection(others) - {one}:
                pair = min(one, other), max(one, other)
                candidates[pair] = min(min_cosine, candidates.get(pair, 1.0))

    for by_offset in synsets.values():
        for synset in by_offset.values():
            lowered = [word.lower() for word in synset.words]
            relate(lowered, lowered, _MIN_COSINE["synonym"])
            for offset in synset.similar:
                relate(lowered, map(str.lower, synsets["a"][offset].words), _MIN_COSINE["similar"])
            for pointer in synset.antonyms:
                one, other = lowered[pointer.own], synsets[pointer.part][pointer.offset].words[pointer.other].lower()
                antonyms |= {(one, other), (other, one)}
    return {pair for pair, least in candidates.items() if pair not in antonyms and _cosine(*pair, embed) >= least}


def _phrasal_verbs(
    verbs: dict[int, _Synset], ranks: dict[tuple[str, str, int], int], words: set[str], embed: _Embed
) -> dict[str, set[str]]:
    """ "call off" and "cancel"; of two phrasal verbs the particles alone may be opposites, so they are not compared."""
    found: dict[str, set[str]] = defaultdict(set)
    for offset, synset in verbs.items():
        leading = [word for word in map(str.lower, synset.words) if ranks.get((word, "v", offset), 99) <= _MAX_RANK]
        for phrase in leading:
            head, _, particle = phrase.partition("_")
            if particle in _PARTICLES:
                for verb in words.intersection(leading):
                    if verb[:3] != head[:3] and _cosine(f"{head} {particle}", verb, embed) >= _MIN_COSINE["phrasal"]:
                        found[f"{head} {particle}"].add(verb)
    return found


def _cosine(one: str, other: str, embed: _Embed) -> float:
    vectors = embed(one), embed(other)
    return 0.0 if vectors[0] is None or vectors[1] is None else float(vectors[0] @ vectors[1])


def _counts(folder: Path) -> dict[tuple[str, str, int], int]:
    """How often each (word, part, sense number) was seen in the tagged texts."""
    counts: dict[tuple[str, str, int], int] = {}
    for line in (folder / "cntlist.rev").read_text(encoding="utf-8").splitlines():
        key, sense_number, count = line.split()
        word, _, rest = key.partition("%")
        counts[word, "nvara"[int(rest[0]) - 1], int(sense_number)] = int(count)
    return counts


def _leading_senses(
    folder: Path, counts: dict[tuple[str, str, int], int]
) -> tuple[dict[tuple[str, str, int], int], dict[tuple[str, str, int], float]]:
    """For each (word, part, offset): the sense's rank from 1, and its share of the word's uses in the tagged texts."""
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
        quads = [quad for quad in zip(*(pointers[start::4] for start in range(4))) if quad[2] in _PARTS]
        derived, antonyms = (
            [
                _Pointer(int(indices[:2], 16) - 1, part, int(offset), int(indices[2:], 16) - 1)
                for symbol, offset, part, indices in quads
                if symbol in symbols and indices != "0000"
            ]
            for symbols in (("+", "\\"), ("!",))
        )
        similar = [int(offset) for symbol, offset, _, _ in quads if symbol == "&"]
        yield int(fields[0]), _Synset(words, derived, similar, antonyms)


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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
