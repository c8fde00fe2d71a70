"""uvicorn's HTTP/1.1 connection, with limits on what one client may cost before and beside a request.

uvicorn bounds neither the size of a head, nor the time a request takes to arrive, nor the time a client takes to read;
and of two pipelined requests it lets only the second one know that the client left. Its flow control is kept:
`send` waits while the transport's buffer (64 KiB) is full, and so does whoever produces.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from typing import Any, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from orchestrator.errors import ApiError, InvalidRequestError, RequestTooLargeError
from orchestrator.gateway.errors import HeadersTooLargeError, RequestTimeoutError
from orchestrator.gateway.messages import encode_error
from orchestrator.gateway.metrics import OTHER_ROUTE, count_answer
from orchestrator.gateway.ocr import MAX_BODY_BYTES as MAX_IMAGE_BODY_BYTES
from orchestrator.gateway.ocr import OCR_PATH
from orchestrator.gateway.request_id import REQUEST_ID_HEADER, choose_request_id
from orchestrator.gateway.transcriptions import MAX_BODY_BYTES as MAX_SOUND_BODY_BYTES
from orchestrator.gateway.transcriptions import TRANSCRIPTIONS_PATH
from orchestrator.unread import Unread

# Routes whose body is a file, or a form with one, and its most bytes.
_FILE_BODY_BYTES = {OCR_PATH: MAX_IMAGE_BODY_BYTES, TRANSCRIPTIONS_PATH: MAX_SOUND_BODY_BYTES}


_HALF_CLOSED = (
    "the sending side of the connection was closed before the answer, which means here that nobody waits for it; "
    "keep it open until the answer is whole"
)


class Limits(NamedTuple):
    """Per connection. A request's own size is its route's matter."""

    head_bytes: int = 64 << 10  # request target and headers
    num_headers: int = 100
    read_s: float = 30.0  # a request, from its first byte to its last
    write_s: float = 30.0  # until the client has read what waits for it
    idle_s: float = 60.0  # between requests, and before the first
    # What still comes of a request that has its answer is read and thrown away, so that the client gets to read the
    # answer; up to here.
    discarded_bytes: int = 16 << 20
    # A body of 1 MiB in chunks of one byte is 6 MiB; more can only be chunk extensions and trailers, or a file.
    raw_bytes: int = 8 << 20
    file_raw_bytes: int = max(_FILE_BODY_BYTES.values()) + (8 << 20)


class _Pipelined(Exception):
    """A request that did not wait for the answer to the one before."""


class _Parser(httptools.HttpRequestParser):
    """Parses the head of a request anew, without its offer to go on in another protocol, if that is declined.

    httptools takes any offer for accepted, and the body behind it for the other protocol's. What goes on is another
    parser: this one reads nothing more behind a head that says `Connection: close`, as HTTP/1.0 always does.
    """

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._protocol.declines_upgrade():
                raise
            (num_parsed,) = offer.args
            head = self._protocol.head_without_upgrade()
            self._protocol.parser = _Parser(self._protocol)
            self._protocol.parser.feed_data(head + data[num_parsed:])


class Protocol(HttpToolsProtocol):
    """One connection. Breaking a limit answers 408, 431 or 400 if no answer has begun, and closes."""

    limits = Limits()

    # What the connection is in the midst of.
    _has_begun = False  # its first request
    _is_reading = False  # a request
    _is_in_head = False
    _has_file = False  # a request whose body is one
    _is_deaf = False  # to everything that still comes
    _is_upgraded = False  # it is a WebSocket now, and no matter of this class
    _num_head_bytes = 0
    _num_discarded = 0
    _num_raw_bytes = 0  # of the request under way, with all that frames its body
    _idle_since_s: float | None = None  # loop time; None while a request is under way
    _refusal: ApiError | None = None
    _read_timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        _unread.forget(self)
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._discard(len(data))
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.limits.head_bytes:
                self._refuse(self._head_too_large())
                return
        else:
            self._num_head_bytes = len(data)  # at most, should one begin in here
            if self._is_reading and self.cycle.response_complete:
                self._discard(len(data))
            elif self._is_reading:
                self._num_raw_bytes += len(data)
            max_raw_bytes = self.limits.file_raw_bytes if self._has_file else self.limits.raw_bytes
            if self._num_raw_bytes > max_raw_bytes:
                self._refuse(RequestTooLargeError(f"chunks and trailers of more than {max_raw_bytes} bytes"))
                return
        super().data_received(data)
        if self._is_upgraded:
            return
        if self._is_reading:
            if self._read_timer is None:
                self._read_timer = self.loop.call_later(self.limits.read_s, self._read_timed_out)
            return
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        # uvicorn stops the clock for whatever comes: line ends, or the rest of a request that has its answer.
        if self.timeout_keep_alive_task is None and (not self._has_begun or self.cycle.response_complete):
            self._wait_for_request()

    def eof_received(self) -> None:
        """The client has closed its side, which is all that is seen of one that leaves: so it has left.

        One that would still read is told so, unless an answer has begun; asyncio closes the connection.
        """
        if self._is_reading or (self._has_begun and not self.cycle.response_started):
            self._refuse(InvalidRequestError(_HALF_CLOSED), is_counted=False)

    # --- the parser's calls ---

    def on_message_begin(self) -> None:
        # The head of one that declined an upgrade begins twice.
        if self._has_begun and not self._is_in_head and not self.cycle.response_complete:
            raise _Pipelined
        super().on_message_begin()
        self._idle_since_s = None
        self._has_begun = self._is_reading = self._is_in_head = True
        self._num_discarded = self._num_raw_bytes = 0

    def on_headers_complete(self) -> None:
        is_large = self._num_head_bytes > self.limits.head_bytes and (
            len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.head_bytes
        )
        if is_large or len(self.headers) > self.limits.num_headers:
            self._refusal = self._head_too_large()
            raise self._refusal
        if self.declines_upgrade():
            return
        if self.parser.should_upgrade() and self._should_upgrade() and self._has_body():
            self._refusal = InvalidRequestError(
                "a request that opens a WebSocket has no body; remove content-length and transfer-encoding"
            )
            raise self._refusal
        super().on_headers_complete()
        self._is_in_head = False
        self._has_file = self.scope.get("path") in _FILE_BODY_BYTES  # there is none yet if it is to be a WebSocket

    def on_message_complete(self) -> None:
        if self.declines_upgrade():
            return
        self._is_reading = False
        super().on_message_complete()

    def declines_upgrade(self) -> bool:
        """Whether the request offers to go on in another protocol than WebSocket, such as HTTP/2 (`curl --http2`).

        Such an offer may be ignored (RFC 9110, section 7.8). CONNECT, which the parser has for one too, is refused.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _should_upgrade(self) -> bool:
        """Only a GET of HTTP/1.1 can open a WebSocket (RFC 6455, section 4.1)."""
        opens = self.parser.get_method() == b"GET" and self.parser.get_http_version() == "1.1"
        return opens and super()._should_upgrade()

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        )

    def head_without_upgrade(self) -> bytes:
        """The head that was just parsed, without what makes it an offer."""
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = (b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return line + b"".join(headers) + b"\r\n"

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when the parser gives up."""
        if self._has_begun and not self._is_reading and not self.cycle.response_complete:
            # What follows a whole request is not heard before that has its answer, and not after it either: clients
            # must not pipeline behind a POST, and must send again what a closed connection left unanswered (RFC 9112,
            # section 9.3).
            self._is_deaf = True
            self.cycle.keep_alive = False
            return
        self._refuse(self._refusal or InvalidRequestError("the request is not valid HTTP/1.1"))

    # --- uvicorn's and the transport's calls ---

    def handle_websocket_upgrade(self) -> None:
        self._is_upgraded = True
        self._unset_keepalive_if_required()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():
            self._bound_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_writing()
        # All that there will be: from now on `send` waits.
        _unread.add(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        _unread.forget(self)
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    # --- limits ---

    def _wait_for_request(self) -> None:
        """Line ends between requests, which HTTP allows, do not make the wait longer."""
        self._unset_keepalive_if_required()
        if self._idle_since_s is None:
            self._idle_since_s = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_at(
            self._idle_since_s + self.limits.idle_s, self.timeout_keep_alive_handler
        )

    def _read_timed_out(self) -> None:
        self._refuse(RequestTimeoutError(f"the request took longer than {self.limits.read_s:g} s to arrive"))

    def _head_too_large(self) -> HeadersTooLargeError:
        return HeadersTooLargeError(
            f"at most {self.limits.head_bytes} bytes of request target and headers, in at most "
            f"{self.limits.num_headers} headers, are allowed"
        )

    def _refuse(self, error: ApiError, *, is_counted: bool = True) -> None:
        """Answer, unless an answer to this request has begun, and close."""
        if self.transport.is_closing():
            return
        if self._has_begun and not self._is_in_head:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = encode_error(error)
        request_id = choose_request_id(dict(self.headers))
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            + REQUEST_ID_HEADER
            + b": %b\r\nconnection: close\r\n\r\n" % request_id
            + body
        )
        if is_counted:
            count_answer(OTHER_ROUTE, error.status)
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._bound_writing()

    def _bound_writing(self) -> None:
        """A transport keeps what its client does not read, and once closing waits for the client forever."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > self.limits.discarded_bytes:
            self.transport.abort()


def _address_of(connection: Protocol) -> str:
    return connection.client[0] if connection.client is not None else ""


def _cut(connection: Protocol) -> None:
    connection.loop.call_soon(connection.transport.abort)  # it may be in the midst of a write


_unread = Unread(_address_of, _cut)
