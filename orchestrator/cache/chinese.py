"""Reads a question in Chinese, which is written without spaces: phrases of the lexicon are found in the text itself.

What is left after the words that ask has to be the same on both sides, in the same order: one word is moved or replaced
only where the lexicon says that it may be.
"""

from __future__ import annotations

import functools
import re

from orchestrator.cache.lexicon import Lexicon, load_lexicon
from orchestrator.cache.reading import Reading, Token, normalize

_CLAUSE_END = re.compile(r"[。？！?!,，；;\n]+")
_LATIN = re.compile(r"[a-z0-9][a-z0-9.+#_/:@%-]*|[%°$€£¥]")


def read_chinese(text: str) -> Reading:
    lexicon = load_lexicon("zh")
    kinds: list[str] = []
    tokens: list[Token] = []
    for part, sentence in enumerate(_CLAUSE_END.split(normalize(text).lower())):
        clause = _strip(sentence, lexicon)
        if not clause:
            continue
        for pattern, replacement in lexicon.contractions:
            clause = pattern.sub(replacement, clause)
        kind = "none"
        for pattern, replacement in lexicon.frames:
            match = pattern.search(clause)
            if match is not None:
                kind, _, written = replacement.partition("} ")
                kind = kind.strip("{} ")
                clause = clause[: match.start()] + written + clause[match.end() :]
                break
        kinds.append(kind)
        tokens += _tokens(clause.replace(" ", ""), lexicon, part)
    asked = tuple(sorted(kind for kind in kinds if kind != "none")) or ("none",)
    if len(asked) > 1 and len(set(asked)) == 1:
        asked = asked[:1]
    return Reading("zh", asked, frozenset(), tuple(tokens), False)


def _strip(clause: str, lexicon: Lexicon) -> str:
    while True:
        shorter = lexicon.suffixes.sub("", lexicon.prefixes.sub("", clause.strip(), count=1), count=1).strip()
        if shorter == clause:
            return clause
        clause = shorter


@functools.lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    phrases = sorted((phrase[0] for phrase in load_lexicon("zh").groups), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, phrases)) + "|" + _LATIN.pattern + "|.", re.DOTALL)


def _tokens(text: str, lexicon: Lexicon, part: int) -> list[Token]:
    tokens = []
    for found in _pattern().findall(text):
        groups = lexicon.groups.get((found,), frozenset())
        if found in lexicon.drop and not groups:
            continue
        if not groups and not any(map(str.isalnum, found)) and found not in "%°$€£¥+-*/=<>":
            continue
        is_number = found[0].isdigit() or found in "一二两三四五六七八九十百千万"
        tokens.append(Token(found, frozenset((found,)), groups, "", "", is_number, False, False, "unknown", part))
    return tokens
