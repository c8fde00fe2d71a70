"""The safety filter's rules, and an answer held back sentence by sentence."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.answer import Answer
from orchestrator.config import Generation, Tier
from orchestrator.limits.keys import new_secret
from orchestrator.request import ChatRequest
from orchestrator.safety.check import PART_CHARACTERS, find_all
from orchestrator.safety.hold import FINISH_REASON, MAX_HELD_CHARACTERS, FlaggedError, Held
from orchestrator.safety.rules import MAX_CHARACTERS, Finding, RuleFilter, find_cards, has_check_digit
from orchestrator.stages import Stage
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.text import Piece
from orchestrator.streaming.tool_calls import ToolCallDelta
from perf.safety_speed import HOSTILE

CARD = "4111 1111 1111 1111"
# Made up, each in its published format; put together here so that no scanner takes this file for a leak.
SECRETS = {
    "private_key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "aws_key": "AKIA" + "IOSFODNN7EXAMPLE",
    "github_token": "ghp_" + "a1B2" * 9,
    "gitlab_token": "glpat-" + "x" * 20,
    "google_key": "AIza" + "b" * 35,
    "slack_token": "xoxb-" + "123456789012-abc",
    "stripe_key": "sk_live_" + "0" * 24,
    "api_key": "sk-proj-" + "abc123" * 5,
    "huggingface_token": "hf_" + "q" * 34,
    "npm_token": "npm_" + "z" * 36,
    "pypi_token": "pypi-AgE" + "i" * 60,
    "sendgrid_key": "SG." + "a" * 22 + "." + "b" * 43,
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0" + ".s" * 8,
    "our_key": "rt-" + "k" * 43,
    "twilio_key": "SK" + "0123456789abcdef" * 2,
    "groq_key": "gsk_" + "a1B2" * 13,
    "xai_key": "xai-" + "a1B2" * 20,
    "telegram_token": "123456789:AA" + "b" * 33,
    "docker_token": "dckr_pat_" + "c" * 27,
    "shopify_token": "shpat_" + "0123456789abcdef" * 2,
    "aws_secret": "secretAccessKey: " + "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
}


def kinds(text: str, *words: str) -> list[str]:
    return [each.kind for each in RuleFilter(words).find(text)]


# --- rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found_wherever_they_stand(kind: str) -> None:
    for text in ("{}", "key={}", '{{"key": "{}"}}', "Yours is {}.", "知道{}吗", "\n{}\n"):
        text = text.format(SECRETS[kind])
        (finding,) = RuleFilter().find(text)
        assert finding.kind == kind
        assert SECRETS[kind].startswith(text[finding.start : finding.end])


@pytest.mark.parametrize("kind", sorted(set(SECRETS) - {"jwt", "private_key", "aws_secret"}))
def test_a_name_before_it_hides_no_secret(kind: str) -> None:
    for before in ("key_", "my-", "für "):
        assert kinds(f"It is {before}{SECRETS[kind]}.") == [kind]


def test_our_own_keys_are_among_them() -> None:
    assert kinds(f"It is {new_secret()}") == ["our_key"]


@pytest.mark.parametrize(
    "text",
    [
        "Use sk-learn-like-names-with-many-dashes",
        "the task-based-approach-to-language-teaching-2024",
        "AKIA is a prefix; AKIASHORT is none",
        "-----BEGIN CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----",
        "ghost_writer, ghp_short, eyJ alone, a.eyJ",
        "risk-free-investment-1234567890-abcdefghijk",
        "https://example.com/rt-0123",
        "Call +49 30 1234 5678 or 0800 123 4567.",
        "ISBN 978-3-16-148410-0",
        "In 2019 2020 2021 2022 it rained.",
        "4111 1111 1111 1112",
        "1234567890123456",
        "secret_key = da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "commit 5c529461aa3b9f0d8f3f8a2b9d4e1c0a7b6f5e4d, tree 4b825dc642cb6eb9a060e54bf8d69288fbee4904",
        "sha256 9f86d081884c7d659a2feaa822ad015a3bf4f1b2b0b822cd15d6c15b0f00a08, SKU SK0123456789",
        "The secret key: to keep at it every day, whatever the weather and the company may say.",
        "4000\n4010\n4020\n4030\n4040\n4050\n4060\n4070\n4080\n4090\n4100\n4110",
        "2019.2020.2021.2022 and 3.1415.9265, 2024.01.01, 192.168.0.1:8080",
        "| 4512  4513  4514  4515  4516  4517  4518  4519  4520 |",
        "It grew from 4111\nto 5111\nand 6111.",
    ],
)
def test_what_only_looks_like_a_secret_is_left_alone(text: str) -> None:
    assert kinds(text) == []


@pytest.mark.parametrize(
    "number",
    [
        "4111111111111111",
        "4012 8888 8888 1881",
        "4222222222222",
        "5555-5555-5555-4444",
        "2223 0031 2200 3222",
        "3782 822463 10005",
        "371449635398431",
        "3056 930902 5904",
        "3530\u00a01113\u00a03330\u00a00000",
        "6011 1111 1111 1117",
        "6200000000000005",
        "4111\n1111\n1111\n1111",
        "4111  1111  1111  1111",
        "4111.1111.1111.1111",
        "4111/1111/1111/1111",
        "4111, 1111, 1111, 1111",
        "4111 | 1111 | 1111 | 1111",
        "4111\u20111111\u20111111\u20111111",
        "4111\u202f1111\u202f1111\u202f1111",
        "3782  822463  10005",
        "".join(chr(0xFF10 + int(digit)) for digit in "4111111111111111"),
        "6759649826438453",
        "5018 0000 0009",
        "2200 0000 0000 0004",
    ],
)
def test_card_numbers_are_found(number: str) -> None:
    for text in (number, f"Card {number}, valid 12/27", f"12 {number} 345"):
        (finding,) = find_cards(text)
        assert text[finding.start : finding.end] == number


@pytest.mark.parametrize(
    "number", ["9111111111111111", "41111111111111111", "5555 5555 5555 444", "3530 1113 3330 000"]
)
def test_other_numbers_are_none(number: str) -> None:
    assert find_cards(number) == []


@given(st.text(alphabet="0123456789", min_size=2, max_size=19))
def test_luhn_finds_every_single_wrong_digit(number: str) -> None:
    right = next(number + last for last in "0123456789" if has_check_digit(number + last))
    for place, digit in enumerate(right):
        wrong = right[:place] + str((int(digit) + 3) % 10) + right[place + 1 :]
        assert not has_check_digit(wrong)


def test_words_count_whole_and_whatever_their_case() -> None:
    words = ("project nightfall", "Straße", "天安")
    text = "PROJECT Nightfall, project nightfalls, my straße; Straßen; 北京天安门"
    assert kinds(text, *words) == ["word"] * 3
    assert [text[each.start : each.end] for each in RuleFilter(words).find(text)] == [
        "PROJECT Nightfall",
        "straße",
        "天安",
    ]


@given(st.text(max_size=300), st.lists(st.text(min_size=2, max_size=5), max_size=3))
def test_findings_lie_in_the_text(text: str, words: list[str]) -> None:
    for finding in RuleFilter(words).find(text):
        assert 0 <= finding.start < finding.end <= len(text)


@given(
    st.lists(
        st.sampled_from([*HOSTILE, "AKIA", "xox", ".eyJ", "glpat-", "SG.", "k_live_", "a", "A", "-", " ", "."]),
        min_size=1,
        max_size=6,
    )
)
def test_time_is_in_line_with_length(parts: list[str]) -> None:
    """A pattern that tries again and again would take four times as long for twice the text, and seconds for this."""
    text = "".join(parts)
    text *= 20_000 // len(text)
    started_s = time.thread_time()
    RuleFilter(("a b",)).find(text)
    assert time.thread_time() - started_s < 0.5


def test_a_long_answer_is_looked_at_in_parts_that_overlap() -> None:
    for start in range(PART_CHARACTERS - 700, PART_CHARACTERS + 100, 37):
        text = "x " * (start // 2) + CARD + " y" * 4000
        assert asyncio.run(find_all(RuleFilter(), text)) == [
            Finding("card_number", start // 2 * 2, start // 2 * 2 + 19)
        ]
    assert asyncio.run(find_all(RuleFilter(), "")) == []
    longest = max(map(len, SECRETS.values()))
    assert longest < MAX_CHARACTERS


# --- held back -----------------------------------------------------------------------------------------------

TIER = Tier(
    name="t",
    model="m",
    tokenizer="t",
    context_window=100,
    end_id=2,
    pad_id=2,
    input_price_per_million_tokens=1,
    output_price_per_million_tokens=1,
    generation=Generation(max_output_tokens=9),
)


class Recorder:
    """An `Output` that keeps what it got."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.pieces: list[Piece] = []
        self.reasons: dict[int, str] = {}
        self.is_finished = False

    def enter(self, stage: Stage) -> None: ...

    def begin(self, answer: Answer, answer_id: str) -> None:
        answer.choices = [Choice(index) for index in range(answer.request.num_choices)]

    def emit(self, choice: Choice, piece: Piece) -> None:
        assert choice.index not in self.reasons
        self.pieces.append(piece)
        self.sent.append(piece.text)

    def end_choice(self, choice: Choice, finish_reason: str) -> None:
        assert choice.index not in self.reasons
        self.reasons[choice.index] = finish_reason

    def finish(self) -> None:
        assert not self.is_finished
        self.is_finished = True

    def on_cancel(self, stop: Callable[[], Awaitable[None]] | None) -> None: ...

    def raise_if_cancelled(self) -> None: ...


