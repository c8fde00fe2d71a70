"""What a question says, as far as the guards can tell: its kind, and its words with what governs each of them.

A `Reading` is made once per question and kept with its cache entry. What is not understood stays a word like any other:
it has to stand in the other question too, so that it can cost a hit but never makes a wrong one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.cache.lexicon import Lexicon, load_lexicon
from orchestrator.cache.lexicon import words as words_of

_WRITTEN = re.compile(
    r"https?://\S+|[\w.+-]+@[\w-]+\.[\w.]+"  # addresses
    r"|(?<![\w-])--?[a-z][\w-]*"  # flags
    r"|\d+[a-z_][\w-]*|\d+(?:[.,:/-]\d+)*|[$€£¥₹%°&+*=<>^/#]"
    r"|[^\W\d_]+\+\+|[^\W\d_]#(?!\w)"  # c++, c#
    r"|\w+(?:['.@_/:-]\w+)*"
)
_CURRENCY_BEFORE = re.compile(r"([$€£¥₹])\s?(\d[\d.,]*\d|\d)")
_ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
_GLUED_UNIT = re.compile(
    r"(\d)(km/h|kmh|kph|mph|km|cm|mm|kg|mg|ml|gb|mb|tb|kb|lbs|lb|oz|ft|hrs|hr|min|usd|eur|gbp|g|m|h|s|l|c|f|k|w|v|°c|°f)\b"
)
_SENTENCE_END = re.compile(r"(?<=[.?!;:])\s+|\n+|\s+[-–—]+\s+|\.\.+|(?<=[?!])")
_INNER_END = re.compile(r"[.?!;:,]\s+\w")
_QUOTES = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "´": "'", "“": '"', "”": '"', "«": '"', "»": '"', "¿": " ", "¡": " "}
)
_INTERROGATIVE = re.compile(
    r"\b(?:how|what|which|who|whom|whose|where|when|why|c[oó]mo|qu[eé]|cu[aá]l(?:es)?|qui[eé]n(?:es)?|d[oó]nde|cu[aá]ndo"
    r"|cu[aá]nt[oa]s?|wie|was|welche[rsmn]?|wer|wen|wem|wohin|woher|wo|wann|warum|wieso|weshalb|comment|quel(?:le)?s?|qui"
    r"|que|où|quand|combien|pourquoi)\b"
)
_PARTICLES = words_of("on off up down in out back over away")
_SAME_ROLE = {
    "into": "to",
    "onto": "to",
    "versus": "",
    "al": "a",
    "au": "à",
    "aux": "à",
    "zum": "zu",
    "zur": "zu",
    "within": "~in",
}
# German articles that say who does it to whom.
_CASES = {"der": "^1", "ein": "^1", "den": "^4", "einen": "^4", "dem": "^3", "einem": "^3", "des": "^2", "eines": "^2"}
_CLAUSE_ROLES = words_of(
    "without unless except despite insteadof excluding if while because "
    "sin si excepto salvo mientras porque aunque ohne wenn falls außer trotz statt weil obwohl "
    "sans si sauf malgré parce "
    # They also stand alone: "what may I do before?"
    "when once although though before after until since during under over above below behind through times plus minus "
    "antes después hasta durante bajo vor bis seit über unter bevor nachdem avant après jusque depuis"
)
# Behind them a phrase begins that no preposition governs any more.
_COPULAS = words_of("is are was were do does did ist sind war es son est sont")
_LIGHT_VERBS = words_of("be do have get go")
MODALS = words_of("can could may might should must will would")
_DETERMINERS = words_of("the a an my your our his her their this that these those")
ADVERBS = words_of(
    "today tomorrow yesterday tonight now hoy ahora mañana ayer heute jetzt gestern maintenant demain hier"
)
_GERMAN_MOST = re.compile(r"\w{3,}st(?:e|en|er|es|em)")
_PUNCTUATION = " ,.:;!?\"'()"
# The usage of a preposition that ends a clause: it may be missing in the other question, but not be another one there.
DANGLING = "dangling"
_MAX_GAP = 4  # words between a verb and its particle: "turn the living room light off"


class Token(NamedTuple):
    """One word or phrase that has to find its like in the other question."""

    text: str
    bases: frozenset[str]
    groups: frozenset[str]
    role: str  # the preposition that governs it, or ""
    grade: str  # "", "more" or "most"
    is_number: bool
    is_verb: bool
    is_name: bool
    usage: str
    part: int  # which sentence or clause it stands in
    is_joined: bool = False  # "and" or "or" stands before it


# A token's other fields, for a word that stands for itself alone.
_PLAIN = (frozenset[str](), "", "", False, False, False, "plain", 0)


class Reading(NamedTuple):
    """One question, read. `kinds` are those of its clauses that ask or command something.

    Whoever writes neither accents nor capitals does not `minds_accents`.
    """

    language: str
    kinds: tuple[str, ...]
    tenses: frozenset[str]
    tokens: tuple[Token, ...]
    minds_accents: bool


def normalize(text: str) -> str:
    """NFKC, plain quotes, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_QUOTES).split())


