"""How long an input may be, and to what length it is padded."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InvalidRequestError

# Triton batches requests of equal shapes only; few lengths make equal shapes likely. Twice as long costs about twice as
# much, so padding at most doubles the work.
BUCKETS = (16, 32, 64, 128, 256)


def check_window(num_tokens: int, max_input_tokens: int, field: str) -> None:
    """Raise `InvalidRequestError` naming `field` and both lengths for an input longer than the window."""
    if num_tokens > max_input_tokens:
        raise InvalidRequestError(
            f"{field}: has {num_tokens} tokens; the embedder takes at most {max_input_tokens}, [CLS] and [SEP] "
            "included: shorten it, or split it",
            param=field,
        )


def choose_length(num_tokens: int, max_input_tokens: int) -> int:
    """The length to pad to, which is at least `num_tokens` and within the window."""
    return next((length for length in BUCKETS if num_tokens <= length < max_input_tokens), max_input_tokens)


def pad(input_ids: Sequence[int], length: int, pad_id: int) -> tuple[list[int], list[int]]:
    """`input_ids` and their mask (1 a token, 0 padding), both `length` long."""
    num_padding = length - len(input_ids)
    return [*input_ids, *[pad_id] * num_padding], [1] * len(input_ids) + [0] * num_padding


def most_tokens(given: str | list[int]) -> int:
    """The most tokens that an input can have: ids are counted, and no word piece is shorter than a byte."""
    return len(given.encode()) + 2 if isinstance(given, str) else len(given)
