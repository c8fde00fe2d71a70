"""Tool calls out of a model's text, as it arrives: the formats of Hermes and of Llama 3."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.config import ToolFormat
from orchestrator.errors import EngineError, shorten
from orchestrator.streaming.stops import overlap


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of the call `index`: the first has `id` and `name`, all carry a piece of the arguments' JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """What a piece of text was: content for the reader, and calls."""

    content: str
    calls: list[ToolCallDelta]


class ToolParser(Protocol):
    """Splits one answer. What is no call of an offered function with a JSON object is content, as the model wrote it.

    Calls come out as they are written, and may then turn out to be broken; with `whole`, they come when they are whole.
    With `only_one` the answer ends with the first call.
    """

    @property
    def is_over(self) -> bool:
        """Whether nothing more of the answer is wanted."""

    @property
    def is_cut(self) -> bool:
        """Whether the answer, if it ends here, ends inside a call that came out in part."""

    def push(self, text: str) -> Parsed:
        """What became certain with `text`.

        Raises `EngineError` when a call came out in part, and its arguments are no JSON object.
        """

    def flush(self) -> Parsed:
        """What is still held when the answer ends."""


def create_tool_parser(
    name: ToolFormat, functions: Collection[str], *, whole: bool = False, only_one: bool = False
) -> ToolParser:
    """The parser of a model's format; `functions` are the names offered."""
    parser = HermesParser if name == "hermes" else JsonParser
    return parser(functions, whole=whole, only_one=only_one)


class _Parser:
    """What the parsers share."""

    def __init__(self, functions: Collection[str], *, whole: bool = False, only_one: bool = False) -> None:
        self._functions = functions
        self._whole = whole
        self._only_one = only_one
        self._held = ""
        self._num_calls = 0
        self._reader: CallReader | None = None

    @property
    def is_over(self) -> bool:
        return self._only_one and self._num_calls > 0

    @property
    def is_cut(self) -> bool:
        return self._reader is not None and self._reader.is_call and not self._reader.is_over

    def _read_call(self) -> CallReader:
        return CallReader(self._num_calls, self._functions, whole=self._whole)