def read_question(text: str, language: str) -> Reading:
    """Read a question in a language that is written with spaces."""
    lexicon = load_lexicon(language)
    plain = normalize(text)
    names = _names(plain)
    lowered = plain.lower()
    for pattern, replacement in lexicon.contractions:
        lowered = pattern.sub(replacement, lowered)
    lowered = _GLUED_UNIT.sub(r"\1 \2", _ORDINAL.sub(r"#\1", lowered))
    lowered = _CURRENCY_BEFORE.sub(r"\2 \1 ", lowered)
    lowered = _spell_dates(lowered, lexicon)
    kinds: list[str] = []
    tenses: set[str] = set()
    tokens: list[Token] = []
    said: set[str] = set()
    for part, (clause, asks) in enumerate(_clauses(lowered, lexicon)):
        kind, rest = _frame(clause, lexicon) if asks else ("none", clause)
        if part and kind != "none" and not list(_tokens(_words(rest), lexicon, names, part)):
            if kinds == ["none"]:
                kinds[0] = kind  # "I want to open an account. How?"
            continue
        if not asks:
            # "I want to open an account, how?" and "how do I open an account" are about the same.
            stated, without = _frame(clause, lexicon)
            rest = without if stated == "how" else clause
        words = _words(clause)
        tenses |= {lexicon.tenses[word] for word in words if word in lexicon.tenses}
        own = list(_tokens(_words(rest), lexicon, names, part))
        if part and kind != "none" and kinds in (["none"], [kind]) and {token.text for token in own} <= said:
            kinds[0] = kind  # "TCP or UDP: what is the difference?"
            continue
        said |= {token.text for token in own}
        if (
            kind == "none"
            and asks
            and own
            and own[0].is_verb
            and own[0].text not in MODALS
            and own[0].role == ""
            and part == 0
            and own[0].text[-1] != "s"
            and rest.split()[0] not in _DETERMINERS
        ):
            kind = "command"
        if kind != "none" or own:
            kinds.append(kind)
        tokens += own
    if not tokens and (set(kinds) <= {"none"} or _INNER_END.search(lowered)):
        # "How are you?", "I need time. What can I do?": what says nothing beside a question is all there is.
        tokens = [Token(word, frozenset((word,)), *_PLAIN) for word in _words(lowered)]
    asked = tuple(sorted(kind for kind in kinds if kind != "none")) or ("none",)
    return Reading(
        language,
        asked,
        frozenset(tenses),
        tuple(tokens),
        any(ord(letter) > 127 and letter.isalpha() for letter in lowered)
        or (language != "en" and plain.lstrip("¿¡")[:1].isupper()),
    )


def _names(plain: str) -> frozenset[str]:
    """Words with a capital that do not begin a sentence, lower-cased; none if the whole text is in capitals."""
    if plain.upper() == plain:
        return frozenset()
    return frozenset(word.lower() for word in re.findall(r"(?<![.?!:]\s)(?<=\s)[A-ZÀ-Þ][\w'-]*", plain))


def _spell_dates(text: str, lexicon: Lexicon) -> str:
    """ "march 3rd, 2024" and "3 march 2024" become one word; so does a month alone stay one."""
    if not lexicon.months:
        return text
    month = "|".join(lexicon.months)

    def written(groups: tuple[str | None, ...]) -> str:
        name, day, year = groups
        return f" date_{lexicon.months[name or '']}_{int(day or 0)}" + (f" {year}" if year else "")

    text = re.sub(
        rf"\b({month})\.? (?:the )?#?(\d{{1,2}})(?![\d:])(?:,? (\d{{4}}))?\b",
        lambda match: written(match.groups()),
        text,
    )
    return re.sub(
        rf"\b(?:the )?#?(\d{{1,2}})\.? (?:of |de |del )?({month})\b(?:,? (?:de |del )?(\d{{4}}))?",
        lambda match: written((match[2], match[1], match[3])),
        text,
    )