def begin(num_choices: int = 1, words: Sequence[str] = ()) -> tuple[Recorder, Held, Sequence[Choice]]:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "q"}], "n": num_choices})
    answer, recorder = Answer(request, TIER), Recorder()
    held = Held(recorder, RuleFilter(words))
    held.begin(answer, "id")
    return recorder, held, answer.choices


def test_a_sentence_goes_when_it_is_whole() -> None:
    recorder, held, (choice,) = begin()
    seen = []
    for piece in ("Hel", "lo", ".", " How", " are", " you", "?\n", "Fi", "ne"):
        held.emit(choice, Piece(piece))
        seen.append("".join(recorder.sent))
    assert seen == ["", "", "", *["Hello. "] * 3, *["Hello. How are you?\n"] * 3]
    held.end_choice(choice, "length")
    held.finish()
    assert "".join(recorder.sent) == "Hello. How are you?\nFine"
    assert recorder.reasons == {0: "length"} and recorder.is_finished


@pytest.mark.parametrize("text", ["一句话。还有", "Really?! Yes", "“Stop.” She left", "a\nb"])
def test_where_sentences_end(text: str) -> None:
    recorder, held, (choice,) = begin()
    held.emit(choice, Piece(text))
    assert 0 < len("".join(recorder.sent)) < len(text)