class HermesParser(_Parser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them, text before and between."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    _mark = BEGIN  # with the white space before it

    def push(self, text: str) -> Parsed:
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while not self.is_over and self._advance(content, calls):
            pass
        return Parsed("".join(content), calls)

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        if self.is_over:
            return Parsed("", [])
        if self._reader is None:
            return Parsed(held.rstrip() if self._num_calls else held, [])
        if self._reader.is_call:
            return Parsed("", [])
        return Parsed(f"{self._mark}{self._reader.text}{held}", [])

    def _advance(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """Take one step through what is held; False when more text is needed for the next one."""
        if self._reader is None:
            before, begin, after = self._held.partition(self.BEGIN)
            # White space before a call is not content, and the end of the text may be the beginning of a mark.
            sure = before[: len(before) - (0 if begin else overlap(before, self.BEGIN))].rstrip()
            content.append(sure)
            if not begin:
                self._held = before[len(sure) :]
                return False
            self._mark = before[len(sure) :] + self.BEGIN
            self._reader, self._held = self._read_call(), after
            return True
        if not self._reader.is_over:
            reader = self._reader
            self._held = self._held[reader.push(self._held, calls) :]
            self._num_calls += reader.is_over and reader.is_call
            return reader.is_over
        before, end, after = self._held.partition(self.END)
        if not end:
            return False
        if not self._reader.is_call:
            content.append(f"{self._mark}{self._reader.text}{before}{end}")
        self._reader, self._held = None, after
        return True


class JsonParser(_Parser):
    """The whole answer is calls, as bare objects with ``;`` or white space between, or else it is content.

    Llama 3 calls like this, its arguments under "parameters"; so does any model whose call is forced by a schema.
    """

    BETWEEN = " \t\r\n;,"  # held, for another call may come

    _is_content = False

    def push(self, text: str) -> Parsed:
        content = ""
        calls: list[ToolCallDelta] = []
        while text and not self._is_content and not self.is_over:
            if self._reader is None:
                rest = text.lstrip(self.BETWEEN)
                self._held += text[: len(text) - len(rest)]
                text = rest
                if text.startswith("{"):
                    self._reader = self._read_call()
                elif text:
                    self._is_content = True
                    content, self._held = self._held, ""
                continue
            text = text[self._reader.push(text, calls) :]
            if self._reader.is_over:
                if self._reader.is_call:
                    self._num_calls += 1
                    self._held = ""
                else:
                    self._is_content = True
                    content = self._held + self._reader.text
                self._reader = None
        return Parsed(content if self.is_over else content + text, calls)

    def flush(self) -> Parsed:
        reader = self._reader
        if reader is not None and not reader.is_call:
            return Parsed(self._held + reader.text, [])
        return Parsed("" if self._num_calls or reader else self._held, [])


class CallReader:
    """Reads one object with "name" and "arguments" or "parameters", character by character.

    It is a call once the name is known and was offered and its arguments begin as an object, pieces of which come out
    as they arrive; with `whole`, once it is whole and its arguments are a JSON object.
    """

    def __init__(self, index: int, functions: Collection[str], *, whole: bool) -> None:
        self.text = ""  # all that was read
        self.is_over = False
        self.is_call = False
        self._index = index
        self._functions = functions
        self._whole = whole
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None
        self._name: str | None = None
        self._raw = ""  # of the key or value under way, at the object's own level
        self._arguments = ""
        self._num_sent = 0  # characters of them

    def push(self, text: str, calls: list[ToolCallDelta]) -> int:
        """Read `text` up to the object's end; returns how many characters that were."""
        for position, char in enumerate(text):
            if self._depth == 0 and char != "{" and not (char.isspace() and not self.text.strip()):
                self.is_over = True  # no object
                return position
            self.text += char
            self._take(char)
            if self._depth == 0 and char == "}":
                self.is_over = True
                self._arguments = self._arguments or "{}"
                self._send(calls)
                return position + 1
        self._send(calls)
        return len(text)

    def _take(self, char: str) -> None:
        if self._in_string:
            self._raw += char
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._raw += char
            self._in_string = True
        elif char in "}]" and self._depth == 1:
            self._end_value()
            self._depth = 0
        elif char in "{[}]":
            self._depth += 1 if char in "{[" else -1
            self._raw += char if self._depth > 1 or char in "}]" else ""
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key, self._raw = _parse(self._raw), ""
            return
        elif self._depth == 1 and char == ",":
            self._end_value()
            return
        elif not char.isspace() or self._depth > 1:
            self._raw += char
        is_text = self._depth == 1 and self._raw.startswith('"')
        if self._key in _ARGUMENTS and self._raw and not is_text:
            self._arguments += self._raw
            self._raw = ""

    def _end_value(self) -> None:
        if self._key == "name" and (name := _parse(self._raw)) in self._functions:
            self._name = name
        elif self._key in _ARGUMENTS and self._raw.startswith('"'):
            self._arguments += _parse(self._raw) or ""  # JSON as a text, as some models write
        self._key, self._raw = None, ""

    def _send(self, calls: list[ToolCallDelta]) -> None:
        if self._name is None:
            return
        is_valid = self.is_over and _is_object(self._arguments)
        if not self.is_call:
            is_begun = self._key in _ARGUMENTS and self._arguments.startswith("{") and not self._whole
            if not is_valid and (self.is_over or not is_begun):
                return
            self.is_call = True
            calls.append(ToolCallDelta(self._index, f"call_{uuid.uuid4().hex[:24]}", self._name, ""))
        if self.is_over and not is_valid:
            raise EngineError(
                f"the model called {shorten(self._name)} with arguments that are no JSON object; ask again"
            )
        if piece := self._arguments[self._num_sent :]:
            calls.append(ToolCallDelta(self._index, None, None, piece))
            self._num_sent = len(self._arguments)


_ARGUMENTS = ("arguments", "parameters")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse(raw: str) -> str | None:
    """The text that the JSON string `raw` means, or None."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
