"""tokenizer.json and chat template out of a GGUF's metadata, without the weights' original repository.

The folder also serves other tools' `--tokenizer` (AIPerf, transformers): they need tokenizer_config.json and
config.json beside the two files that we read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from build.errors import BuildError
from build.model_rows import EmbedderRow, ModelRow

# How llama.cpp's names of pre-tokenizers read in the `tokenizers` library. "smollm" splits digits one by one
# and is GPT-2's splitting otherwise (llama.cpp, llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
}


def write_tokenizer(gguf: Path, model: ModelRow, folder: Path) -> None:
    """Write the tokenizer of `model` into `folder`; raises `BuildError` if the GGUF is another model."""
    fields = read_metadata(gguf)
    check_metadata(fields, model, gguf.name)
    tokenizer = make_tokenizer(fields)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, model))
    _write_json(folder / "config.json", model_config(model))


def write_word_pieces(source: Path, model: EmbedderRow, path: Path) -> None:
    """Write the tokenizer.json of an embedder to `path`, without the cutting and padding that it may come with.

    Raises `BuildError` if its special tokens or its size are not those of the model's row.
    """
    tokenizer = Tokenizer.from_file(str(source))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = model.token_ids
    expected = {"[CLS]": ids.cls, "[SEP]": ids.sep, "[PAD]": ids.pad}
    for token, expected_id in expected.items():
        if tokenizer.token_to_id(token) != expected_id:
            raise BuildError(
                f"{source.name}: {token} is {tokenizer.token_to_id(token)}, the row of {model.name!r} says "
                f"{expected_id}; fix the row"
            )
    if tokenizer.get_vocab_size() != model.architecture.vocab_size:
        raise BuildError(
            f"{source.name}: has {tokenizer.get_vocab_size()} word pieces, the row of {model.name!r} says "
            f"{model.architecture.vocab_size}; fix the row"
        )
    tokenizer.save(str(path))


def read_metadata(gguf: Path) -> dict[str, Any]:
    """Every metadata field of a GGUF file by name."""
    try:
        return {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    except (ValueError, IndexError) as error:
        raise BuildError(f"{gguf.name}: not a GGUF file that can be read: {error}") from error


def check_metadata(fields: Mapping[str, Any], model: ModelRow, file: str) -> None:
    """Raise `BuildError` naming the first number of the model's row that the file contradicts."""
    numbers, ids, family = model.architecture, model.token_ids, model.architecture.family
    expected: dict[str, str | int | float | None] = {
        "general.architecture": family,
        f"{family}.block_count": numbers.num_layers,
        f"{family}.embedding_length": numbers.hidden_size,
        f"{family}.feed_forward_length": numbers.intermediate_size,
        f"{family}.attention.head_count": numbers.num_attention_heads,
        f"{family}.attention.head_count_kv": numbers.num_kv_heads,
        f"{family}.rope.dimension_count": numbers.head_dim,
        f"{family}.vocab_size": numbers.vocab_size,
        f"{family}.context_length": numbers.context_window,
        f"{family}.rope.freq_base": numbers.rope_theta,
        "tokenizer.ggml.bos_token_id": ids.bos,
        "tokenizer.ggml.eos_token_id": ids.end,
        "tokenizer.ggml.padding_token_id": ids.pad,
        "tokenizer.ggml.unknown_token_id": ids.unknown,
    }
    for key, value in expected.items():
        if fields.get(key) != value:
            raise BuildError(
                f"{file}: {key} is {fields.get(key)!r}, the row of {model.name!r} says {value!r}; fix the row"
            )


def make_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that GGUF metadata describes; raises `BuildError` for any other kind."""
    kind, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise BuildError(
            f"tokenizer.ggml.model {kind!r} with tokenizer.ggml.pre {pre!r} is not supported; "
            f"supported: 'gpt2' with {', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    # Byte-level tokens hold no space, so the one space of a merge is the border between its halves.
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    # No unknown token: a byte that the vocabulary lacks is left out, as in the model's own tokenizer.
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    # Already in the vocabulary, so they keep their ids.
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer


def _token(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.id_to_token(token_id)


def _tokenizer_config(tokenizer: Tokenizer, model: ModelRow) -> dict[str, Any]:
    ids = model.token_ids
    return {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _token(tokenizer, ids.bos),
        "eos_token": tokenizer.id_to_token(ids.end),
        "pad_token": tokenizer.id_to_token(ids.pad),
        "unk_token": _token(tokenizer, ids.unknown),
        "model_max_length": model.architecture.context_window,
        # True would eat spaces before punctuation when decoding.
        "clean_up_tokenization_spaces": False,
    }


def model_config(model: ModelRow) -> dict[str, Any]:
    """config.json, as transformers reads it."""
    numbers, ids = model.architecture, model.token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": numbers.family,
        "num_hidden_layers": numbers.num_layers,
        "hidden_size": numbers.hidden_size,
        "intermediate_size": numbers.intermediate_size,
        "num_attention_heads": numbers.num_attention_heads,
        "num_key_value_heads": numbers.num_kv_heads,
        "head_dim": numbers.head_dim,
        "vocab_size": numbers.vocab_size,
        "max_position_embeddings": numbers.context_window,
        "rope_theta": numbers.rope_theta,
        "rms_norm_eps": numbers.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": numbers.tie_word_embeddings,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.end,
        "pad_token_id": ids.pad,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
