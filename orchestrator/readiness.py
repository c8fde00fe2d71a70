"""Whether the whole system is ready to answer, found out over Triton's gRPC service: the same truth on both fronts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator.config import Tier
from orchestrator.contracts import EMBEDDING_MODEL, ORCHESTRATOR_MODEL
from orchestrator.wire import stop_request, stop_text_request

TIMEOUT_S = 2.0


def engines_of(tiers: Sequence[Tier]) -> dict[str, str]:
    """The engine models behind `tiers`, and the runtime of each."""
    return {tier.model: tier.runtime for tier in tiers if tier.cloud is None}


async def find_not_ready(
    stub: Any, engines: Mapping[str, str], models: Sequence[str] = (ORCHESTRATOR_MODEL, EMBEDDING_MODEL)
) -> list[str]:
    """What is not ready: "triton", `models`, or names of `engines`; empty when all is.

    `stub` is one of Triton's service. Triton calls a Python model ready whose engine failed or whose process died, so
    each engine is asked itself.
    """
    not_ready = []
    try:
        server = await stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=TIMEOUT_S)
        if not server.ready:
            not_ready.append("triton")
        for model in models:
            request = service_pb2.ModelReadyRequest(name=model)
            if not (await stub.ModelReady(request, timeout=TIMEOUT_S)).ready:
                not_ready.append(model)
    except aio.AioRpcError:
        return ["triton"]
    return not_ready + [engine for engine, runtime in engines.items() if not await _answers(stub, engine, runtime)]


async def _answers(stub: Any, engine: str, runtime: str) -> bool:
    """Whether an engine model answers a stop for a request that does not exist, as the contract says it must.

    An engine of text says that it was cancelled, any other one nothing.
    """
    make = stop_text_request if runtime == "llmapi" else stop_request
    request = make(engine, f"ready-{uuid.uuid4().hex}")
    try:
        responses = stub.ModelStreamInfer(iter((request,)), timeout=TIMEOUT_S)
        errors = [response.error_message async for response in responses]
        return bool(errors) if runtime == "llmapi" else not any(errors)
    except aio.AioRpcError:
        return False
