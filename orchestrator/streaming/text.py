"""One choice's way from token ids to what a reader gets: text, tool calls, log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.errors import EngineError
from orchestrator.streaming.log_probs import LogProbs, TokenLogProb
from orchestrator.streaming.stops import StopStrings
from orchestrator.streaming.tokenizer import Detokenizer
from orchestrator.streaming.tool_calls import ToolCallDelta, ToolParser


class Piece(NamedTuple):
    """What became certain; `log_probs` is None when they were not asked for."""

    text: str
    calls: Sequence[ToolCallDelta] = ()
    log_probs: list[TokenLogProb] | None = None


def join(pieces: Sequence[Piece]) -> Piece:
    """What follows each other in one choice, as one."""
    log_probs = None
    if any(piece.log_probs is not None for piece in pieces):
        log_probs = [each for piece in pieces for each in piece.log_probs or ()]
    calls = tuple(call for piece in pieces for call in piece.calls)
    return Piece("".join(piece.text for piece in pieces), calls, log_probs)


class TextStream:
    """Cuts the text at a stop string and takes tool calls out of it."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], parser: ToolParser | None, *, log_probs: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._parser = parser
        self._log_probs = LogProbs() if log_probs else None
        self._num_sent = 0  # characters

    @property
    def is_stopped(self) -> bool:
        """Whether the answer ends here: at a stop string, or with the one call that was wanted."""
        return self._stops.matched is not None or (self._parser is not None and self._parser.is_over)

    @property
    def is_cut(self) -> bool:
        """Whether what came out ends inside of a tool call."""
        return self._parser is not None and self._parser.is_cut

    def push(self, token_ids: Sequence[int], log_probs: Sequence[float] | None) -> Piece:
        """New tokens, with their log probabilities if those were asked for; raises `EngineError` if they lack."""
        if self._log_probs is None:
            text = self._detokenizer.push(token_ids)
        else:
            text = self._push_with_log_probs(self._log_probs, token_ids, log_probs)
        return self._piece(self._stops.push(text))

    def push_text(self, text: str) -> Piece:
        """New text of an engine that has no tokens."""
        return self._piece(self._stops.push(text))

    def flush(self) -> Piece:
        """What was held, when the answer ended."""
        piece = self._piece(self._stops.flush())
        if self._parser is not None:
            held = self._parser.flush()
            piece = Piece(piece.text + held.content, [*piece.calls, *held.calls])
        if self._log_probs is not None and not self.is_stopped:
            piece = piece._replace(log_probs=[*(piece.log_probs or []), *self._log_probs.take_rest()])
        return piece

    def _push_with_log_probs(self, held: LogProbs, token_ids: Sequence[int], log_probs: Sequence[float] | None) -> str:
        if log_probs is None or len(log_probs) < len(token_ids):
            raise EngineError("the engine sent no log probabilities, which the request asks for")
        whole = ""
        for token_id, log_prob in zip(token_ids, log_probs):
            text = self._detokenizer.push([token_id])
            held.push(text, TokenLogProb.of(text or self._detokenizer.name(token_id), log_prob))
            whole += text
        return whole

    def _piece(self, text: str) -> Piece:
        self._num_sent += len(text)
        if self._log_probs is not None:
            return Piece(text, log_probs=self._log_probs.take(self._num_sent))
        if self._parser is not None:
            return Piece(*self._parser.push(text))
        return Piece(text)