def _clauses(text: str, lexicon: Lexicon) -> Iterator[tuple[str, bool]]:
    """What is said, without politeness, and whether it may ask: what stands before the question itself does not."""
    for sentence in _SENTENCE_END.split(text):
        whole = (sentence or "").strip(_PUNCTUATION)
        clause = _strip(whole, lexicon)
        if clause and not _is_polite(clause, lexicon, was_polite=clause != whole):
            yield from _split(clause, lexicon)


def _split(clause: str, lexicon: Lexicon) -> Iterator[tuple[str, bool]]:
    clause = _without_polite_head(clause, lexicon)
    subordinate = lexicon.subordinate.match(clause) is not None
    if subordinate or _frame(clause, lexicon)[0] == "none":
        for found in lexicon.asking.finditer(clause):
            head, tail = clause[: found.start()].strip(" ,:"), _strip(clause[found.start() :], lexicon)
            if head in ("", "i", "we") or _frame(f"{tail} ", lexicon)[0] == "none":
                continue
            if subordinate and "," not in clause[: found.start()]:
                continue
            if not tail.count(" ") and not subordinate:
                yield f"{tail} {head}", True  # "the capital of Peru is what?"
                return
            if not _is_polite(head, lexicon):
                yield head, False
            yield tail, True
            return
    yield clause, True


def _without_polite_head(clause: str, lexicon: Lexicon) -> str:
    """ "might you know whether coffee is healthy" asks whether coffee is healthy."""
    for found in lexicon.asking.finditer(clause):
        head, tail = clause[: found.start()], clause[found.start() :]
        if _INTERROGATIVE.search(head):
            break
        if (
            head.strip(" ,:") not in ("", "i", "we")
            and _is_polite(head, lexicon)
            and _frame(tail, lexicon)[0] != "none"
        ):
            return _strip(tail, lexicon)
    return clause


def _is_polite(clause: str, lexicon: Lexicon, *, was_polite: bool = False) -> bool:
    """Whether `clause` is politeness alone: of such words, and of one that says nothing else unless it `was_polite`."""
    words = re.findall(r"[^\W\d_]+|\d+", clause)
    if not lexicon.people.isdisjoint(words) and lexicon.querying.isdisjoint(words):
        return False
    return all(word in lexicon.polite for word in words) and (
        was_polite or any(word in lexicon.polite_marks for word in words)
    )


def _strip(clause: str, lexicon: Lexicon) -> str:
    """`clause` without politeness around it."""
    clause = clause.strip(_PUNCTUATION)
    while True:
        shorter = lexicon.prefixes.sub("", clause, count=1)
        shorter = lexicon.suffixes.sub("", shorter, count=1).strip(_PUNCTUATION)
        if shorter == clause or not shorter:
            return shorter
        clause = shorter


def _frame(clause: str, lexicon: Lexicon) -> tuple[str, str]:
    """The kind of question, and the clause without the words that say so."""
    for pattern, replacement in lexicon.frames:
        match = pattern.search(clause)
        if match is not None:
            kind, _, written = replacement.partition("} ")
            return kind.strip("{} "), match.expand(written) + " " + clause[match.end() :]
    return "none", clause


def _words(text: str) -> list[str]:
    words: list[str] = []
    for word in _WRITTEN.findall(text):
        if word.endswith(("'s", "s'")) and len(word) > 3:
            word = word[:-2] if word.endswith("'s") else word[:-1]
        if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", word):
            word = word.replace(",", "")
        words.append(word)
    return words


