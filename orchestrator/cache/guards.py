"""May the stored answer to one question be served to another that lies near it? Only if every guard says so.

The questions are near by cosine already; what cosine does not see is what the guards look at. Every word that carries
meaning has to find its like on the other side, by base form, by a group of the lexicon, by WordNet, or as a typing
error; numbers, names, flags and identifiers have to be the same; who does what to whom has to be the same. A word that
finds no like is a miss, also where two people would have said that it does not matter.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise

from orchestrator.cache.chinese import read_chinese
from orchestrator.cache.languages import guess_language, strip_accents
from orchestrator.cache.lexicon import Lexicon, load_lexicon, words
from orchestrator.cache.reading import ADVERBS, DANGLING, MODALS, Reading, Token, read_question
from orchestrator.cache.typos import mend
from orchestrator.cache.writing import is_shouted, look_at, rejecting_writing

# Kinds that a question without any word of asking may stand for: "capital of France?", "reset iphone password".
_NONE_LIKE = {"what", "how", "howmuch", "command"}
# Orders to do something, whose answer is the thing itself and no instruction.
_DOING = words(
    """
    write translate convert summarize summarise list calculate compute draft generate compose correct rewrite give
    describe explain compare define name suggest recommend solve create design
    """
)
# What a word that finds no like is about: for the metrics, it decides nothing.
_LABELS = {
    word: label
    for label, listed in {
        "negation": "not no never none nobody nothing neither nor hardly without avoid prevent cannot",
        "condition": """
            if unless without while because except excluding despite insteadof only when whenever until before after
            """,
        "scope": """
            all any every each only first last both either some most few several entire whole single another next
            previous final same other half part everyone everything anything always sometimes ever
            """,
        "modality": "can could may might should shall must would _can _should _must _will",
        "format": """
            table list json xml yaml csv bullet bullets point points sentence sentences paragraph word words short
            brief briefly detail detailed details step steps summary essay poem html markdown python java javascript
            rust go bash sql typescript ruby example examples
            """,
        "language": """
            english spanish german french chinese italian portuguese japanese russian korean arabic dutch latin
            """,
    }.items()
    for word in listed.split()
}


# A thing that something is done to, and one with or in which it is done.
_WHAT_OR_WHERE = [{"", f"~{preposition}"} for preposition in ("with", "in", "on", "at", "by", "for")]

# A longer question is a text to work on rather than something to look up.
MAX_CHARACTERS = 1000


def rejecting_guard(cached: str, asked: str) -> str | None:
    """The name of the first guard that will not have the two questions share an answer, or None.

    What is in no language that the guards can read is rejected, as is what is longer than `MAX_CHARACTERS`.
    """
    if len(cached) > MAX_CHARACTERS or len(asked) > MAX_CHARACTERS:
        return "length"
    one, other = guess_language(cached), guess_language(asked)
    if (
        one.language is None
        or other.language is None
        or (one.certain and other.certain and one.language != other.language)
    ):
        return "language"
    language = one.language if one.certain else other.language
    if not (one.certain or other.certain) and not (_is_english(cached) and _is_english(asked)):
        return "language"
    if guard := rejecting_writing(cached, asked, language):
        return guard
    cached, asked = _without_shouting(cached), _without_shouting(asked)
    if language != "zh":
        lexicon = load_lexicon(language)
        asked = mend(asked, cached, lexicon)
        cached = mend(cached, asked, lexicon)  # of what is mended: else two unknown words change places
    return compare(read(cached, language), read(asked, language))


def _is_english(text: str) -> bool:
    """Whether at least half of the words are: nothing else says that a few words are of no other language."""
    lexicon = load_lexicon("en")
    found = [word.lower() for word in re.findall(r"[^\W\d_]+", text)]
    known = [lexicon.word(base).usage != "unknown" for word in found for base in [min(lexicon.bases(word), key=len)]]
    return not found or sum(known) * 2 >= len(known)


def _without_shouting(text: str) -> str:
    return text.lower() if is_shouted(text) else text


def prepare(asked: str) -> None:
    """Read a question before there is another to compare it with, so that `rejecting_guard` finds it read."""
    guess = guess_language(asked)
    if len(asked) <= MAX_CHARACTERS and guess.language is not None:
        look_at(asked)
        read(_without_shouting(asked), guess.language)


@functools.lru_cache(maxsize=4096)
def read(text: str, language: str) -> Reading:
    return read_chinese(text) if language == "zh" else read_question(text, language)


def compare(cached: Reading, asked: Reading) -> str | None:
    """As `rejecting_guard`, for questions of one language that are read already."""
    if cached.language != asked.language:
        return "language"
    lexicon = load_lexicon(cached.language)
    if not _same_kind(cached, asked):
        return "kind"
    # "How will I know" asks no more than "how do I know".
    tenses = cached.tenses | asked.tenses
    if cached.tenses and asked.tenses and not cached.tenses & asked.tenses and tenses != {"present", "future"}:
        return "tense"
    if not cached.tokens or not asked.tokens:
        return "words" if cached.tokens or asked.tokens else None
    if cached.language == "zh":
        return _compare_in_order(cached.tokens, asked.tokens)
    fold = not (cached.minds_accents and asked.minds_accents)
    pairs = _align(cached.tokens, asked.tokens, lexicon, fold)
    if isinstance(pairs, str):
        return pairs
    asks_for_price = cached.tokens[0].text == asked.tokens[0].text == "_cost"
    return _check_roles(pairs, may_lead=cached.language != "en" or "what" not in cached.kinds or asks_for_price)


def _same_kind(cached: Reading, asked: Reading) -> bool:
    if cached.kinds == asked.kinds:
        return True
    if len(cached.kinds) != 1 or len(asked.kinds) != 1:
        return False
    kinds = {cached.kinds[0], asked.kinds[0]}
    if kinds == {"how", "command"}:
        commanding = cached if cached.kinds[0] == "command" else asked
        return not (commanding.tokens and commanding.tokens[0].bases & _DOING)
    return "none" in kinds and bool(kinds & _NONE_LIKE)


def _align(
    cached: Sequence[Token], asked: Sequence[Token], lexicon: Lexicon, fold: bool
) -> list[tuple[int, int, Token, Token]] | str:
    """Each word with its like, in the order of `cached`; or the guard that names what has none."""
    if sorted(token.text for token in cached if token.is_number) != sorted(
        token.text for token in asked if token.is_number
    ):
        return "number"
    pairs: list[tuple[int, int, Token, Token]] = []
    left = set(range(len(asked)))
    alone: tuple[list[Token], list[Token]] = [], []
    for index, token in enumerate(cached):
        candidates = [place for place in range(len(asked)) if matches(token, asked[place], lexicon, fold)]
        if not candidates:
            alone[0].append(token)
            continue
        best = min(
            candidates, key=lambda place: (place not in left, asked[place].text != token.text, abs(place - index))
        )
        left.discard(best)
        pairs.append((index, best, token, asked[best]))
    for place in sorted(left):
        if not any(matches(token, asked[place], lexicon, fold) for token in cached):
            alone[1].append(asked[place])
    # A soft word may be missing; one that stands where the other question has another word may not.
    if not pairs or all(alone) or any(not _is_soft(token, lexicon) for token in (*alone[0], *alone[1])):
        return _label([*alone[0], *alone[1]]) if any(alone) else pairs
    return pairs


def _is_soft(token: Token, lexicon: Lexicon) -> bool:
    return token.usage == DANGLING or bool(token.bases & lexicon.soft)


def _compare_in_order(cached: Sequence[Token], asked: Sequence[Token]) -> str | None:
    """Without spaces nothing says where a word ends, so nothing may have moved."""
    for one, other in zip(cached, asked):
        if one.text != other.text and not one.groups & other.groups:
            if one.is_number or other.is_number:
                return "number"
            return (
                "order" if sorted(token.text for token in cached) == sorted(token.text for token in asked) else "words"
            )
    return None if len(cached) == len(asked) else "words"


def _label(unmatched: list[Token]) -> str:
    for token in unmatched:
        label = _LABELS.get(token.text)
        if label:
            return label
    if any(token.grade for token in unmatched):
        return "superlative"
    if any(token.is_name or token.usage == "name" for token in unmatched):
        return "name"
    if any(any(map(str.isdigit, token.text)) for token in unmatched):
        return "identifier"
    return "words"


def matches(one: Token, other: Token, lexicon: Lexicon, fold: bool) -> bool:
    """Whether the two words mean the same; with `fold`, accents do not count: one side does without them."""
    if one.is_number or other.is_number:
        return one.is_number and other.is_number and one.text == other.text
    if one.grade != other.grade and not lexicon.groups_of(one.text) & lexicon.groups_of(other.text):
        return False
    if one.text == other.text:
        return True
    if strip_accents(one.text) == strip_accents(other.text):
        return fold
    if any(frozenset((left, right)) in lexicon.apart for left in one.bases for right in other.bases):
        return False
    if one.bases & other.bases and _differ_in_tense(one, other, lexicon):
        return False
    if one.bases & other.bases or one.groups & other.groups:
        return True
    if any(lexicon.word(left).related & other.bases for left in one.bases):
        return True
    return any(lexicon.word(right).related & one.bases for right in other.bases)


# By which a finite verb says when, though its stem is the same.
_ENDINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "es": {"past": ("ó", "aron", "ieron", "aba", "aban"), "future": ("ará", "erá", "irá", "arán", "erán", "irán")},
    "fr": {"past": ("ait", "aient"), "future": ("era", "ira", "eront", "iront")},
}


def _differ_in_tense(one: Token, other: Token, lexicon: Lexicon) -> bool:
    """ "Who wins", "who won"; "quién gana", "quién ganará"."""
    if lexicon.language == "en":
        return one.is_verb and {_english_tense(one, lexicon), _english_tense(other, lexicon)} == {"past", "present"}
    endings = _ENDINGS.get(lexicon.language, {})
    mine, theirs = (
        {tense for tense, listed in endings.items() if text.endswith(listed)} for text in (one.text, other.text)
    )
    return mine != theirs


def _english_tense(token: Token, lexicon: Lexicon) -> str:
    if token.text.endswith("ed") or (token.text in lexicon.irregular and not token.text.endswith("s")):
        return "past"
    return "present" if any(f"{base}s" == token.text for base in token.bases) else ""


def _is_strong(role: str) -> bool:
    return role != "" and role[0] not in "~^"


def _check_roles(pairs: list[tuple[int, int, Token, Token]], *, may_lead: bool) -> str | None:
    """Who does what to whom: the prepositions that matter, and the order of what has none.

    A deed `may_lead` what it is done to in one question and follow it in the other, but not where one of the two is
    asked for: "what can bees kill", "what can kill bees".
    """
    for _, _, cached, asked in pairs:
        if cached.role[:1] == asked.role[:1] == "^" and cached.role != asked.role:
            return "roles"
        if cached.role != asked.role and (_is_strong(cached.role) or _is_strong(asked.role)):
            return "roles"
    for (at, there, verb, _), (next_at, next_there, cached, asked) in pairwise(pairs):
        if verb.is_verb and next_at - at == next_there - there == 1 and {cached.role, asked.role} in _WHAT_OR_WHERE:
            return "roles"  # "draw a gun", "draw with a gun"
    moves = Counter((cached.part, asked.part) for _, _, cached, asked in pairs)
    for (at, there, cached, asked), (later_at, later_there, later_cached, later_asked) in combinations(pairs, 2):
        if (at - later_at) * (there - later_there) >= 0:
            continue
        if (
            cached.part != later_cached.part
            and asked.part != later_asked.part
            and (cached.role, asked.role) == (later_asked.role, later_cached.role)
            and (
                moves[cached.part, asked.part] <= moves[cached.part, later_asked.part]
                or moves[later_cached.part, later_asked.part] <= moves[later_cached.part, asked.part]
            )
        ):
            return "order"  # the others of a clause stayed: "in Rome when it is noon in Oslo"
        if cached.part != later_cached.part or asked.part != later_asked.part:
            continue
        if cached.role == later_cached.role == asked.role == later_asked.role == "between":
            continue
        if _is_adverbial(cached, asked) or _is_adverbial(later_cached, later_asked):
            continue
        if (cached.text in MODALS) != (later_cached.text in MODALS):
            continue  # "can a child sit", "a child can sit"
        keep_roles = cached.role == asked.role and later_cached.role == later_asked.role
        if _is_participle_once(cached, asked) and _is_participle_once(later_cached, later_asked):
            return "order"  # "print a copied page", "copy a printed page"
        if (
            may_lead
            and keep_roles
            and _is_deed(cached, asked) != _is_deed(later_cached, later_asked)
            and not (_has_subject(cached, asked) or _has_subject(later_cached, later_asked))
        ):
            continue  # "open an account", "account opening"
        if abs(at - later_at) == abs(there - later_there) == 1 and (
            (_is_participle(cached, asked) and not (later_cached.is_verb or later_asked.is_verb))
            or (_is_participle(later_cached, later_asked) and not (cached.is_verb or asked.is_verb))
        ):
            continue  # "a cancelled flight", "my flight was cancelled"
        if _is_list(at, later_at, later_cached if at < later_at else cached) and _is_list(
            there, later_there, later_asked if there < later_there else asked
        ):
            continue  # "tea or coffee", "coffee or tea"
        if not _moved_with_role(cached, asked, later_cached, later_asked):
            return "order"
    return None


def _is_deed(one: Token, other: Token) -> bool:
    """Whether the two name what is done, by a verb at least on one side: "cancel", "cancellation"."""
    return (one.is_verb and other.is_verb) or ((one.is_verb or other.is_verb) and not one.bases & other.bases)


def _has_subject(one: Token, other: Token) -> bool:
    """Whether one is the finite form of the other, whose subject stands in front: "eats pandas", "pandas eat"."""
    return one.is_verb and other.is_verb and {one.text, other.text} in [{base, f"{base}s"} for base in one.bases]


def _is_participle(one: Token, other: Token) -> bool:
    return one.text == other.text and one.is_verb and one.text.endswith(("ed", "en"))


def _is_participle_once(one: Token, other: Token) -> bool:
    return one.text.endswith("ed") != other.text.endswith("ed")


def _is_adverbial(one: Token, other: Token) -> bool:
    """Whether the two say when or how often: nothing else in a question can take their place."""
    return one.text.startswith("per_") or other.text.startswith("per_") or one.text in ADVERBS


def _is_list(place: int, other_place: int, later: Token) -> bool:
    return abs(place - other_place) == 1 and later.is_joined


def _moved_with_role(cached: Token, asked: Token, later_cached: Token, later_asked: Token) -> bool:
    """Whether two words changed places because a phrase moved: "the capital of France", "France's capital"."""
    if cached.role == later_cached.role and asked.role == later_asked.role:
        return False
    first_kept = cached.role == asked.role
    later_kept = later_cached.role == later_asked.role
    if first_kept and later_kept:
        return True
    # One had a weak preposition that the other form does without; the other must not have taken one over.
    if first_kept and cached.role == "":
        return "" in (later_cached.role, later_asked.role)
    if later_kept and later_cached.role == "":
        return "" in (cached.role, asked.role)
    return False
