"""Decoding as token ids arrive: no broken characters, no lost spaces, the same text as decoding all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.errors import InvalidRequestError
from orchestrator.streaming.tokenizer import ChatTokenizer, Detokenizer

REPLACEMENT = "\ufffd"

TEXTS = (
    "What is deep learning?",
    "深度学习是机器学习的一个分支,使用多层神经网络。",
    "ما هو التعلّم العميق؟ إنه فرعٌ من تعلّم الآلة.",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, then 👍🏽: a family, a flag, a thumb",
    "def f(x):\n\treturn {'a': [1, 2]}  # two spaces  \n\n\nprint(f(3))\n",
    "नमस्ते दुनिया, שלום עולם, Привет, 안녕하세요",
    "  leading and trailing  ",
    "e\u0301 is not \u00e9; \u200b zero width; \x00 nul",
    "",
)


def push_each(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [detokenizer.push([token_id]) for token_id in token_ids]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, under the names that byte-level BPE gives bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [tokenizer.token_to_id(names[byte]) for byte in data]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    deltas = push_each(Detokenizer(tokenizer), token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids) == text
    assert REPLACEMENT not in "".join(deltas)


@pytest.mark.parametrize(
    ("pieces", "deltas"),
    [
        ((b"\xf0\x9f", b"\x92\xa1"), ["", "💡"]),
        ((b"\xd0", b"\x9f"), ["", "П"]),
        ((b"a\xf0", b"\x9f", b"\x92", b"\xa1b"), ["a", "", "", "💡b"]),
    ],
)
def test_a_character_over_several_chunks_is_held_until_it_is_whole(
    tokenizer: Tokenizer, pieces: tuple[bytes, ...], deltas: list[str]
) -> None:
    """Case S01: its bytes, one token a byte."""
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(byte_ids(tokenizer, piece)) for piece in pieces] == deltas


def test_bytes_that_never_became_a_character_are_dropped(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert "".join(push_each(detokenizer, byte_ids(tokenizer, b"ok\xf0\x9f\x92"))) == "ok"


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    hello = tokenizer.encode("hello", add_special_tokens=False).ids
    assert "".join(push_each(Detokenizer(tokenizer), [end, *hello, end])) == "hello"


def assert_decodes(tokenizer: Tokenizer, token_ids: list[int], text: str) -> None:
    """`text` is the decoding of all ids, but for bytes at the end that are no character."""
    whole = tokenizer.decode(token_ids)
    assert whole.startswith(text)
    assert whole == text or whole.endswith(REPLACEMENT)


@given(text=st.text(max_size=40), data=st.data())
def test_any_text_in_any_pieces(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    """The vocabulary lacks a few bytes that begin rare characters, so some texts do not survive encoding."""
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    borders = sorted(data.draw(st.sets(st.integers(0, len(token_ids)), max_size=8)) | {0, len(token_ids)})
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push(token_ids[start:end]) for start, end in pairwise(borders)]
    assert_decodes(tokenizer, token_ids, "".join(deltas))


@given(token_ids=st.lists(st.integers(0, 49151) | st.integers(17, 300), max_size=20))
def test_any_ids_one_at_a_time(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    """A model may emit anything; broken bytes in the middle show as decoding all at once shows them."""
    assert_decodes(tokenizer, token_ids, "".join(push_each(Detokenizer(tokenizer), token_ids)))


# --- case S03: SentencePiece ---------------------------------------------------------------------------------


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """A tokenizer as SentencePiece models have it: U+2581 for a space, bytes for what is not in the vocabulary."""
    words = ["▁What", "▁is", "▁deep", "▁learn", "ing", "?", "▁", "D", "eep"]
    vocabulary = [("<unk>", 0.0), *((word, -1.0) for word in words)]
    vocabulary += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return tokenizer


def llama_decoder() -> decoders.Decoder:
    """The decoder of Llama's tokenizer.json."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


@pytest.mark.parametrize("make_decoder", [decoders.Metaspace, llama_decoder])
def test_sentencepiece_keeps_its_spaces(make_decoder: type[decoders.Decoder]) -> None:
    tokenizer = sentencepiece(make_decoder())
    token_ids = tokenizer.encode("What is deep learning?").ids
    assert len(token_ids) == 6
    deltas = push_each(Detokenizer(tokenizer), token_ids)
    assert deltas == ["What", " is", " deep", " learn", "ing", "?"]
    assert "".join(deltas) == tokenizer.decode(token_ids)


def test_sentencepiece_byte_fallback_is_held_until_the_character_is_whole() -> None:
    tokenizer = sentencepiece(llama_decoder())
    token_ids = tokenizer.encode("What 💡 is").ids
    deltas = push_each(Detokenizer(tokenizer), token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids) == "What 💡 is"
    assert not any(REPLACEMENT in delta for delta in deltas)


# --- chat template -------------------------------------------------------------------------------------------


def test_the_chat_template_of_the_model(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    chat = ChatTokenizer.load(tokenizer_dir)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.decode(chat.encode_chat(messages), skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
    ],
)
def test_a_template_that_refuses_names_the_messages(tokenizer: Tokenizer, template: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="^messages: the model's chat template refuses them: ") as got:
        ChatTokenizer(tokenizer, template).encode_chat([{"role": "user", "content": "Hi"}])
    assert text in got.value.message
    assert got.value.param == "messages"


def test_a_template_may_ask_for_the_date(tokenizer: Tokenizer) -> None:
    chat = ChatTokenizer(tokenizer, "{{ strftime_now('%Y') }}")
    assert tokenizer.decode(chat.encode_chat([])).startswith("20")
