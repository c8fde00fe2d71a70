"""The default filter, by rules: secrets in their published formats, card numbers, configured words.

Every rule takes time in line with the length of the text: a pattern begins where no letter or digit stands before it,
with characters of its own, and then reads one run of one kind.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Finding(NamedTuple):
    """What kind of thing was found, and where: from character `start` to before `end`. Never the text itself."""

    kind: str
    start: int
    end: int


class SafetyFilter(Protocol):
    def find(self, text: str) -> list[Finding]:
        """All that must not be in an answer; empty for one that is fine. Must not block: it runs on the event loop."""

    def find_open(self, text: str) -> int:
        """Where something may begin that more text makes whole; the length of the text if nothing does.

        Whatever follows, it changes nothing of what is found to begin before that place. Must not block either.
        """


# By what a secret of this kind has in it, so that most texts are done with a search for that; as their makers, or
# their scanners for leaked secrets, publish the formats.
_BEFORE = r"(?<![A-Za-z0-9])"  # names are put before keys with _ and -
_SECRETS: tuple[tuple[str, str, str], ...] = (
    ("private_key", "-----BEGIN ", r"-----BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"),
    ("aws_key", "AKIA", _BEFORE + r"AKIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("aws_key", "ASIA", _BEFORE + r"ASIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("github_token", "gh", _BEFORE + r"gh[pousr]_[A-Za-z0-9]{36,255}"),
    ("github_token", "github_pat_", _BEFORE + r"github_pat_[A-Za-z0-9_]{22,255}"),
    ("gitlab_token", "glpat-", _BEFORE + r"glpat-[A-Za-z0-9_-]{20,64}"),
    ("google_key", "AIza", _BEFORE + r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    ("slack_token", "xox", _BEFORE + r"xox[abeoprs]-[A-Za-z0-9-]{10,250}"),
    ("stripe_key", "k_live_", _BEFORE + r"[rs]k_live_[A-Za-z0-9]{16,250}"),
    # OpenAI's, Anthropic's and those of APIs that follow them.
    ("api_key", "sk-", _BEFORE + r"sk-(?=[A-Za-z_-]{0,40}[0-9])[A-Za-z0-9_-]{20,250}"),
    ("huggingface_token", "hf_", _BEFORE + r"hf_[A-Za-z0-9]{34}(?![A-Za-z0-9])"),
    ("npm_token", "npm_", _BEFORE + r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
    ("pypi_token", "pypi-AgE", _BEFORE + r"pypi-AgE[A-Za-z0-9_-]{50,250}"),
    ("sendgrid_key", "SG.", _BEFORE + r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    ("jwt", ".eyJ", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,512}\.eyJ[A-Za-z0-9_-]{8,64}"),  # as far as tells it
    ("twilio_key", "SK", _BEFORE + r"SK[0-9a-f]{32}(?![A-Za-z0-9])"),
    ("groq_key", "gsk_", _BEFORE + r"gsk_[A-Za-z0-9]{40,80}"),
    ("xai_key", "xai-", _BEFORE + r"xai-[A-Za-z0-9]{60,120}"),
    ("telegram_token", ":AA", _BEFORE + r"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])"),
    ("docker_token", "dckr_pat_", _BEFORE + r"dckr_pat_[A-Za-z0-9_-]{27}"),
    ("shopify_token", "shp", _BEFORE + r"shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}"),
    # Without a prefix of its own: told by its name, and by the capitals that no hash in hexadecimal has.
    (
        "aws_secret",
        "",
        r"[sS](?:ecret|ECRET)[ _-]?(?:(?i:access)[ _-]?)?(?i:key)[\"'`]?[ \t]{0,3}(?:=>?|:)[ \t]{0,3}[\"'`]?"
        r"(?=[a-z0-9/+]{0,39}[A-Z])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    ("our_key", "rt-", _BEFORE + r"rt-[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])"),  # `orchestrator.limits.keys`
)
_PATTERNS = tuple((kind, mark, re.compile(pattern)) for kind, mark, pattern in _SECRETS)

# The longest text that a rule must see at once.
MAX_CHARACTERS = 640
# What may become a secret: a run of these characters, and those with spaces in them.
_TOKEN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+/=-"
_OPEN_SECRET = re.compile(
    r"(?:-----BEGIN [A-Z0-9 ]{0,48}-{0,5}"
    r"|[sS](?:ecret|ECRET)[ _A-Za-z-]{0,12}[\"'`]?[ \t]{0,3}[:=>]{0,2}[ \t]{0,3}[\"'`]?[A-Za-z0-9/+]{0,40}"
    r"|[0-9]{8,10}:[A-Za-z0-9_-]{0,40})\Z"
)

# Digits in groups, as cards show them (4-4-4-4, 4-6-5, 4-4-4-4-3), or in one.
_DIGITS = re.compile(r"[0-9]+(?:[ -][0-9]+)*")
_GROUP = re.compile(r"[0-9]+")
_MIN_CARD, _MAX_CARD = 12, 19
# Other gaps, those of tables, lists and decimals too: they count only all alike, between the groups of a card.
_GAP = r"[./]|,[ \t]?|[ \t]?\|[ \t]?|[ \t]{2,4}|[ \t]{0,2}\r?\n[ \t]{0,4}"
_GROUPED = re.compile(
    rf"(?<![0-9])(?:[0-9]{{4}}(?P<gap>{_GAP})[0-9]{{4}}(?P=gap)[0-9]{{4}}(?P=gap)[0-9]{{4}}"
    rf"(?P<last>(?P=gap)[0-9]{{3}})?(?![0-9])(?!(?P=gap)[0-9]{{4}}(?![0-9]))"
    rf"|[0-9]{{4}}(?P<amex>{_GAP})[0-9]{{6}}(?P=amex)[0-9]{{4,5}}(?![0-9]))"
)
# Of a column of numbers of four digits, four in a row are no card.
_COLUMN = re.compile(rf"(?<![0-9])[0-9]{{4}}(?:{_GAP})\Z")
_REACH = 16  # characters of a group and a gap, and one more
# The digits of a card and of the group behind it that may still come, and a gap that may be half.
_OPEN_CARD = re.compile(
    rf"[0-9](?:(?:[ -]|{_GAP})?[0-9]){{0,23}}(?:[./-]|,[ \t]?|[ \t]?\|[ \t]?|[ \t]{{0,4}}(?:\r?\n?[ \t]{{0,4}}))\Z"
)
# Digits of other scripts and widths, spaces and dashes (NFKC, and beyond): a character for a character.
_FOREIGN = re.compile(
    "(?![0-9])\\d|[\u00a0\u2000-\u200a\u202f\u205f\u3000]|[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]|[\u2024\uff0e\uff0f]"
)
_MARKS = {"\u2024": ".", "\uff0e": ".", "\uff0f": "/"}
_MAX_GROUPS = 6
# The issuers' ranges by their first four digits (from, to), and the lengths of their numbers (ISO/IEC 7812 and the
# issuers' own lists).
_ISSUERS: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (4000, 4999, (13, 16, 19)),  # Visa
    (5100, 5599, (16,)),  # Mastercard
    (2221, 2720, (16,)),
    (3400, 3499, (15,)),  # American Express
    (3700, 3799, (15,)),
    (3000, 3059, (14, 16, 19)),  # Diners Club
    (3600, 3699, (14, 16, 19)),
    (3800, 3999, (14, 16, 19)),
    (3528, 3589, (16, 17, 18, 19)),  # JCB
    (6011, 6011, (16, 19)),  # Discover
    (6440, 6599, (16, 19)),
    (6200, 6299, (16, 17, 18, 19)),  # UnionPay
    (2200, 2204, (16, 17, 18, 19)),  # Mir
    *(
        (first, first, tuple(range(12, 20))) for first in (5018, 5020, 5038, 5893, 6304, 6759, 6761, 6762, 6763)
    ),  # Maestro
)
_FIRST_DIGITS = "23456"
# By the first four digits, the lengths that a number of this issuer may have.
_LENGTHS = {first: lengths for low, high, lengths in _ISSUERS for first in range(low, high + 1)}
_SPACE = re.compile(r"[^\S ]")
_VALUE = {str(digit): digit for digit in range(10)}
_DOUBLED = {str(digit): 2 * digit - 9 * (digit > 4) for digit in range(10)}


class RuleFilter:
    """`words` count whatever their case, and whole, unless they begin or end in a script without spaces."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = sorted(_fold(word) for word in words)
        self._longest = max(map(len, self._words), default=0)

    def find(self, text: str) -> list[Finding]:
        found = [
            Finding(kind, *match.span())
            for kind, mark, pattern in _PATTERNS
            if mark in text
            for match in pattern.finditer(text)
        ]
        found += find_cards(text)
        if self._words:
            found += self._find_words(text)
        return sorted(found, key=lambda each: each.start)

    def find_open(self, text: str) -> int:
        start = max(0, len(text) - MAX_CHARACTERS)  # what began before it is whole, or will never be
        tail = text[start:]
        places = [len(tail.rstrip(_TOKEN))]
        places += [match.start() for match in (_OPEN_SECRET.search(tail), _OPEN_CARD.search(_plain(tail))) if match]
        return min(start + min(places), self._find_open_word(text))

    def _find_open_word(self, text: str) -> int:
        """Where a word begins of which the text has only the first characters, or the last but not what follows."""
        start = max(0, len(text) - self._longest - 1)
        folded = _fold(text[start:])
        for place in range(1 if start else 0, len(folded)):
            rest = folded[place:]
            index = bisect_left(self._words, rest)
            if index < len(self._words) and self._words[index].startswith(rest) and _is_edge(folded, place - 1, place):
                return start + place
        return len(text)

    def _find_words(self, text: str) -> list[Finding]:
        folded, found = _fold(text), []
        for word in self._words:
            start = folded.find(word)
            while start >= 0:
                end = start + len(word)
                if _is_edge(folded, start - 1, start) and _is_edge(folded, end, end - 1):
                    found.append(Finding("word", start, end))
                start = folded.find(word, end)
        return found