def _tokens(words: list[str], lexicon: Lexicon, names: frozenset[str], part: int) -> Iterator[Token]:
    role = ""
    dangling = ""  # a preposition that nothing has followed yet
    grade = ""
    joins = False
    is_anyone = "you" in words
    part *= 100
    position = 0
    taken: set[int] = set()
    while position < len(words):
        if position in taken:
            position += 1
            continue
        word = words[position]
        phrase, used = _phrase(words, position, lexicon)
        if len(used) > 1:
            taken.update(used)
            token = _token(" ".join(phrase), frozenset(), lexicon.groups[phrase], role, grade, lexicon, names, part)
            yield token._replace(is_joined=joins)
            dangling, grade, joins = "", "", False
            role = role if used[-1] == position + len(used) - 1 else ""
            position += 1
            continue
        if (
            "-" in word
            and (word,) not in lexicon.groups
            and not word.startswith("-")
            and not any(map(str.isdigit, word))
        ):
            words[position : position + 1] = word.split("-")
            continue
        if word.startswith("#") or word in lexicon.numbers or (word[0].isdigit() and (word,) not in lexicon.groups):
            number = lexicon.numbers.get(word, word)
            yield Token(number, frozenset((number,)), frozenset(), role, "", True, False, False, "number", part, joins)
            dangling, joins = "", False
        elif word in lexicon.strong:
            following = words[position + 1] if position + 1 < len(words) else ""
            if word == "to" and lexicon.language == "en":
                is_infinitive = following in _LIGHT_VERBS or (
                    following not in lexicon.drop and lexicon.word(following).usage == "verb"
                )
                role = "" if is_infinitive else "to"
                dangling = role
            else:
                role = _SAME_ROLE.get(word, word)
                part += word in _CLAUSE_ROLES
                if role in _CLAUSE_ROLES:
                    yield Token(role, frozenset((role,)), frozenset(), "", "", False, False, False, "strong", part)
                else:
                    dangling = word
        elif word in lexicon.weak:
            role = "~" + word
            dangling = word
        elif word in lexicon.conjunctions:
            joins = True
            position += 1
            continue
        elif word in lexicon.drop or word in lexicon.pronouns or (word == "your" and is_anyone):
            if word in _COPULAS:
                role = ""
            if lexicon.language == "de" and word in _CASES and (role == "" or role.startswith("^")):
                role = _CASES[word]
        elif word in ("more", "most") and lexicon.language == "en" and position + 1 < len(words):
            grade = word
            position += 1
            continue
        else:
            if word in ADVERBS or (word in MODALS and lexicon.language == "en"):
                role = ""
            base, own_grade = lexicon.graded.get(word, (word, ""))
            bases = lexicon.bases(base)
            groups = frozenset().union(*(lexicon.groups.get((each,), frozenset()) for each in {base, *bases}))
            if own_grade:
                groups |= lexicon.groups.get((word,), frozenset())
            if lexicon.language == "de" and _GERMAN_MOST.fullmatch(word):
                own_grade = "most"
            token = _token(word, bases, groups, role, own_grade or grade, lexicon, names, part)
            yield token._replace(is_joined=joins)
            dangling, joins = "", False
            if role.startswith("^"):
                role = ""
            if lexicon.word(word).usage == "verb" and position == 0:
                role = ""
        grade = ""
        position += 1
    if dangling:  # "who is it for", "wie melde ich mich an"
        yield Token(dangling, frozenset((dangling,)), frozenset(), "", "", False, False, False, DANGLING, part)


def _token(
    text: str,
    bases: frozenset[str],
    groups: frozenset[str],
    role: str,
    grade: str,
    lexicon: Lexicon,
    names: frozenset[str],
    part: int,
) -> Token:
    usages = {lexicon.word(base).usage for base in bases} or {"phrase"}
    usage = next((each for each in ("common", "verb", "rare", "name") if each in usages), min(usages))
    if lexicon.language == "de":
        return Token(
            text,
            bases,
            groups,
            role,
            grade,
            False,
            bool(names) and text not in names and len(text) > 4,
            text in names,
            usage,
            part,
        )
    is_verb = "verb" in usages or (text.split()[0] != text and lexicon.word(text.split()[0]).usage == "verb")
    return Token(text, bases, groups, role, grade, False, is_verb, text in names, usage, part)


def _phrase(words: list[str], position: int, lexicon: Lexicon) -> tuple[tuple[str, ...], list[int]]:
    """The longest phrase of the lexicon that begins at `position`, and the positions of its words."""
    for length in range(min(lexicon.longest_phrase, len(words) - position), 1, -1):
        found = _match(words[position : position + length], lexicon)
        if found is not None:
            return found, list(range(position, position + length))
    if lexicon.language == "en":
        for gap in range(2, min(_MAX_GAP + 2, len(words) - position)):
            after = words[position + gap + 1 : position + gap + 2]
            if (
                words[position + gap] in _PARTICLES
                and not set(after) - lexicon.strong - lexicon.weak - lexicon.conjunctions
            ):
                found = _match([words[position], words[position + gap]], lexicon)
                if found is not None:
                    return found, [position, position + gap]
                break
    return (words[position],), [position]


def _match(words: list[str], lexicon: Lexicon) -> tuple[str, ...] | None:
    plain = tuple(words)
    if plain in lexicon.groups:
        return plain
    # Only the first and the last word of a phrase are inflected: "switched on", "light bulbs".
    for first in lexicon.bases(words[0]):
        for last in lexicon.bases(words[-1]):
            candidate = (first, *plain[1:-1], last)
            if candidate in lexicon.groups:
                return candidate
    return None
