"""The routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.config import ConfigError, Embedder, Speech, load_tiers, read_toml
from orchestrator.contracts import ANSWER_HEADERS, EMBEDDING_MODEL, OCR_MODEL, STT_MODEL, TTS_MODEL
from orchestrator.errors import ApiError, InternalError, InvalidRequestError, ModelNotFoundError, shorten
from orchestrator.gateway.cache_admin import CacheOperation
from orchestrator.gateway.chat import Completions
from orchestrator.gateway.embeddings import Embeddings
from orchestrator.gateway.errors import MethodNotAllowedError, RouteNotFoundError, UpgradeRequiredError
from orchestrator.gateway.guard import Guard
from orchestrator.gateway.messages import error_headers, forwarded_headers, refuse
from orchestrator.gateway.metrics import CONTENT_TYPE, count_requests, render_page, tell_replicas
from orchestrator.gateway.ocr import OCR_PATH, Ocr
from orchestrator.gateway.openapi import describe
from orchestrator.gateway.playground import Playground
from orchestrator.gateway.realtime import REALTIME_PATH, Realtime
from orchestrator.gateway.speech import SPEECH_PATH, Speaking
from orchestrator.gateway.transcriptions import TRANSCRIPTIONS_PATH, Transcriptions
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.pipeline import AUTO
from orchestrator.readiness import engines_of
from orchestrator.replica_set import ReplicaSet
from orchestrator.replicas import Replicas
from orchestrator.voice.session import Abilities

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"

_logger = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class GatewayOptions:
    """`host` is the address listened on; `allowed_hosts` and `allowed_origins` are what `Guard` lets in beside it.

    `replicas` are the Tritons, and the artifact that they serve; with a `replicas_file` they change as it does.
    `with_keys` says that the orchestrator has keys, so that who may see what must be asked. `shares_cache` says that
    several Tritons have one cache. `is_instrumented` as in `orchestrator.instrumentation`.
    """

    replicas: ReplicaSet
    host: str
    replicas_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    with_keys: bool = False
    shares_cache: bool = False
    is_instrumented: bool = True


def create_app(options: GatewayOptions) -> Guard:
    """The ASGI application for the models of the artifact, served by one Triton or several."""
    count_requests(options.is_instrumented)
    replicas = Replicas(options.replicas, with_keys=options.with_keys)
    triton = TritonClient(replicas)
    site = _make_site(options, options.replicas.artifact, triton)
    replicas.engines = site.engines
    version = options.replicas.version

    def note(replicas: Replicas) -> None:
        nonlocal site, version
        tell_replicas(replicas)
        if replicas.known.version != version:
            version = replicas.known.version
            try:
                site = _make_site(options, replicas.known.artifact, triton)
                replicas.engines = site.engines
            except (ConfigError, OSError):
                _logger.exception("the artifact cannot be read; the models of the one before are still served")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(replicas.run(options.replicas_file, note))
        yield
        following.cancel()
        await asyncio.wait([following])
        await replicas.close()

    beside = Starlette(lifespan=lifespan)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        """To the endpoints of now; what has begun stays with those of before."""
        await (beside if scope["type"] == "lifespan" else site.app)(scope, receive, send)

    return Guard(
        _with_cors(dispatch, options.allowed_origins) if options.allowed_origins else dispatch,
        host=options.host,
        allowed_hosts=options.allowed_hosts,
        allowed_origins=options.allowed_origins,
        routes=site.paths,
    )


class _Site(NamedTuple):
    """What is served of one artifact; the paths are always the same."""

    app: ASGIApp
    paths: list[str]
    engines: dict[str, str]


def _make_site(options: GatewayOptions, artifact: Path, triton: TritonClient) -> _Site:
    """Raises `ConfigError` or `OSError` when `artifact` is none."""
    tiers = load_tiers(artifact / "tiers.toml").tier
    embedder = read_toml(artifact / "embedder.toml", Embedder)
    generators = dict.fromkeys([*(tier.name for tier in tiers), *(tier.model for tier in tiers)])
    adapted = [f"{name}:{each.name}" for tier in tiers for name in (tier.name, tier.model) for each in tier.adapters]
    has_ocr = (artifact / "model_repository" / OCR_MODEL).is_dir()
    speech_path = artifact / "speech.toml"
    speech = read_toml(speech_path, Speech) if speech_path.exists() else Speech()
    paths = dict.fromkeys([AUTO, *generators, *adapted], CHAT_PATH)  # of each model's name
    paths |= dict.fromkeys([EMBEDDING_MODEL, embedder.name], EMBEDDINGS_PATH)
    paths |= {OCR_MODEL: OCR_PATH} if has_ocr else {}
    paths |= dict.fromkeys([STT_MODEL, speech.transcriber.name], TRANSCRIPTIONS_PATH) if speech.transcriber else {}
    paths |= dict.fromkeys([TTS_MODEL, speech.speaker.name], SPEECH_PATH) if speech.speaker else {}
    engines = engines_of(tiers)
    created = int((artifact / "manifest.json").stat().st_mtime)
    description = describe()

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> JSONResponse:
        missing = await triton.find_not_ready(engines)
        if missing:
            return JSONResponse({"status": "not ready", "not_ready": missing}, status_code=503)
        return JSONResponse({"status": "ready"})

    def describe_model(name: str) -> dict[str, Any]:
        facts = {"id": name, "object": "model", "created": created, "owned_by": "triton-realtime"}
        return {**facts, "rt": {"path": paths[name]}}

    async def check(request: Request, right: str) -> None:
        await triton.check(right, forwarded_headers(request.scope))

    async def models(request: Request) -> JSONResponse:
        await check(request, "models")
        return JSONResponse({"object": "list", "data": [describe_model(name) for name in paths]})

    async def model(request: Request) -> JSONResponse:
        await check(request, "models")
        name = request.path_params["name"]
        if name not in paths:
            error = ModelNotFoundError(
                f"model: {shorten(name)} does not exist; one of {', '.join(paths)}", param="model"
            )
            return JSONResponse(error.body(), error.status)
        return JSONResponse(describe_model(name))

    async def metrics(request: Request) -> Response:
        await check(request, "metrics")
        return Response(await render_page(triton.replicas), headers={"content-type": CONTENT_TYPE})

    async def upgrade(_: Request) -> JSONResponse:
        error = UpgradeRequiredError(f"{REALTIME_PATH}: is a WebSocket; connect with ws:// instead")
        return JSONResponse(error.body(), error.status, {"upgrade": "websocket", "connection": "upgrade"})

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(description)

    endpoints: dict[str, ASGIApp] = {
        CHAT_PATH: Completions(triton, "chat"),
        "/v1/completions": Completions(triton, "completion"),
        EMBEDDINGS_PATH: Embeddings(triton, embedder),
        OCR_PATH: Ocr(triton, is_served=has_ocr),
        TRANSCRIPTIONS_PATH: Transcriptions(triton, speech.transcriber),
        SPEECH_PATH: Speaking(triton, speech.speaker),
        "/v1/rt/cache/wrong": CacheOperation(triton, "wrong", shares_cache=options.shares_cache),
        "/v1/rt/cache/invalidate": CacheOperation(triton, "invalidate", shares_cache=options.shares_cache),
    }
    chat_models = [name for name, path in paths.items() if path == CHAT_PATH]
    abilities = Abilities(speech.transcriber, speech.speaker)
    realtime = Realtime(triton, abilities, chat_models)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route("/", Playground(), methods=["GET"]),
        Route(REALTIME_PATH, upgrade),
        Route("/v1/models", models),
        Route("/v1/models/{name}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]
    handlers = {HTTPException: _refuse, ApiError: _answer_error, Exception: _fail}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would be made from the caller's host header

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        """Past Starlette's layers where the time to the first token counts; all else, wrong methods too, through."""
        if scope["type"] == "websocket":
            await (realtime if scope["path"] == REALTIME_PATH else _no_such_web_socket)(scope, receive, send)
            return
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = endpoints.get(scope["path"], app) if is_post else app
        await endpoint(scope, receive, send)

    return _Site(dispatch, [route.path for route in routes], engines)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """What pages of `origins` need to read the answers; everybody else's have no CORS headers."""
    return _Cors(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # the openai package sends a dozen of its own
        expose_headers=["x-request-id", *ANSWER_HEADERS],
    )


