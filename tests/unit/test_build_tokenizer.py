"""tokenizer.json against OpenVINO's own conversion of the same GGUF, which shares no code with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from build.compiler import HERE
from build.errors import BuildError
from build.fetch import cache_folder, fetch
from build.openvino_ir import write_openvino_ir
from build.rows import load_models, load_target
from build.tokenizer import check_metadata, make_tokenizer, write_tokenizer

MODEL = load_models(load_target("cpu"))["smollm2-135m-instruct"]
BUILT = HERE.parent / "artifacts/cpu/model_repository/llm_small/1"

TEXTS = [
    "Hello, world! It's 2024, isn't it? 'LL we'd they'VE",
    "你好，世界。中文分词测试",
    "مرحبا بالعالم، كيف حالك؟",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 n\u0303",
    'def f(x: int) -> str:\n\treturn f"{x ** 2}"  # 12345\n\n\n    # end',
    "3.14159 0x1F 1,000,000 ١٢٣ ２３ ½ ² Ⅷ",
    "  leading,   inner    runs \t\t and trailing  \n\r\n \n",
    "\u00a0no-break\u2003em\u3000ideographic\u200bzero",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|> b<|endoftext|>c <|im_end <file_sep>",
    "\ufeffbom \x00\x01\x7f control \ufffd",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version folder with tokenizer/ and openvino/: the built artifact's, else made here."""
    pytest.importorskip("openvino_genai")
    if (BUILT / "openvino").is_dir():
        return BUILT
    made = tmp_path_factory.mktemp("version")
    gguf = fetch(MODEL.gguf, cache_folder())
    write_tokenizer(gguf, MODEL, made / "tokenizer")
    write_openvino_ir(gguf, made / "openvino")
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    import openvino_genai

    return openvino_genai.Tokenizer(str(folder / "openvino"))


def their_ids(theirs: Any, text: str) -> list[int]:
    ids: list[int] = theirs.encode(text, add_special_tokens=False).input_ids.data.tolist()[0]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_both_tokenizers_agree_both_ways(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text).ids
    assert ids == their_ids(theirs, text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert theirs.decode(ids, skip_special_tokens=False) == text


def test_both_tokenizers_agree_on_any_text(ours: Tokenizer, theirs: Any) -> None:
    chance = random.Random(0)
    alphabet = [
        *map(chr, range(0x20, 0x7F)),
        *" \t\n'0\u00a0\u200d\ufe0f",
        *map(chr, range(0xA0, 0xD7FF, 97)),
        *"😀🏽𝔘",
    ]
    for _ in range(300):
        text = "".join(chance.choices(alphabet, k=chance.randrange(1, 60)))
        ids = ours.encode(text).ids
        assert ids == their_ids(theirs, text), repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_keep_their_ids(ours: Tokenizer) -> None:
    assert [ours.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert ours.decode([1, 2, 0]) == ""
    assert ours.get_vocab_size() == MODEL.architecture.vocab_size


def test_bytes_outside_the_vocabulary_are_left_out(ours: Tokenizer) -> None:
    # SmolLM2 has no token for six of the control characters. OpenVINO would put a control token,
    # <|endoftext|>, into the prompt instead.
    text = "a\x04b\x06c\x13d\x14e\x16f\x1dg"
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == "abcdefg"


def test_the_chat_template_is_the_models(folder: Path) -> None:
    template = (folder / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
    assert "<|im_start|>assistant" in template
    assert "add_generation_prompt" in template


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"no GGUF at all" * 10)
    with pytest.raises(BuildError, match=r"m\.gguf: not a GGUF file that can be read: "):
        write_tokenizer(gguf, MODEL, tmp_path / "tokenizer")
    with pytest.raises(BuildError, match=r"OpenVINO could not convert m\.gguf \(exit code -?\d+\); its last lines:\n."):
        write_openvino_ir(gguf, tmp_path / "openvino")


def test_a_gguf_of_another_model_is_refused() -> None:
    fields = {"general.architecture": "llama", "llama.block_count": 24}
    with pytest.raises(BuildError, match=r"m\.gguf: llama\.block_count is 24, the row of 'smollm2-.*' says 30"):
        check_metadata(fields, MODEL, "m.gguf")


def test_another_kind_of_tokenizer_is_refused() -> None:
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    with pytest.raises(BuildError, match=r"'llama' with tokenizer\.ggml\.pre 'default' is not supported"):
        make_tokenizer(fields)
