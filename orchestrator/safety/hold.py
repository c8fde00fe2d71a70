"""Holds an answer back, sentence by sentence, until the filter has seen what is about to be sent.

A sentence's end, or the cut through what has none, is no place to send up to while something may have begun before it
that the next characters make whole: part of a secret would be out.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from orchestrator.answer import Answer, Output
from orchestrator.safety.rules import MAX_CHARACTERS, Finding, SafetyFilter
from orchestrator.stages import Stage
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.text import Piece

FINISH_REASON = "content_filter"
# A sentence's end: a mark and space behind it, a line's end, or a mark of a script without spaces.
_END = re.compile(r"[.!?…][\"'”’)\]]*\s|\n|[。！？]")
# What has no end for so long is sent in parts: lists, code, JSON on one line.
MAX_HELD_CHARACTERS = 2000


class FlaggedError(Exception):
    """Ends a generation all of whose choices are over, at what the filter found; the answer itself has ended well."""


class Held:
    """An `Output` before another one. A choice with something flagged in it ends before it, by "content_filter".

    `findings` are what ended choices. Raises `FlaggedError` out of `emit` or `end_choice` when none is left.
    """

    def __init__(self, output: Output, safety: SafetyFilter) -> None:
        self.findings: list[Finding] = []
        self._output = output
        self._safety = safety
        self._texts: dict[int, _Text] = {}
        self._num_live = 0

    def enter(self, stage: Stage) -> None:
        self._output.enter(stage)

    def begin(self, answer: Answer, answer_id: str) -> None:
        self._output.begin(answer, answer_id)
        self._num_live = len(answer.choices)

    def emit(self, choice: Choice, piece: Piece) -> None:
        text = self._texts.setdefault(choice.index, _Text())
        if not text.is_over:
            text.held.append(piece)
            self._release(choice, text, text.find_end(self._safety))

    def end_choice(self, choice: Choice, finish_reason: str) -> None:
        text = self._texts.setdefault(choice.index, _Text())
        if text.is_over:
            return
        self._release(choice, text, len(text.held))
        if not text.is_over:
            text.is_over = True
            self._num_live -= 1
            self._output.end_choice(choice, finish_reason)

    def finish(self) -> None:
        self._output.finish()

    def on_cancel(self, stop: Callable[[], Awaitable[None]] | None) -> None:
        self._output.on_cancel(stop)

    def raise_if_cancelled(self) -> None:
        self._output.raise_if_cancelled()

    def _release(self, choice: Choice, text: _Text, num_pieces: int) -> None:
        """Send the first of the held pieces, if the filter has nothing against them."""
        if not num_pieces:
            return
        pieces, text.held = text.held[:num_pieces], text.held[num_pieces:]
        coming = "".join(map(read_piece, pieces))
        begun = text.sent + coming
        # With what follows: the filter must not take the cut for the text's end.
        found = self._safety.find(begun + "".join(map(read_piece, text.held)))
        if findings := [each for each in found if each.end > len(text.sent) and each.start < len(begun)]:
            self.findings += findings
            self._flag(choice, text)
            return
        text.sent = (text.sent + coming)[-MAX_CHARACTERS:]
        for piece in pieces:
            self._output.emit(choice, piece)

    def _flag(self, choice: Choice, text: _Text) -> None:
        text.is_over, text.held = True, []
        self._output.end_choice(choice, FINISH_REASON)
        self._num_live -= 1
        if not self._num_live:
            self._output.on_cancel(None)
            self._output.finish()
            raise FlaggedError


class _Text:
    """One choice: what is held, and the end of what was sent."""

    def __init__(self) -> None:
        self.held: list[Piece] = []
        self.sent = ""
        self.is_over = False

    def find_end(self, safety: SafetyFilter) -> int:
        """How many of the held pieces are whole sentences with nothing open in them, one cut in two if need be.

        Tool calls wait for the end of the choice.
        """
        plain = self.held
        if (first_call := next((at for at, piece in enumerate(self.held) if piece.calls), None)) is not None:
            plain = self.held[:first_call]
        text = "".join(piece.text for piece in plain)
        ends = [match.end() for match in _END.finditer(text)]
        if not ends and len(text) <= MAX_HELD_CHARACTERS:
            return 0
        decided = safety.find_open(self.sent + text) - len(self.sent)
        reach = max((end for end in ends if end <= decided), default=0)
        if not reach and len(text) > MAX_HELD_CHARACTERS:
            reach = text.rfind(" ", 0, max(decided, 0)) + 1 or max(decided, 0)
        num, start = 0, 0
        for piece in plain:
            if start + len(piece.text) > reach:
                if piece.log_probs is None and reach > start:  # log probabilities are of a whole piece
                    cut = reach - start
                    self.held[num : num + 1] = [Piece(piece.text[:cut]), Piece(piece.text[cut:])]
                    num += 1
                break
            start += len(piece.text)
            num += 1
        return num


def read_piece(piece: Piece) -> str:
    """All text of a piece, its tool calls' too."""
    return piece.text + "".join(call.arguments for call in piece.calls)


def read_choice(choice: Choice) -> str:
    """All text of a choice, its tool calls' too."""
    return choice.text + "".join(["\n", *(call.arguments for call in choice.calls)] if choice.calls else [])
