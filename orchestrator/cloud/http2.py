"""Ends an HTTP/2 stream whose answer nobody reads to its end: httpcore forgets it and lets the server write on.

On HTTP/1.1 the connection is closed, which says the same. httpcore has no public place for this, hence its upper bound
in pyproject.toml and the test that watches a server.
"""

from __future__ import annotations

import contextlib

import h2.errors
import h2.events
import h2.exceptions
import httpcore
import httpcore._async.http2

RESET_TIMEOUT_S = 1.0


class ResettingConnection(httpcore.AsyncHTTP2Connection):
    """Sends RST_STREAM (CANCEL) for a stream that is closed here before the server has ended it."""

    async def _response_closed(self, stream_id: int) -> None:
        stream = self._h2_state.streams.get(stream_id)
        if stream is not None and not stream.closed:
            with contextlib.suppress(h2.exceptions.ProtocolError, httpcore.NetworkError, httpcore.TimeoutException):
                # What nobody read still counts against the window that all streams share.
                for event in self._events.get(stream_id, []):
                    if isinstance(event, h2.events.DataReceived):
                        self._h2_state.acknowledge_received_data(event.flow_controlled_length or 0, stream_id)
                self._h2_state.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
                await self._write_outgoing_data(_RESET)
        await super()._response_closed(stream_id)


# httpcore asks a request for its timeouts alone when it writes.
_RESET = httpcore.Request("RESET", "https://localhost", extensions={"timeout": {"write": RESET_TIMEOUT_S}})


def install() -> None:
    """From now on every HTTP/2 connection of httpcore's asynchronous pools, through a proxy too, is a resetting one."""
    httpcore._async.http2.AsyncHTTP2Connection = ResettingConnection  # type: ignore[misc]