def test_a_flagged_sentence_ends_the_answer() -> None:
    recorder, held, (choice,) = begin()
    with pytest.raises(FlaggedError):
        for piece in ["Here it is. ", *(f"{CARD[start : start + 3]}" for start in range(0, 19, 3)), ". Bye. ", "x"]:
            held.emit(choice, Piece(piece))
    assert "".join(recorder.sent) == "Here it is. "
    assert recorder.reasons == {0: FINISH_REASON} and recorder.is_finished
    assert [each.kind for each in held.findings] == ["card_number"]
    assert not any("4" in text for text in recorder.sent)


def test_so_does_one_that_the_end_completes() -> None:
    recorder, held, (choice,) = begin()
    held.emit(choice, Piece(f"It is {CARD}"))
    with pytest.raises(FlaggedError):
        held.end_choice(choice, "stop")
    assert recorder.sent == [] and recorder.reasons == {0: FINISH_REASON}


def test_what_spans_two_sentences_is_seen() -> None:
    recorder, held, (choice,) = begin()
    held.emit(choice, Piece("-----BEGIN RSA PRIVATE\nKEY"))
    held.emit(choice, Piece("? 4111 1111 1111\u00a0"))
    held.end_choice(choice, "stop")
    assert recorder.reasons == {0: "stop"}
    key = SECRETS["api_key"]
    recorder, held, (choice,) = begin()
    long = "a" * (MAX_HELD_CHARACTERS - 5) + " " + key[:12]
    held.emit(choice, Piece(long))
    held.emit(choice, Piece(key[12:]))
    with pytest.raises(FlaggedError):
        held.emit(choice, Piece(". Yes. "))
    assert key[:12] not in "".join(recorder.sent)


def test_what_never_ends_goes_in_parts() -> None:
    recorder, held, (choice,) = begin()
    for _ in range(MAX_HELD_CHARACTERS):
        held.emit(choice, Piece("ab "))
    assert len("".join(recorder.sent)) >= 2 * MAX_HELD_CHARACTERS
    assert len(held._texts[0].held) * 3 <= MAX_HELD_CHARACTERS + 3


