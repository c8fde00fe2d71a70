"""`/v1/rt/cache/...`: the operator's orders to the cache. For whoever sits at this machine, and has a key that may."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from typing import Literal

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import CACHE_OPERATION_PARAMETER
from orchestrator.errors import ApiError, EngineError
from orchestrator.gateway.errors import NotLocalError
from orchestrator.gateway.messages import ClientLeft, forwarded_headers, send_error, send_json
from orchestrator.gateway.places import json_body
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.replicas import Replica

# What a proxy adds: then the connection is local, but who asks is not known to be.
_FORWARDED = (b"forwarded", b"x-forwarded-for")


class CacheOperation:
    """An ASGI endpoint of one operation, which each Triton is told."""

    def __init__(self, triton: TritonClient, operation: Literal["wrong", "invalidate"], *, shares_cache: bool) -> None:
        """`shares_cache` says that all Tritons have one cache together."""
        self._triton = triton
        self._operation = operation
        self._shares_cache = shares_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_local(scope)
            await self._triton.check("cache", forwarded_headers(scope))
            async with json_body(scope, receive, self._triton) as body:
                answer = await (self._mark_wrong(body) if self._operation == "wrong" else self._invalidate(body))
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, error)
        else:
            await send_json(send, 200, answer)

    async def _mark_wrong(self, body: bytes) -> bytes:
        """The one that gave an answer remembers it; the others refuse its id."""
        refusal: ApiError | None = None
        for replica in self._triton.replicas.serving:
            try:
                return await self._ask(replica, body)
            except ApiError as error:
                refusal = error
        assert refusal is not None
        raise refusal

    async def _invalidate(self, body: bytes) -> bytes:
        """The numbers of all together."""
        replicas = self._triton.replicas.serving
        if self._shares_cache or len(replicas) == 1:
            return await self._ask(self._triton.replicas.choose(), body)
        answers = [json.loads(await self._ask(replica, body)) for replica in replicas]
        numbers = {name: sum(answer[name] for answer in answers) for name in answers[0] if name != "dry_run"}
        return json.dumps({**answers[0], **numbers}).encode()

    async def _ask(self, replica: Replica, body: bytes) -> bytes:
        events = TritonClient(self._triton.replicas, replica).open(body, [(CACHE_OPERATION_PARAMETER, self._operation)])
        async with contextlib.aclosing(events.read()) as reading:
            answers = [event async for event in reading]
        if not answers:
            raise EngineError("the orchestrator ended without an answer")
        return answers[0]


def _check_local(scope: Scope) -> None:
    host, _ = scope.get("client") or ("", 0)
    if not _is_loopback(host) or any(name in _FORWARDED for name, _ in scope["headers"]):
        raise NotLocalError(f"{scope['path']}: only from the machine itself, over loopback and through no proxy")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