class _Cors(CORSMiddleware):
    """Starlette's, whose refusals are bare text, with ours."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        error = InvalidRequestError(f"the preflight: {bytes(answer.body).decode()}")
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return JSONResponse(error.body(), error.status, kept)


async def _refuse(request: Request, fault: Exception) -> JSONResponse:
    """What the router raises: 404 and 405, in OpenAI's shape."""
    assert isinstance(fault, HTTPException)
    if fault.status_code == MethodNotAllowedError.status:
        allowed = ", ".join(sorted((fault.headers or {})["Allow"].split(", ")))  # made from a set
        error = MethodNotAllowedError(f"{_target(request)}: allowed are {allowed}")
        return JSONResponse(error.body(), error.status, {"allow": allowed})
    missing = RouteNotFoundError(f"{_target(request)}: no such path; /openapi.json lists them")
    return JSONResponse(missing.body(), missing.status)


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error_headers(error))


async def _no_such_web_socket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await refuse(send, RouteNotFoundError(f"{shorten(scope['path'])}: the one WebSocket is {REALTIME_PATH}"))


def _target(request: Request) -> str:
    return f"{request.method} {shorten(request.url.path)[1:-1]}"


async def _fail(_: Request, __: Exception) -> JSONResponse:
    error = InternalError("internal error; the server's log tells it by the request id")
    return JSONResponse(error.body(), error.status)
