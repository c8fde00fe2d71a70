"""Log probabilities of an answer's tokens, sent along with the text they became."""

from __future__ import annotations

import math
from typing import NamedTuple

# What OpenAI and vLLM write for a token that is next to impossible. Engines say minus infinity, or no number, of one
# that sampling's own limits had left out; and JSON has neither.
LEAST_LOG_PROB = -9999.0


class TokenLogProb(NamedTuple):
    """A token as text, and the natural logarithm of its probability, from `LEAST_LOG_PROB` up.

    Part of a character is U+FFFD; its bytes cannot be told.
    """

    token: str
    log_prob: float

    @classmethod
    def of(cls, token: str, log_prob: float) -> TokenLogProb:
        """With what an engine said of it, which may be no finite number."""
        return cls(token, log_prob if LEAST_LOG_PROB < log_prob < math.inf else LEAST_LOG_PROB)

    def bytes(self) -> list[int] | None:
        """The token's UTF-8, or None for a part of a character."""
        return None if "\ufffd" in self.token else list(self.token.encode())


class LogProbs:
    """Holds each token's log probability until the text that it begins is sent.

    So a client that joins text and tokens sees both grow together, and a stop string, which is cut off, leaves no
    tokens behind.
    """

    def __init__(self) -> None:
        self._num_chars = 0
        self._waiting: list[tuple[int, TokenLogProb]] = []

    def push(self, text: str, entry: TokenLogProb) -> None:
        """A token, and the `text` that became certain with it (empty for part of a character)."""
        self._waiting.append((self._num_chars, entry))
        self._num_chars += len(text)

    def take(self, num_sent: int) -> list[TokenLogProb]:
        """What begins within the first `num_sent` characters of the answer, once."""
        ready = [entry for start, entry in self._waiting if start < num_sent]
        del self._waiting[: len(ready)]
        return ready

    def take_rest(self) -> list[TokenLogProb]:
        """All that is left, when the answer ended by itself."""
        return self.take(self._num_chars + 1)
