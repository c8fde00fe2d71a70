"""Which language a question is written in, as far as the guards have to know."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

# Words that stand in most questions of a language and in few of the others.
_COMMON = {
    "en": """
        the what how is are do does can i my to of in and for which who when why where should an with it please was
        were by about from have has not this that be get need want there you your would could did any
        """,
    "es": """
        el la los las qué que cómo como es son puedo mi de del en y para cuál cual quién dónde por un una con cuánto
        cuanto cuándo hay se tengo debo si lo al
        """,
    "de": """
        der die das wie was ist sind kann ich mein meine von in und für welche wer wann warum wo den dem ein eine mit
        nicht muss zu auf im wird man darf es welches
        """,
    "fr": """
        le la les comment est sont puis je mon ma de du des en et pour quel quelle qui quand pourquoi où un une avec
        que dois il au dans sur combien faut ce
        """,
}
_VOTES = {language: frozenset(words.split()) for language, words in _COMMON.items()}
_WORD = re.compile(r"[^\W\d_]+")
_LETTERS = {"es": "¿¡ñáíóú", "de": "äöüß", "fr": "çàâêîôûèëïœù"}
_OTHERS = frozenset("ąćęłńśźżčďěňřšťůžőűășțãõåøæđğışþð")  # of languages that the guards cannot read


class Guess(NamedTuple):
    """`certain` is false for a few words that could be of any language with Latin letters."""

    language: str | None
    certain: bool


@functools.lru_cache(maxsize=4096)
def guess_language(text: str) -> Guess:
    """The language of `text`: en, es, de, fr or zh; None for one that the guards have no lexicon of."""
    letters = [letter for letter in text if letter.isalpha()]
    num_han = sum("\u4e00" <= letter <= "\u9fff" for letter in letters)
    if any("\u3040" <= letter <= "\u30ff" or "\uac00" <= letter <= "\ud7af" for letter in letters):
        return Guess(None, True)
    if num_han and num_han * 3 >= len(letters) - num_han:
        return Guess("zh", True)
    if sum(letter > "\u024f" for letter in letters) * 2 > len(letters):
        return Guess(None, True)
    foreign = [word for word in _WORD.findall(text) if not _OTHERS.isdisjoint(word.lower())]
    if any(text.isupper() or not word[0].isupper() for word in foreign):  # São Paulo is a name in every language
        return Guess(None, True)
    words = _WORD.findall(text.lower())
    votes = {language: float(sum(word in own for word in words)) for language, own in _VOTES.items()}
    lowered = text.lower()
    for language, own in _LETTERS.items():
        votes[language] += 0.75 * sum(letter in own for letter in lowered)
    best = max(votes, key=lambda language: votes[language])
    if votes[best] == 0:
        return Guess("en", False)
    rivals = sorted(votes.values(), reverse=True)
    return Guess(best, rivals[0] > rivals[1])


_ACCENTS = str.maketrans("áàâäãéèêëíìîïóòôöõúùûüñç", "aaaaaeeeeiiiiooooouuuunc")


def strip_accents(text: str) -> str:
    return text.translate(_ACCENTS)
