"""uvicorn's WebSocket connection, with limits on what one client may cost."""

from __future__ import annotations

import logging
from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from orchestrator.errors import InternalError, InvalidRequestError
from orchestrator.gateway.errors import UpgradeRequiredError
from orchestrator.gateway.messages import JSON, encode_error
from orchestrator.gateway.metrics import OTHER_ROUTE, count_answer
from orchestrator.gateway.request_id import REQUEST_ID_HEADER, choose_request_id

# Until the client has read what waits for it; then the connection is cut. The keep-alive pings alone would close it
# in order, which waits for the client too.
WRITE_S = 30.0
# From the whole request to the answer, which is not ours alone: what reads the request may give it up without a word.
HANDSHAKE_S = 30.0

_ERRORS = {error.status: error for error in (InvalidRequestError, UpgradeRequiredError)}
_MAX_TEXT_CHARS = 200
# uvicorn notes each handshake with its whole address, and some clients put their key there.
_logger = logging.getLogger("uvicorn.error.web_socket")
_logger.setLevel(logging.WARNING)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection, after its handshake was read by `orchestrator.gateway.protocol`."""

    write_s = WRITE_S
    handshake_s = HANDSHAKE_S
    _write_timer: TimerHandle | None = None
    _handshake_timer: TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reject_as_text = self.conn.reject
        self.conn.reject = self._reject  # type: ignore[method-assign]

    def connection_made(self, transport: BaseTransport) -> None:
        self.logger = _logger
        super().connection_made(transport)
        self._handshake_timer = self.loop.call_later(self.handshake_s, self._end_handshake)

    def data_received(self, data: bytes) -> None:
        """uvicorn does not look at what cannot be read as a handshake, of which the parser hears no more then."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated and not self.close_sent:
            self.handshake_complete = self.close_sent = True
            text = f"the handshake cannot be read: {self.conn.handshake_exc.__cause__ or self.conn.handshake_exc}"
            self.transport.write(self._reject(InvalidRequestError.status, text).serialize())
            self.transport.close()

    def shutdown(self) -> None:
        """uvicorn fails to close what is closing already, and so cuts everybody's answers."""
        if not self.transport.is_closing():
            super().shutdown()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        if self._write_timer is None and not self.disconnected:
            # It closes, which waits until the client has read all, however long that takes.
            self._write_timer = self.loop.call_later(self.write_s, self.transport.abort)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # refused; uvicorn would log that as an error of the application

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        super().connection_lost(exc)

    def _end_handshake(self) -> None:
        if not self.handshake_complete or self.transport.is_closing():
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _reject(self, status: int, text: str) -> Any:
        """In the place of the library's `reject`, which answers in plain text."""
        error = _ERRORS.get(status, InternalError)(text.partition("\n")[0][:_MAX_TEXT_CHARS])
        if error.status == InternalError.status:
            error = InternalError("internal error; the server's log tells it")
        request = getattr(self, "request", None)  # uvicorn sets it when there is one
        given = request.headers.get_all(REQUEST_ID_HEADER.decode()) if request is not None else []
        request_id = choose_request_id({REQUEST_ID_HEADER: given[-1].encode(errors="replace")} if given else {})
        count_answer(OTHER_ROUTE, error.status)
        answer = self._reject_as_text(error.status, encode_error(error).decode())
        del answer.headers["Content-Type"]
        answer.headers.update({"Content-Type": JSON.decode(), REQUEST_ID_HEADER.decode(): request_id.decode()})
        return answer
