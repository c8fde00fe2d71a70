"""The routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from orchestrator.config import load_tiers
from orchestrator.gateway.chat import Completions
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.pipeline import AUTO


def create_app(artifact: Path, triton_grpc_url: str) -> Starlette:
    """The ASGI application for the models of `artifact`, served by the Triton at `triton_grpc_url`."""
    tiers = load_tiers(artifact / "tiers.toml").tier
    model_names = [AUTO, *dict.fromkeys([*(tier.name for tier in tiers), *(tier.model for tier in tiers)])]
    engines = list(dict.fromkeys(tier.model for tier in tiers))
    created = int((artifact / "manifest.json").stat().st_mtime)
    triton = TritonClient(triton_grpc_url)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await triton.close()

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> JSONResponse:
        missing = await triton.find_not_ready(engines)
        if missing:
            return JSONResponse({"status": "not ready", "not_ready": missing}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def models(_: Request) -> JSONResponse:
        rows = [
            {"id": name, "object": "model", "created": created, "owned_by": "triton-realtime"} for name in model_names
        ]
        return JSONResponse({"object": "list", "data": rows})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", Completions(triton, "chat"), methods=["POST"]),
            Route("/v1/completions", Completions(triton, "completion"), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/ready", ready),
        ],
        lifespan=lifespan,
    )