def find_cards(text: str) -> list[Finding]:
    """Numbers that an issuer may have given: by their first digits, their length and their check digit."""
    text, found = _plain(text), []
    for match in _DIGITS.finditer(text):
        if match.end() - match.start() < _MIN_CARD:
            continue
        groups = [(each.start(), each.group()) for each in _GROUP.finditer(text, *match.span())]
        index = 0
        while index < len(groups):
            start, first = groups[index]
            num = 0
            near = groups[index : index + _MAX_GROUPS]
            if first[0] in _FIRST_DIGITS and near[-1][0] + len(near[-1][1]) - start >= _MIN_CARD:
                num = _count_card_groups([digits for _, digits in near])
            if num:
                last_start, last = groups[index + num - 1]
                found.append(Finding("card_number", start, last_start + len(last)))
            index += num or 1
    for match in _GROUPED.finditer(text):
        if _COLUMN.search(text, max(0, match.start() - _REACH), match.start()):
            continue
        ends = [match.end()] if match["last"] is None else [match.end(), match.start("last")]
        for end in ends:
            parts = _GROUP.findall(text, match.start(), end)
            if _count_card_groups(parts) == len(parts):
                found.append(Finding("card_number", match.start(), end))
                break
    return found


def _plain(text: str) -> str:
    """Digits, spaces and dashes as ASCII has them, each in its place."""
    return text if text.isascii() else _FOREIGN.sub(lambda match: _as_ascii(match[0]), text)


