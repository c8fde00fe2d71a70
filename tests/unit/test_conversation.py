"""Conversations as the classifier's token ids: bounded, the last turn in, the task seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.routing.conversation import (
    MAX_EARLIER_TOKENS,
    MAX_LAST_TOKENS,
    MAX_TOKENS,
    ConversationReader,
    Turn,
)

BEGIN, PAD, END, GAP = 0, 1, 2, 3
LETTERS = "abcdefghijklmnopqrstuvwxyz:?"
IDS = {letter: 5 + place for place, letter in enumerate(LETTERS)}
SPACE = 4


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ConversationReader:
    """One whose every letter is a token."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    pieces += [(letter, -1.0) for letter in LETTERS]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=GAP))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    tokenizer.save(str(path))
    return ConversationReader(path)


def tokens(text: str) -> list[int]:
    return [SPACE, *(IDS[letter] for letter in text)]


def test_one_turn(reader: ConversationReader) -> None:
    assert reader.read([Turn("user", "hi")]).tolist() == [BEGIN, *tokens("query:"), *tokens("hi"), END]


def test_earlier_turns_come_from_the_latest_backwards(reader: ConversationReader) -> None:
    found = reader.read([Turn("system", "be"), Turn("user", "do"), Turn("assistant", "ok"), Turn("user", "go")])
    expected = [BEGIN, *tokens("query:"), *tokens("go"), END, *tokens("assistant:"), *tokens("ok"), END]
    expected += [*tokens("user:"), *tokens("do"), END, *tokens("system:"), *tokens("be"), END]
    assert found.tolist() == expected


def test_a_long_turn_keeps_head_and_tail(reader: ConversationReader) -> None:
    found = reader.read([Turn("user", "a" * 500 + "?")]).tolist()
    body = found[len([BEGIN, *tokens("query:")]) : -1]
    assert len(body) == MAX_LAST_TOKENS and body.count(GAP) == 1
    assert body[:2] == [SPACE, IDS["a"]] and body[-1] == IDS["?"]


def test_a_long_past_is_cut_at_the_turn_that_no_longer_fits(reader: ConversationReader) -> None:
    found = reader.read([Turn("user", "a" * 100)] * 50 + [Turn("user", "b")]).tolist()
    num_parts = found.count(END) - 1
    assert len(found) <= MAX_TOKENS < len(found) + len(tokens("user:")) + MAX_EARLIER_TOKENS + 1
    assert found.count(GAP) == num_parts  # each cut, none in half


@pytest.mark.parametrize(
    ("says", "task"),
    [
        (["prove", "go"], 0),
        (["b" * 70, "prove it", "go on"], 0),
        (["b" * 70, "c" * 60, "and more of this"], 1),
        (["ok", "go", "do"], 2),
    ],
)
def test_the_task_stays_in_when_the_past_is_too_long(reader: ConversationReader, says: list[str], task: int) -> None:
    long = Turn("assistant", "a" * 100)
    past = [turn for each in says for turn in (Turn("user", each), *[long] * 3)]
    past += [long] * 9
    found = reader.read([*past, Turn("user", "go")]).tolist()
    room = MAX_EARLIER_TOKENS
    text = says[task] if len(says[task]) < room else ""
    part = (
        [*tokens("user:"), *tokens(text), END] if text else [GAP, *[IDS[says[task][0]]] * (room - room // 2 - 1), END]
    )
    assert found[-len(part) :] == part
    assert found.count(END) > 3 and len(found) <= MAX_TOKENS


def test_a_task_in_the_window_changes_nothing(reader: ConversationReader) -> None:
    turns = [Turn("user", "a" * 100)] * 50 + [Turn("user", "go")]
    found = reader.read(turns).tolist()
    assert found == reader.read(turns[-8:]).tolist() and found.count(END) < 8


words = st.text(alphabet=LETTERS + "  é字\n", max_size=400)
turns = st.lists(
    st.builds(Turn, st.sampled_from(["system", "user", "assistant", "tool"]), words), min_size=1, max_size=9
)


@given(turns)
@settings(max_examples=60, deadline=None)
def test_every_conversation_is_bounded_and_ends_its_parts(reader: ConversationReader, turns: list[Turn]) -> None:
    found = reader.read(turns).tolist()
    assert len(found) <= MAX_TOKENS
    assert found[0] == BEGIN and found[-1] == END
    assert found.count(END) <= len(turns)


@given(turns, st.text(alphabet=LETTERS, min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_last_turn_is_always_in(reader: ConversationReader, before: list[Turn], last: str) -> None:
    found = reader.read([*before, Turn("user", last)]).tolist()
    start = [BEGIN, *tokens("query:"), *tokens(last), END]
    assert found[: len(start)] == start


@pytest.mark.parametrize("last", ["continue", "yes"])
@given(task=st.text(alphabet=LETTERS, min_size=1, max_size=30), answer=words)
@settings(max_examples=30, deadline=None)
def test_whoever_goes_on_is_judged_by_the_task(reader: ConversationReader, last: str, task: str, answer: str) -> None:
    found = reader.read([Turn("user", task), Turn("assistant", answer), Turn("user", last)]).tolist()
    part = [*tokens("user:"), *tokens(task), END]
    assert found[-len(part) :] == part


def test_a_megabyte_is_not_tokenised(reader: ConversationReader, monkeypatch: pytest.MonkeyPatch) -> None:
    num_characters = []
    ids = reader._ids

    def count(text: str) -> list[int]:
        num_characters.append(len(text))
        return ids(text)

    monkeypatch.setattr(reader, "_ids", count)
    found = reader.read(
        [Turn("user", "a" * 1_000_000), *[Turn("user", "b" * 1_000_000)] * 1000, Turn("user", "c?" * 500_000)]
    )
    assert len(found) <= MAX_TOKENS
    assert sum(num_characters) < 6000
    assert found[len([BEGIN, *tokens("query:")]) + MAX_LAST_TOKENS - 1] == IDS["?"]


def test_what_is_cut_is_what_the_whole_would_give(artifact: Callable[[str], Path]) -> None:
    """With the real tokenizer: head and tail by characters hold the head and tail of the tokens."""
    path = artifact("scripted") / "model_repository" / "complexity" / "1" / "tokenizer.json"
    text = "The quick brown fox jumps over the lazy dog. Übergrößenträger 你好世界 x = y + 1;\n" * 200
    found = ConversationReader(path).read([Turn("user", text)]).tolist()
    tokenizer = Tokenizer.from_file(str(path))
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    prefix = [BEGIN, *tokenizer.encode("query:", add_special_tokens=False).ids]
    assert found == [*prefix, *whole[: MAX_LAST_TOKENS // 2], GAP, *whole[1 - MAX_LAST_TOKENS // 2 :], END]
