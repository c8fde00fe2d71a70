"""The TCP ports of `serve`: checked before anything starts, so a taken one is named at once."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.triton.process import StartError

LOOPBACK = "127.0.0.1"

# A free port is chosen below Linux's ephemeral range (ip_local_port_range, 32768 to 60999). Triton binds only
# after its models are loaded, seconds later; until then a connection out could be given an ephemeral port.
_CHOICE = range(20000, 32768)
_NUM_TRIES = 200


class Ports(NamedTuple):
    """TCP ports; 0 asks `settle` to choose."""

    gateway: int = 8080
    triton_http: int = 8000
    triton_grpc: int = 8001
    triton_metrics: int = 8002
    grpc_front: int = 9001


FLAGS = ("--port", "--triton-http-port", "--triton-grpc-port", "--triton-metrics-port", "--grpc-front-port")


def settle(ports: Ports, host: str, front_host: str = LOOPBACK) -> Ports:
    """Check each port (the gateway's on `host`, the gRPC front's on `front_host`, Triton's on loopback) and replace
    each 0 by a free one.

    Raises `StartError` naming flag and port when one is taken, given twice or not allowed.
    """
    settled: list[int] = []
    for flag, port, address in zip(FLAGS, ports, (host, LOOPBACK, LOOPBACK, LOOPBACK, front_host)):
        if port == 0:
            port = _choose(address, settled)
        elif port in settled:
            raise StartError(f"{flag} {port}: the same port is given twice; each needs its own (0 = a free one)")
        elif problem := _problem(address, port):
            raise StartError(
                f"{flag} {port}: cannot listen on {address}:{port} ({problem})\n"
                f"fix: stop what listens there (ss -ltnp 'sport = :{port}'), or pass another {flag} "
                "(0 = a free one)"
            )
        settled.append(port)
    return Ports(*settled)


def settle_beside(ports: Sequence[Ports]) -> Ports:
    """Free ones for another Triton; gateway and front are those of `ports`, which are all that are used."""
    taken = [port for each in ports for port in each]
    for _ in range(3):
        taken.append(_choose(LOOPBACK, taken))
    http, grpc, metrics = taken[-3:]
    return ports[0]._replace(triton_http=http, triton_grpc=grpc, triton_metrics=metrics)


def _choose(address: str, settled: list[int]) -> int:
    for _ in range(_NUM_TRIES):
        port = random.choice(_CHOICE)
        if port not in settled and _problem(address, port) is None:
            return port
    raise StartError(f"no free port on {address} between {_CHOICE.start} and {_CHOICE.stop - 1}")


def _problem(address: str, port: int) -> str | None:
    """Why nothing can listen on this address and port, or None."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the servers do: a port whose old connections are in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None
