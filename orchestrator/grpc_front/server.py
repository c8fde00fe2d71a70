"""Triton's gRPC service as strangers get it: health, metadata and inference of public models, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
from google.protobuf import text_format
from grpc import aio
from tritonclient.grpc import model_config_pb2, service_pb2

from orchestrator.config import load_tiers
from orchestrator.contracts import EMBEDDING_MODEL, FRONT_MODELS, ORCHESTRATOR_MODEL
from orchestrator.errors import ApiError
from orchestrator.grpc_front.calls import Call, Handler, Method, Places, Server
from orchestrator.grpc_front.checks import check_model, check_version
from orchestrator.grpc_front.relay import WRITE_TIMEOUT_S, StreamRelay, Upstream, infer, parse
from orchestrator.readiness import engines_of, find_not_ready
from orchestrator.replicas import Replicas
from orchestrator.request import MAX_REQUEST_BYTES

Answer = Callable[[bytes, Call], Awaitable[bytes]]

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
# In all, of one address, and of those for which nothing runs. Inference does not take the places of health calls.
_MAX_RPCS, _MAX_RPCS_PER_PEER, _MAX_IDLE_RPCS = 1024, 512, 256
_MAX_ASKING, _MAX_ASKING_PER_PEER, _MAX_IDLE_ASKING = 256, 128, 64
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
        places = Places(_MAX_RPCS, _MAX_RPCS_PER_PEER, _MAX_IDLE_RPCS)
        asking = Places(_MAX_ASKING, _MAX_ASKING_PER_PEER, _MAX_IDLE_ASKING)
        answered = {name: Method(_unary(self._ask(name)), asking) for name in _ASKED} | {
            "ModelInfer": Method(_unary(self._infer), places),
            "ModelStreamInfer": Method(self._stream_infer, places),
        }
        self._methods = {
            f"/{_SERVICE.full_name}/{method.name}": answered.get(method.name) or Method(_deny(method.name), asking)
            for method in _SERVICE.methods
        }
        self._unknown = Method(_refuse, asking)

    def new_server(self) -> Server:
        return Server(self._methods, self._unknown, _OPTIONS)

    def replace(self, served: Served) -> None:
        """Another artifact, for all requests from now on, also on streams that are open."""
        self._served = served
        self._replicas.engines = served.engines
        self._upstream.max_batch, self._upstream.models = served.max_batch, served.models

    def drain(self) -> None:
        """Let what runs end, and take nothing new on streams that are open."""
        for relay in self._relays:
            relay.drain()

    def _ask(self, name: str) -> Answer:
        async def ask(data: bytes, call: Call) -> bytes:
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
                return await _abort(call, error)
            except aio.AioRpcError as error:
                return await call.abort(error.code(), error.details() or "")

        return ask

    async def _infer(self, data: bytes, call: Call) -> bytes:
        try:
            answer = await infer(self._upstream, data, call.metadata)
            return bytes(answer.SerializeToString())
        except ApiError as error:
            return await _abort(call, error)

    async def _stream_infer(self, call: Call) -> None:
        relay = StreamRelay(self._upstream, call)
        self._relays.add(relay)
        try:
            await relay.run()
        finally:
            self._relays.discard(relay)


def _unary(answer: Answer) -> Handler:
    async def serve(call: Call) -> None:
        data = await call.read()
        if data is aio.EOF:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call holds no message")
        call.be_busy()
        response = await answer(data, call)
        call.be_idle(WRITE_TIMEOUT_S, f"the answer was not read for {WRITE_TIMEOUT_S:g} s")
        await call.write(response)

    return serve


def _deny(name: str) -> Handler:
    async def deny(call: Call) -> None:
        await call.abort(grpc.StatusCode.PERMISSION_DENIED, f"{name} is not served here; what is: {', '.join(_SERVED)}")

    return deny


async def _refuse(call: Call) -> None:
    await call.abort(grpc.StatusCode.UNIMPLEMENTED, f"only {_SERVICE.full_name} is served here")


async def _abort(call: Call, error: ApiError) -> NoReturn:
    """Its headers go as trailing metadata, and in the message as on a stream."""
    code = _STATUS_CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await call.abort(code, error.to_message(), tuple(error.headers.items()))
