"""The key that opens Triton's own ports: `serve` makes one at each start, and its own processes alone know it.

They find it in their environment, which no other user can read. Who calls Triton himself, or runs a gateway or a front
without `serve`, chooses one: `serve` takes what its environment has.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestrator.config import ConfigError

BOOT_KEY_VARIABLE = "TRITON_REALTIME_BOOT_KEY"
HTTP_HEADER = "x-triton-realtime-key"
GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"  # Triton's prefix for what `--grpc-restricted-protocol` names
# How Triton begins the details of its refusal, whose code is UNAVAILABLE, as of a server that is gone.
REFUSAL = "This protocol is restricted"
REFUSED = f"Triton's ports take requests with its boot key alone, and {BOOT_KEY_VARIABLE} here is not that of its `serve`"

# What neither Triton's flags nor headers take for something else, too long to be guessed.
_ALLOWED = re.compile(r"[A-Za-z0-9_-]{32,128}")


def make_boot_key() -> str:
    return secrets.token_urlsafe()


def find_boot_key(environ: Mapping[str, str]) -> str | None:
    """None where there is none; raises `ConfigError` for what cannot be one."""
    key = environ.get(BOOT_KEY_VARIABLE)
    if not key:
        return None
    if _ALLOWED.fullmatch(key) is None:
        # Never shown.
        raise ConfigError(
            f"{BOOT_KEY_VARIABLE}: its value is not allowed; 32 to 128 letters, digits, - and _\n"
            "fix: openssl rand -hex 32; or leave it out, and `serve` makes one"
        )
    return key


def unlock(stub: Any, key: str | None) -> Any:
    """`stub`, one of Triton's service, whose inference now carries `key`; all else that it has is open to everybody."""
    if key is not None:
        metadata = ((GRPC_HEADER, key),)
        stub.ModelInfer = partial(stub.ModelInfer, metadata=metadata)
        stub.ModelStreamInfer = partial(stub.ModelStreamInfer, metadata=metadata)
    return stub
