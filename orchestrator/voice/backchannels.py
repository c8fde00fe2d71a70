"""Little words that say "I am listening", with which nobody means to interrupt; and words with which nobody ends."""

from __future__ import annotations

import itertools
import re

MAX_WORDS = 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LISTENING = _words(
    "yeah yea yep yup yes ok okay k mhm mm mmm mmhmm hm hmm hmmm uh huh uhhuh aha ah oh wow right sure alright "
    "cool great good nice really exactly indeed absolutely"
)
_LISTENING_PAIRS = frozenset({("i", "see"), ("got", "it"), ("all", "right"), ("of", "course"), ("go", "on")})
# No sentence is over behind these, however it was said and whatever mark the transcript has ...
_NEVER_LAST = _words("a an the and or but nor because although while if unless than my your our their very um uh er")
# ... and behind these only a question: "What is it for?"
_LAST_IN_QUESTIONS = _words(
    "of to in into onto from with without for at by is are was were am do does did has have had can could would "
    "will should about between against through during his her its so whether"
)


def words_of(text: str) -> list[str]:
    """Lower case, without marks: "Mm-hmm." is "mm", "hmm"."""
    return re.findall(r"[a-z']+|\d+", text.lower())


def is_backchannel(text: str) -> bool:
    """Whether `text` is nothing but such words, and few (who says one again and again says one); also
    if it is nothing at all."""
    words = [word for word, _ in itertools.groupby(words_of(text))]
    if len(words) > MAX_WORDS:
        return False
    at = 0
    while at < len(words):
        if tuple(words[at : at + 2]) in _LISTENING_PAIRS:
            at += 2
        elif words[at] in _LISTENING:
            at += 1
        else:
            return False
    return True


def hangs(text: str) -> bool:
    """Whether the last word calls for another one: "I would like to"."""
    words = words_of(text)
    if not words:
        return False
    is_question = text.rstrip().endswith("?")
    return (
        words[-1] in _NEVER_LAST
        or (words[-1] in _LAST_IN_QUESTIONS and not is_question)
        or text.rstrip().endswith(("...", "…", "-", "—"))
    )


def ends_like_a_sentence(text: str) -> bool:
    return text.rstrip("\"'”’) ").endswith((".", "!", "?"))
