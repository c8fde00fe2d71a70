"""A stored answer: its JSON, made of an answer and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.text import Piece, join

# A replayed stream has no more deltas than this: each costs its way through Triton and the gateway, and there is
# nothing to wait for between them.
MAX_PIECES = 8


@dataclass(frozen=True)
class StoredAnswer:
    """One choice that ended with "stop". `tier` and `model` are names, of what made it."""

    tier: str
    model: str
    pieces: Sequence[Piece]
    num_prompt_tokens: int
    num_completion_tokens: int
    is_estimated: bool = False

    def to_json(self) -> bytes:
        row = {
            "tier": self.tier,
            "model": self.model,
            "pieces": [[piece.text, piece.log_probs] for piece in self.pieces],
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "estimated": self.is_estimated,
        }
        return json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoredAnswer:
        """Raises `ValueError` for what `to_json` did not write: a store may be shared with another version of this."""
        try:
            row: dict[str, Any] = json.loads(text)
            return cls(
                tier=str(row["tier"]),
                model=str(row["model"]),
                pieces=[Piece(str(text), log_probs=_read_log_probs(rows)) for text, rows in row["pieces"]],
                num_prompt_tokens=int(row["prompt_tokens"]),
                num_completion_tokens=int(row["completion_tokens"]),
                is_estimated=bool(row["estimated"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a stored answer: {error!r}") from error


def join_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The same text and log probabilities in at most `MAX_PIECES` pieces, of neighbours joined."""
    size = -(-len(pieces) // MAX_PIECES)
    return [join(pieces[start : start + size]) for start in range(0, len(pieces), size or 1)]


def _read_log_probs(rows: Any) -> list[TokenLogProb] | None:
    return None if rows is None else [TokenLogProb.of(str(token), float(log_prob)) for token, log_prob in rows]