@pytest.mark.parametrize("size", [1, 3, 7, 50])
@pytest.mark.parametrize(
    "before",
    [
        "",
        "a," * (MAX_HELD_CHARACTERS // 2 - 15),
        "x" * (MAX_HELD_CHARACTERS - 30) + '"',
        "item " * (MAX_HELD_CHARACTERS // 5 - 3),
        "item " * (MAX_HELD_CHARACTERS // 5 - 2),
        "Fine. " * 9,
    ],
    ids=["alone", "commas", "token", "spaces", "more spaces", "sentences"],
)
@pytest.mark.parametrize(
    "flagged",
    [
        *SECRETS.values(),
        CARD,
        CARD.replace(" ", "\n"),
        CARD.replace(" ", "."),
        "Dr. Evil",
        "top secret\nproject",
        "No! Way? Out",
    ],
)
def test_no_part_of_what_is_flagged_is_sent(flagged: str, before: str, size: int) -> None:
    recorder, held, (choice,) = begin(words=("dr. evil", "top secret project", "no! way? out"))
    text = f"{before}{flagged} and more"
    with pytest.raises(FlaggedError):
        for start in range(0, len(text), size):
            held.emit(choice, Piece(text[start : start + size]))
        held.end_choice(choice, "stop")
    assert before.startswith("".join(recorder.sent))
    assert recorder.reasons == {0: FINISH_REASON}


def test_a_token_without_an_end_goes_late_and_the_secret_behind_it_not_at_all() -> None:
    recorder, held, (choice,) = begin()
    for _ in range(3 * MAX_HELD_CHARACTERS):
        held.emit(choice, Piece("aB3"))
        assert sum(len(piece.text) for piece in held._texts[0].held) <= MAX_HELD_CHARACTERS + 3
    assert len("".join(recorder.sent)) > 7 * MAX_HELD_CHARACTERS
    with pytest.raises(FlaggedError):
        for char in f"/{SECRETS['our_key']} ":
            held.emit(choice, Piece(char))
        held.end_choice(choice, "stop")
    assert "rt-" not in "".join(recorder.sent)


@given(
    st.lists(
        st.sampled_from([*SECRETS.values(), CARD, "Dr. Evil", "a", " ", ". ", "\n", "4", "41 ", "secret ", "Dr. "]),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_however_it_is_dealt_out_nothing_flagged_gets_out(parts: list[str], chance: random.Random) -> None:
    text, safety = "".join(parts), RuleFilter(("dr. evil",))
    recorder, held, (choice,) = begin(words=("dr. evil",))
    start = 0
    try:
        while start < len(text):
            end = start + chance.randint(1, 30)
            held.emit(choice, Piece(text[start:end]))
            start = end
        held.end_choice(choice, "stop")
    except FlaggedError:
        pass
    first = min((each.start for each in safety.find(text)), default=len(text))
    assert text.startswith(sent := "".join(recorder.sent)) and len(sent) <= first
    assert (recorder.reasons == {0: "stop"}) == (first == len(text))


def test_one_choice_ends_and_the_other_goes_on() -> None:
    recorder, held, (first, second) = begin(2)
    held.emit(first, Piece(f"{CARD}. "))
    held.emit(first, Piece("More. "))
    held.emit(second, Piece("Fine. "))
    held.end_choice(first, "stop")
    held.end_choice(second, "stop")
    held.finish()
    assert recorder.sent == ["Fine. "] and recorder.reasons == {0: FINISH_REASON, 1: "stop"}


def test_log_probs_stay_with_their_text_and_calls_wait_for_the_end() -> None:
    recorder, held, (choice,) = begin()
    held.emit(choice, Piece("Yes. No", log_probs=[TokenLogProb("Yes. No", -0.5)]))
    assert recorder.pieces == []
    held.emit(choice, Piece(" more. ", log_probs=[TokenLogProb(" more. ", -0.5)]))
    assert [piece.text for piece in recorder.pieces] == ["Yes. No", " more. "]
    call = ToolCallDelta(0, "id", "name", '{"card": "' + CARD + '"}')
    held.emit(choice, Piece("Text. ", [call]))
    assert len(recorder.pieces) == 2
    with pytest.raises(FlaggedError):
        held.end_choice(choice, "tool_calls")
    assert len(recorder.pieces) == 2


@given(st.text(alphabet="ab. \n。", max_size=200), st.randoms(use_true_random=False))
def test_nothing_is_lost_or_changed(text: str, chance: random.Random) -> None:
    recorder, held, (choice,) = begin()
    start = 0
    while start < len(text):
        end = start + chance.randint(1, 9)
        held.emit(choice, Piece(text[start:end]))
        assert text.startswith("".join(recorder.sent))
        start = end
    held.end_choice(choice, "stop")
    assert "".join(recorder.sent) == text
