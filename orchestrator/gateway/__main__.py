"""`python -m orchestrator.gateway`: the gateway process, a child of `serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn

from orchestrator.contracts import DEFAULT_GRPC_URL
from orchestrator.gateway.app import create_app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.gateway", description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True, help="folder made by `python -m build`")
    parser.add_argument("--triton-grpc", default=DEFAULT_GRPC_URL, help="Triton's gRPC address (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (%(default)s)")
    parser.add_argument("--drain-timeout-s", type=int, default=30, help="time live requests get to end (%(default)s)")
    args = parser.parse_args()
    uvicorn.run(
        create_app(args.artifact, args.triton_grpc),
        host=args.host,
        port=args.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=args.drain_timeout_s,
    )


if __name__ == "__main__":
    main()
