"""`python -m orchestrator.grpc_front`: the gRPC front's process, a child of `serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

import grpc
import uvloop

from orchestrator.config import ConfigError
from orchestrator.contracts import DEFAULT_GRPC_URL
from orchestrator.grpc_front.server import Front, Served
from orchestrator.replica_set import find_replicas
from orchestrator.replicas import Replicas


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.grpc_front", description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True, help="folder made by `python -m build`")
    parser.add_argument("--replicas", type=Path, metavar="FILE", help="the Tritons, as `serve` keeps them; else one:")
    parser.add_argument("--triton-grpc", default=DEFAULT_GRPC_URL, help="Triton's gRPC address (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=9001, help="port to listen on (%(default)s)")
    parser.add_argument("--cert", type=Path, help="TLS certificate chain, PEM; with --key")
    parser.add_argument("--key", type=Path, help="its private key, PEM")
    parser.add_argument("--drain-timeout-s", type=int, default=30, help="time live requests get to end (%(default)s)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # A header of other bytes than text is written to the log with its traceback: a way to fill a disk.
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "Invalid encoding" not in str(record.msg))
    uvloop.run(run(args))


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM, then drain."""
    known = find_replicas(args.replicas, args.artifact, args.triton_grpc)
    replicas = Replicas(known)
    front = Front(replicas, Served.read(known.artifact))
    version = known.version

    def note(replicas: Replicas) -> None:
        nonlocal version
        if replicas.known.version != version:
            version = replicas.known.version
            try:
                front.replace(Served.read(replicas.known.artifact))
            except (ConfigError, OSError):
                logging.exception("the artifact cannot be read; the models of the one before are still served")

    server = front.new_server()
    address = f"{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    if args.cert is None:
        port = server.add_insecure_port(address.encode())
    else:
        pair = args.key.read_bytes(), args.cert.read_bytes()
        port = server.add_secure_port(address.encode(), grpc.ssl_server_credentials((pair,)))
    if not port:
        raise SystemExit(f"cannot listen on {address}")
    await server.start()
    following = asyncio.create_task(replicas.run(args.replicas, note))
    logging.info("the gRPC front listens on %s%s", address, " with TLS" if args.cert else "")
    ended = asyncio.create_task(server.wait_for_termination(None))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.is_set():
        raise SystemExit("gRPC's server ended by itself")  # `serve` says so and stops
    front.drain()
    await server.shutdown(args.drain_timeout_s)
    following.cancel()
    await asyncio.wait([following])
    await replicas.close()


if __name__ == "__main__":
    main()
