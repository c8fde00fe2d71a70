"""In front of every route: which names and web pages are answered, request ids, the count of answers, a last resort.

A server on loopback is still in reach of every web page that its user opens: by its address, and by a name of the
page's own that is made to point here (DNS rebinding). Hence a list of names and of origins.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Collection, Iterable
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.contracts import SINGLE_HEADERS
from orchestrator.errors import ApiError, InternalError, InvalidRequestError, ShuttingDownError, shorten
from orchestrator.gateway.errors import HostNotAllowedError, OriginNotAllowedError
from orchestrator.gateway.messages import refuse, send_error
from orchestrator.gateway.metrics import OTHER_ROUTE, count_answer
from orchestrator.gateway.request_id import REQUEST_ID_HEADER, choose_request_id, new_request_id
from orchestrator.request import REQUEST_ID_RULE, is_request_id

_HANDSHAKE_ANSWERS = ("websocket.accept", "websocket.http.response.start")
_SWITCHING = 101
_CLIENT_LEFT = 499  # nginx's; nobody reads it, it is only counted
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_WILDCARDS = ("0.0.0.0", "::")
# Of a host header: name or address, with IPv6 in brackets; then perhaps a port (RFC 9110, section 7.2).
# Of these two would mean that this server and a proxy before it may read different ones (RFC 9110, section 5.3, and for
# Host RFC 9112, section 3.2).
_SINGLE = (
    *(b"host", b"origin", b"content-type", b"content-encoding"),
    *(name.encode() for name in SINGLE_HEADERS),
)
_SCHEMES = (b"http", b"https")
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
        if scope["type"] == "websocket":
            await self._guard_web_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        status = _CLIENT_LEFT
        request_id = headers.get(REQUEST_ID_HEADER)
        refusal = _find_repeated(scope["headers"], headers) or self._find_fault(headers)
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

    async def _guard_web_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same for a handshake. Browsers let every page open a WebSocket anywhere, and say which page it is."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        route = scope["path"] if scope["path"] in self._routes else OTHER_ROUTE
        marks = [(REQUEST_ID_HEADER, choose_request_id(headers))]

        def send_counted(message: Message) -> Awaitable[None]:
            if message["type"] in _HANDSHAKE_ANSWERS:
                count_answer(route, message.get("status", _SWITCHING))
                message["headers"] = [*message["headers"], *marks]
            return send(message)

        refusal = _find_repeated(scope["headers"], headers) or self._find_fault(headers)
        if refusal is not None:
            await refuse(send_counted, refusal)
        else:
            await self._app(scope, receive, send_counted)

    def _find_fault(self, headers: dict[bytes, bytes]) -> ApiError | None:
        request_id = headers.get(REQUEST_ID_HEADER)
        if request_id is not None and not is_request_id(name := request_id.decode("latin-1")):
            return InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {shorten(name)})", param="x-request-id"
            )
        host = headers.get(b"host", b"")
        if not self._is_host_allowed(host):
            return HostNotAllowedError(
                f"host: {shorten(host.decode('latin-1'))} is not a name of this server; "
                "fix: `serve --allow-host NAME` if it should be"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._origins and not _is_page_of(origin, host):
            return OriginNotAllowedError(
                f"origin: pages of {shorten(origin.decode('latin-1'))} may not use this server; "
                "fix: `serve --allow-origin ORIGIN` if they should"
            )
        return None

    def _check_host(self, header: bytes) -> bool:
        match = _HOST.fullmatch(header.decode("latin-1").lower())
        return match is not None and (match[1] in self._hosts or (self._takes_any_address and _is_address(match[1])))


def _find_repeated(pairs: Collection[tuple[bytes, bytes]], headers: dict[bytes, bytes]) -> ApiError | None:
    if len(pairs) == len(headers):
        return None
    names = [name for name, _ in pairs]
    for name in _SINGLE:
        if (count := names.count(name)) > 1:
            return InvalidRequestError(f"{name.decode()}: sent {count} times; once is allowed", param=name.decode())
    return None


def _is_page_of(origin: bytes, host: bytes) -> bool:
    """Whether `origin` is a page that this server itself served, under the name that is asked now."""
    scheme, _, name = origin.partition(b"://")
    return scheme in _SCHEMES and name == host


def _is_address(host: str) -> bool:
    """Whether it is an IP address: no name, so nobody else can make it point here."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
