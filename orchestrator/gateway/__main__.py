"""`python -m orchestrator.gateway`: the gateway, a child of `serve`; with `--workers`, the parent of its workers."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import sys
from functools import partial
from pathlib import Path

import uvicorn
from uvicorn.supervisors import Multiprocess

from orchestrator.contracts import DEFAULT_GRPC_URL, DEFAULT_METRICS_URL
from orchestrator.gateway.app import GatewayOptions, create_app
from orchestrator.gateway.metrics import FOLDER_VARIABLE
from orchestrator.gateway.protocol import Protocol
from orchestrator.gateway.web_socket import WebSocketProtocol
from orchestrator.instrumentation import is_instrumented
from orchestrator.redis_address import REDIS_VARIABLE
from orchestrator.replica_set import find_replicas
from orchestrator.voice.client_events import MAX_EVENT_BYTES

# What the kernel keeps for a client that does not read; Linux doubles it, and would let it grow to 4 MiB by itself.
SEND_BUFFER_BYTES = 128 << 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.gateway", description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True, help="folder made by `python -m build`")
    parser.add_argument("--replicas", type=Path, metavar="FILE", help="the Tritons, as `serve` keeps them; else one:")
    parser.add_argument("--triton-grpc", default=DEFAULT_GRPC_URL, help="Triton's gRPC address (%(default)s)")
    parser.add_argument("--triton-metrics", default=DEFAULT_METRICS_URL, help="Triton's metrics page (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (%(default)s)")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a further name, repeatable")
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="a web page's, repeatable"
    )
    parser.add_argument("--with-keys", action="store_true", help="the orchestrator has keys: ask it about callers")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the port (%(default)s)")
    parser.add_argument("--metrics-dir", type=Path, metavar="DIR", help="where several workers keep their numbers")
    parser.add_argument("--drain-timeout-s", type=int, default=30, help="time live requests get to end (%(default)s)")
    args = parser.parse_args()
    if args.workers > 1 and args.metrics_dir is None:
        parser.error("--workers above 1 needs --metrics-dir: the workers add up their metrics there")
    _allow_many_connections()
    options = GatewayOptions(
        replicas=find_replicas(args.replicas, args.artifact, args.triton_grpc, args.triton_metrics),
        replicas_file=args.replicas,
        host=args.host,
        allowed_hosts=tuple(args.allow_host),
        allowed_origins=tuple(args.allow_origin),
        with_keys=args.with_keys,
        is_instrumented=is_instrumented(os.environ),
        shares_cache=bool(os.environ.get(REDIS_VARIABLE)),
    )
    config = uvicorn.Config(
        partial(create_app, options),
        factory=True,
        host=args.host,
        port=args.port,
        workers=args.workers,
        loop="uvloop",
        http=Protocol,
        ws=WebSocketProtocol,
        ws_max_size=MAX_EVENT_BYTES + 1024,
        ws_per_message_deflate=False,  # sound as base64 hardly shrinks
        log_level="info",
        access_log=False,
        proxy_headers=False,  # nothing here asks where a client is
        server_header=False,
        timeout_keep_alive=int(Protocol.limits.idle_s),
        timeout_graceful_shutdown=args.drain_timeout_s,
    )
    # Sizes are inherited by every connection. Bound here, so that workers accept from one socket.
    listener = config.bind_socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if args.workers == 1:
        server = uvicorn.Server(config)
        server.run([listener])
        sys.exit(not server.started)
    shutil.rmtree(args.metrics_dir, ignore_errors=True)  # the numbers of the workers of another time
    args.metrics_dir.mkdir(parents=True)
    os.environ[FOLDER_VARIABLE] = str(args.metrics_dir)
    # A worker that dies is replaced; one that cannot start ends them all.
    Multiprocess(config, sockets=[listener]).run()


def _allow_many_connections() -> None:
    """As many open files as this user may have: every connection is one, and shells often allow 1,024."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


if __name__ == "__main__":
    main()
