"""A GGUF, written as llama.cpp writes one, read back as a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from build.errors import BuildError
from build.gguf_checkpoint import unpermute, write_checkpoint
from build.model_rows import Architecture, ModelRow, PackagedFile, TokenIds

NUMBERS = Architecture(
    family="llama",
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=40,
    context_window=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
MODEL = ModelRow(
    name="tiny",
    licence="none",
    architecture=NUMBERS,
    token_ids=TokenIds(bos=1, end=2, pad=2, unknown=0),
    gguf=PackagedFile(package="p", version="1", folder="p", file="tiny.gguf", sha256="0" * 64),
)


def permute(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]], *, layers: int = 2) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(40)
    writer.add_context_length(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """By Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (40, 32), "model.norm": (32,)}
    for layer in range(2):
        parts = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
        parts |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32)}
        parts |= {"mlp.down_proj": (32, 64), "input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def to_gguf(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    heads = {"q_proj": 4, "k_proj": 2}
    found = {}
    for name, values in tensors.items():
        num = next((num for part, num in heads.items() if part in name), None)
        new = names.get_name(name, try_suffixes=(".weight",))
        assert new is not None
        found[new] = values if num is None else permute(values, num)
    return found


def test_the_checkpoint_is_the_original(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_gguf(tmp_path / "tiny.gguf", to_gguf(tensors))
    write_checkpoint(tmp_path / "tiny.gguf", MODEL, tmp_path / "made")
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert found[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found[name], values.astype(ml_dtypes.bfloat16), err_msg=name)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["architectures"], config["dtype"], config["num_hidden_layers"]) == (
        ["LlamaForCausalLM"],
        "bfloat16",
        2,
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"blk.1.attn_q.weight": None}, r"layers.1.self_attn.q_proj.weight has shape None, the row says \(32, 32\)"),
        (
            {"blk.0.ffn_up.weight": (16, 32)},
            r"layers.0.mlp.up_proj.weight has shape \(16, 32\), the row says \(64, 32\)",
        ),
        ({"blk.0.attn_q.bias": (32,)}, "tensor 'blk.0.attn_q.bias' is none of a Llama's"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    tensors = to_gguf(make_tensors())
    for name, shape in changed.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = np.zeros(shape, np.float32)
    write_gguf(tmp_path / "tiny.gguf", tensors)
    with pytest.raises(BuildError, match=message):
        write_checkpoint(tmp_path / "tiny.gguf", MODEL, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_the_metadata_must_be_the_rows(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", to_gguf(make_tensors()), layers=3)
    with pytest.raises(BuildError, match=r"llama.block_count is 3, the row of 'tiny' says 2"):
        write_checkpoint(tmp_path / "tiny.gguf", MODEL, tmp_path / "made")


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_unpermute_undoes_llama_cpps_order(num_heads: int, half: int, num_columns: int) -> None:
    num_rows = num_heads * half * 2
    weights = np.arange(num_rows * num_columns, dtype=np.float32).reshape(num_rows, num_columns)
    np.testing.assert_array_equal(unpermute(permute(weights, num_heads), num_heads), weights)
