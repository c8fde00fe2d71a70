"""Server-sent events out of a stream of bytes, by the WHATWG's rules for `text/event-stream`."""

from __future__ import annotations

import re
from collections.abc import Iterator

# One event of a chat completion is some hundred bytes; the largest honest one is a whole tool call.
MAX_EVENT_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseError(Exception):
    """The stream is not one that we read; the text says why."""


class SseParser:
    """Reads one stream, whatever the borders of its pieces; only data counts, `event`, `id` and `retry` are left out.

    An event that its empty line has not ended when the stream does is none, as the rules say.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # the beginning of a line
        self._data: list[bytes] = []  # lines of the event so far
        self._num_bytes = 0  # of `_data`
        self._ended_in_cr = False
        self._is_first_line = True

    def push(self, data: bytes) -> Iterator[str]:
        """The data of each event that `data` completes; iterate to the end before the next push.

        Raises `SseError` when an event, or a line, has more than `max_event_bytes`.
        """
        if not data:
            return
        rest_of_line_end = b"\n" if self._ended_in_cr else b""
        self._ended_in_cr = data.endswith(b"\r")
        data = data.removeprefix(rest_of_line_end)
        *ends, rest = _LINE_END.split(data)
        for end in ends:
            line = bytes(self._line + end)
            self._line.clear()
            self._check(len(line))
            yield from self._end_line(line)
        self._line += rest
        self._check(len(self._line))

    def _end_line(self, line: bytes) -> Iterator[str]:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data:
                yield b"\n".join(self._data).decode(errors="replace")
            self._data, self._num_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_bytes += len(line)

    def _check(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_event_bytes:
            raise SseError(f"an event has more than {self._max_event_bytes} bytes")
