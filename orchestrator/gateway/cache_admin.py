"""`/v1/rt/cache/...`: the operator's orders to the cache. For whoever sits at this machine, while there are no keys."""

from __future__ import annotations

import contextlib
import ipaddress

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import CACHE_OPERATION_PARAMETER
from orchestrator.errors import ApiError, EngineError
from orchestrator.gateway.errors import NotLocalError
from orchestrator.gateway.messages import ClientLeft, read_json_body, send_error, send_json
from orchestrator.gateway.triton_client import TritonClient

# What a proxy adds: then the connection is local, but who asks is not known to be.
_FORWARDED = (b"forwarded", b"x-forwarded-for")


class CacheOperation:
    """An ASGI endpoint of one operation."""

    def __init__(self, triton: TritonClient, operation: str) -> None:
        self._triton = triton
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_local(scope)
            body = await read_json_body(scope, receive)
            events = self._triton.open(body, [(CACHE_OPERATION_PARAMETER, self._operation)])
            async with contextlib.aclosing(events.read()) as reading:
                answers = [event async for event in reading]
            if not answers:
                raise EngineError("the orchestrator ended without an answer")
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, error)
        else:
            await send_json(send, 200, answers[0])


def _check_local(scope: Scope) -> None:
    host, _ = scope.get("client") or ("", 0)
    if not _is_loopback(host) or any(name in _FORWARDED for name, _ in scope["headers"]):
        raise NotLocalError(f"{scope['path']}: only from the machine itself, over loopback and through no proxy")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