def _as_ascii(char: str) -> str:
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    return " " if char.isspace() else _MARKS.get(char, "-")


def _count_card_groups(groups: Sequence[str]) -> int:
    """Of how many of the first groups a card number is made; 0 if of none."""
    number = ""
    for num, group in enumerate(groups, 1):
        number += group
        if len(number) > _MAX_CARD:
            return 0
        if len(number) in _LENGTHS.get(int(number[:4]), ()) and has_check_digit(number):
            return num
    return 0


def has_check_digit(number: str) -> bool:
    """Luhn's, ISO/IEC 7812-1 annex B."""
    kept, doubled = number[::-2], number[-2::-2]
    return (sum(map(_VALUE.__getitem__, kept)) + sum(map(_DOUBLED.__getitem__, doubled))) % 10 == 0


def _fold(text: str) -> str:
    """In lower case and with plain spaces, each character in its place."""
    text = _SPACE.sub(" ", text)
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(char if len(char.lower()) > 1 else char.lower() for char in text)


def _is_edge(text: str, outside: int, inside: int) -> bool:
    """Whether a word ends between two characters of the text."""
    if not 0 <= outside < len(text) or not text[outside].isalnum():
        return True
    return not text[inside].isalnum() or _has_no_spaces(text[inside]) or _has_no_spaces(text[outside])


def _has_no_spaces(char: str) -> bool:
    """Of Chinese, Japanese, Thai and their like, which write words without spaces between them."""
    return "\u0e00" <= char <= "\u0eff" or "\u1780" <= char <= "\u17ff" or "\u3040" <= char <= "\u9fff"
