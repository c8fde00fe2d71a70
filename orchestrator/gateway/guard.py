"""In front of every route: which names and web pages are answered, request ids, the count of answers, a last resort.

A server on loopback is still in reach of every web page that its user opens: by its address, and by a name of the
page's own that is made to point here (DNS rebinding). Hence a list of names and of origins.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Iterable
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.errors import ApiError, InternalError, InvalidRequestError, ShuttingDownError
from orchestrator.gateway.errors import HostNotAllowedError, OriginNotAllowedError
from orchestrator.gateway.messages import send_error
from orchestrator.gateway.metrics import OTHER_ROUTE, count_answer
from orchestrator.gateway.request_id import REQUEST_ID_HEADER, new_request_id
from orchestrator.request import REQUEST_ID_RULE, is_request_id

_CLIENT_LEFT = 499  # nginx's; nobody reads it, it is only counted
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_WILDCARDS = ("0.0.0.0", "::")
# Of a host header: name or address, with IPv6 in brackets; then perhaps a port (RFC 9110, section 7.2).
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d*)?")

_logger = logging.getLogger("uvicorn.error")


class Guard:
    """The ASGI application around all others.

    `host` is the address listened on, `allowed_hosts` are further names (without a port), `allowed_origins` are whole
    origins such as ``https://chat.example.com``. A page that this server itself served may always ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        allowed_hosts: Iterable[str],
        allowed_origins: Iterable[str],
        routes: Iterable[str],
    ) -> None:
        self._app = app
        own_host = f"[{host}]" if ":" in host else host
        self._hosts = {name.lower() for name in (*_LOOPBACK_NAMES, own_host, *allowed_hosts)}
        self._takes_any_address = host in _WILDCARDS
        self._origins = {origin.encode() for origin in allowed_origins}
        self._routes = frozenset(routes)
        self._is_host_allowed = lru_cache(maxsize=64)(self._check_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        status = _CLIENT_LEFT
        request_id = headers.get(REQUEST_ID_HEADER)
        refusal = self._find_fault(headers)
        if request_id is None or not is_request_id(request_id.decode("latin-1")):
            request_id = new_request_id()
            scope["headers"] = [*scope["headers"], (REQUEST_ID_HEADER, request_id)]

        def send_marked(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                marks = [(REQUEST_ID_HEADER, request_id)]
                if status >= 400 and b"expect" in headers:
                    marks.append((b"connection", b"close"))  # whether the body will come is anyone's guess
                message["headers"] = [*message["headers"], *marks]
            return send(message)

        try:
            if refusal is not None:
                await send_error(send_marked, refusal)
            else:
                await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:
            # The server stops and its drain time is over. What has begun, its route has ended.
            if status == _CLIENT_LEFT:
                await send_error(send_marked, ShuttingDownError("the server is shutting down"))
        except Exception:
            _logger.exception("request %s failed", request_id.decode())
            if status not in (_CLIENT_LEFT, InternalError.status):
                raise  # an answer has begun: uvicorn cuts the connection, so that it does not look whole
            if status == _CLIENT_LEFT:
                await send_error(
                    send_marked, InternalError("internal error; the server's log tells it by the request id")
                )
        finally:
            count_answer(scope["path"] if scope["path"] in self._routes else OTHER_ROUTE, status)

    def _find_fault(self, headers: dict[bytes, bytes]) -> ApiError | None:
        request_id = headers.get(REQUEST_ID_HEADER)
        if request_id is not None and not is_request_id(name := request_id.decode("latin-1")):
            return InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {name[:80]!r})", param="x-request-id"
            )
        host = headers.get(b"host", b"")
        if not self._is_host_allowed(host):
            return HostNotAllowedError(
                f"host: {host[:80].decode('latin-1')!r} is not a name of this server; "
                "fix: `serve --allow-host NAME` if it should be"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._origins and origin.partition(b"://")[2] != host:
            return OriginNotAllowedError(
                f"origin: pages of {origin[:80].decode('latin-1')!r} may not use this server; "
                "fix: `serve --allow-origin ORIGIN` if they should"
            )
        return None

    def _check_host(self, header: bytes) -> bool:
        match = _HOST.fullmatch(header.decode("latin-1").lower())
        return match is not None and (match[1] in self._hosts or (self._takes_any_address and _is_address(match[1])))


def _is_address(host: str) -> bool:
    """Whether it is an IP address: no name, so nobody else can make it point here."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
