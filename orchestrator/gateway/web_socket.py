"""uvicorn's WebSocket connection, with limits on what one client may cost."""

from __future__ import annotations

import logging
from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

# Until the client has read what waits for it; then the connection is cut. The keep-alive pings alone would close it
# in order, which waits for the client too.
WRITE_S = 30.0
# From the whole request to the answer, which is not ours alone: what reads the request may give it up without a word.
HANDSHAKE_S = 30.0

# uvicorn notes each handshake with its whole address, and some clients put their key there.
_logger = logging.getLogger("uvicorn.error.web_socket")
_logger.setLevel(logging.WARNING)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection, after its handshake was read by `orchestrator.gateway.protocol`."""

    write_s = WRITE_S
    handshake_s = HANDSHAKE_S
    _write_timer: TimerHandle | None = None
    _handshake_timer: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        self.logger = _logger
        super().connection_made(transport)
        self._handshake_timer = self.loop.call_later(self.handshake_s, self._end_handshake)

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
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        super().connection_lost(exc)

    def _end_handshake(self) -> None:
        if not self.handshake_complete:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
