"""What `serve` knows of the gRPC front: where it listens, its TLS, its command line."""

from __future__ import annotations

import ipaddress
import math
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.triton.ports import LOOPBACK, Ports
from orchestrator.triton.process import StartError


@dataclass(frozen=True)
class FrontOptions:
    """`cert` (a chain) and `key` are PEM files, given together or not at all."""

    host: str = LOOPBACK
    cert: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Raises `StartError` when certificate and key cannot be used."""
        if self.cert is None and self.key is None:
            return
        if self.cert is None or self.key is None:
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            raise StartError(f"--grpc-front-{given} needs --grpc-front-{missing}: TLS takes both")
        try:
            # A password that is asked for would stop `serve` at a prompt; gRPC takes no encrypted key anyway.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise StartError(
                f"--grpc-front-cert {self.cert}, --grpc-front-key {self.key}: {error}\n"
                "fix: a certificate chain and its private key, both as PEM, the key not encrypted"
            ) from error

    @property
    def warning(self) -> str | None:
        """What the operator should know of this choice."""
        if self.cert is not None or is_loopback(self.host):
            return None
        return (
            f"warning: the gRPC front listens on {self.host} without TLS: prompts, answers and keys can be read on "
            "the way (--grpc-front-cert and --grpc-front-key)"
        )

    def command(self, artifact: Path, ports: Ports, drain_timeout_s: float, replicas: Path) -> tuple[str, ...]:
        """The command line of the front, which reaches the Tritons in the file `replicas` by gRPC alone.

        `artifact` tells it what is served.
        """
        tls = () if self.cert is None else ("--cert", str(self.cert), "--key", str(self.key))
        return (
            *(sys.executable, "-m", "orchestrator.grpc_front"),
            *("--artifact", str(artifact)),
            *("--replicas", str(replicas)),
            *("--host", self.host),
            *("--port", str(ports.grpc_front)),
            *("--drain-timeout-s", str(math.ceil(drain_timeout_s))),
            *tls,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_password() -> str:
    raise ValueError("the key is encrypted")
