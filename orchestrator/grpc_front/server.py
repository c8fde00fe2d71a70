"""Triton's gRPC service as strangers get it: health, metadata and inference of public models, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from grpc import aio
from grpc._cython import cygrpc
from tritonclient.grpc import model_config_pb2, service_pb2

from orchestrator.config import load_tiers
from orchestrator.contracts import EMBEDDING_MODEL, FRONT_MODELS, ORCHESTRATOR_MODEL
from orchestrator.errors import ApiError
from orchestrator.grpc_front.checks import check_model, check_version
from orchestrator.grpc_front.relay import StreamRelay, Upstream, infer, parse
from orchestrator.readiness import engines_of, find_not_ready
from orchestrator.replicas import Replicas
from orchestrator.request import MAX_REQUEST_BYTES

log = logging.getLogger("orchestrator.grpc_front")

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# Answered by Triton. All other calls change what the server runs, or watch what it does.
_ASKED = {
    "ServerLive": service_pb2.ServerLiveRequest,
    "ServerReady": service_pb2.ServerReadyRequest,
    "ServerMetadata": service_pb2.ServerMetadataRequest,
    "ModelReady": service_pb2.ModelReadyRequest,
    "ModelMetadata": service_pb2.ModelMetadataRequest,
}
_SERVED = (*_ASKED, "ModelInfer", "ModelStreamInfer")
_ASK_TIMEOUT_S = 5.0

# The margin is for what the protocol puts around the request's JSON.
MAX_MESSAGE_BYTES = MAX_REQUEST_BYTES + (64 << 10)
_MAX_RPCS = 1024
_MS = 1000
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 128),  # of one connection
    ("grpc.so_reuseport", 0),  # else a second server could share the port, and half of the callers
    # A peer that vanished without a word is found within 40 s; an idle connection goes after ten minutes.
    ("grpc.keepalive_time_ms", 30 * _MS),
    ("grpc.keepalive_timeout_ms", 10 * _MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10 * _MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10 * _MS),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_connection_idle_ms", 600 * _MS),
    ("grpc.server_handshake_timeout_ms", 10 * _MS),
)

_STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Server(cygrpc.AioServer):  # type: ignore[misc]
    """grpc.aio's server, which answers calls of unknown methods itself.

    The original decodes the path of a call of an unknown method as UTF-8 inside its accepting loop: one path of other
    bytes, from anybody, and it serves nobody any more (grpcio 1.85; there is no public way around it). All
    methods of ours are registered, so what arrives at `_request_call` is unknown, and its path is never looked at.
    """

    def __init__(self, front: Front) -> None:
        super().__init__(asyncio.get_running_loop(), None, (), (), _OPTIONS, _MAX_RPCS)
        self.add_registered_method_handlers(front.handlers)
        self._refusals: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(self._refuse(call))
            self._refusals.add(refusal)  # the loop itself keeps no reference
            refusal.add_done_callback(self._refusals.discard)

    async def _refuse(self, call: Any) -> None:
        context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
        try:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"only {_SERVICE.full_name} is served here")
        except Exception as error:  # `abort` always raises: that it did, or that the caller has left
            log.debug("a call of an unknown method: %r", error)


@dataclass(frozen=True)
class Served:
    """What the front must know of the artifact: its engine models, with the runtime of each, the most texts that one
    request may hold, and which of the public models it has.
    """

    engines: dict[str, str]
    max_batch: int
    models: tuple[str, ...] = tuple(FRONT_MODELS)

    @classmethod
    def read(cls, artifact: Path) -> Served:
        """Raises `OSError` or `ConfigError` when `artifact` is none."""
        tiers = load_tiers(artifact / "tiers.toml").tier
        config = (artifact / "model_repository" / EMBEDDING_MODEL / "config.pbtxt").read_text(encoding="utf-8")
        max_batch = text_format.Parse(config, model_config_pb2.ModelConfig()).max_batch_size
        models = tuple(name for name in FRONT_MODELS if (artifact / "model_repository" / name).is_dir())
        return cls(engines_of(tiers), max_batch, models)


class Front:
    """The handlers of every call of Triton's service. Messages come as bytes and are parsed by the handlers."""

    def __init__(self, replicas: Replicas, served: Served) -> None:
        self._replicas = replicas
        self._served = served
        replicas.engines = served.engines
        self._upstream = Upstream(replicas, served.max_batch, served.models)
        self._relays: set[StreamRelay] = set()
        answered = {name: _unary(self._ask(name)) for name in _ASKED} | {
            "ModelInfer": _unary(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream_infer),
        }
        self.handlers = {
            f"/{_SERVICE.full_name}/{method.name}": answered.get(method.name) or _unary(_deny(method.name))
            for method in _SERVICE.methods
        }

    def replace(self, served: Served) -> None:
        """Another artifact, for all requests from now on, also on streams that are open."""
        self._served = served
        self._replicas.engines = served.engines
        self._upstream.max_batch, self._upstream.models = served.max_batch, served.models

    def drain(self) -> None:
        """Let what runs end, and take nothing new on streams that are open."""
        for relay in self._relays:
            relay.drain()

    def _ask(self, name: str) -> Callable[[bytes, aio.ServicerContext], Awaitable[bytes]]:
        async def ask(data: bytes, context: aio.ServicerContext) -> bytes:
            try:
                request = parse(_ASKED[name], data)
                if "name" in request.DESCRIPTOR.fields_by_name:
                    check_model(request.name, self._served.models)
                    check_version(request.version)
                stub = self._replicas.choose().streams.stub
                response = await getattr(stub, name)(request, timeout=_ASK_TIMEOUT_S)
                if name == "ServerReady" or (name == "ModelReady" and request.name == ORCHESTRATOR_MODEL):
                    # As the gateway's /ready: Triton does not know of an engine that died inside its model.
                    response.ready = response.ready and not await find_not_ready(stub, self._served.engines)
                return bytes(response.SerializeToString())
            except ApiError as error:
                await _abort(context, error)
            except aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            raise AssertionError("abort raises")

        return ask

    async def _infer(self, data: bytes, context: aio.ServicerContext) -> bytes:
        try:
            answer = await infer(self._upstream, data, context.invocation_metadata() or ())
            return bytes(answer.SerializeToString())
        except ApiError as error:
            await _abort(context, error)
        raise AssertionError("abort raises")

    async def _stream_infer(self, _: object, context: aio.ServicerContext) -> None:
        relay = StreamRelay(self._upstream, context)
        self._relays.add(relay)
        try:
            await relay.run()
        finally:
            self._relays.discard(relay)


def _unary(handler: Callable[[bytes, aio.ServicerContext], Awaitable[bytes]]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(handler)


def _deny(name: str) -> Callable[[bytes, aio.ServicerContext], Awaitable[bytes]]:
    async def deny(_: bytes, context: aio.ServicerContext) -> bytes:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, f"{name} is not served here; what is: {', '.join(_SERVED)}"
        )
        raise AssertionError("abort raises")

    return deny


async def _abort(context: aio.ServicerContext, error: ApiError) -> None:
    """Its headers go as trailing metadata, and in the message as on a stream."""
    code = _STATUS_CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, error.to_message(), tuple(error.headers.items()))
