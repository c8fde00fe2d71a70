"""What a flight keeps of an answer, beside sending it: as much as is wanted again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.answer import Answer
from orchestrator.flight import Flight
from orchestrator.request import parse_request
from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.text import Piece

PIECES = [Piece("a", log_probs=[TokenLogProb("a", -0.5)]), Piece("b", log_probs=[TokenLogProb("b", -1.5)])]


@pytest.mark.parametrize(
    ("stream", "keeps_pieces", "num_pieces", "num_log_probs"),
    [(True, True, 3, 2), (True, False, 0, None), (False, True, 3, 2), (False, False, 0, 2)],
)
def test_what_is_sent_and_not_wanted_again_is_not_kept(
    stream: bool, keeps_pieces: bool, num_pieces: int, num_log_probs: int | None
) -> None:
    request = parse_request(
        b'{"messages": [{"role": "user", "content": "Hi"}], "stream": %s}' % str(stream).lower().encode()
    )
    tier: Any = SimpleNamespace(model="m")
    flight = Flight(keeps_pieces=keeps_pieces)
    flight.begin(Answer(request, tier), "id")
    assert flight.answer is not None
    (choice,) = flight.answer.choices
    for piece in PIECES:
        flight.emit(choice, piece)
    flight.end_choice(choice, "stop")
    assert (choice.text, choice.finish_reason) == ("ab", "stop")  # for the filters, and quality
    assert len(flight.pieces) == num_pieces
    assert (choice.log_probs and len(choice.log_probs)) == num_log_probs
