"""The key that opens inference on Triton's own ports: made by `serve` at each start, known to its own processes.

They find it in their environment, which no other user can read. Who calls Triton himself, or runs a gateway or a front
without `serve`, chooses one: `serve` takes what its environment has. Control has a key of its own, which nobody gets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestrator.config import ConfigError

INFERENCE_KEY_VARIABLE = "TRITON_REALTIME_INFERENCE_KEY"
INFERENCE_KEY_HEADER = "x-triton-realtime-inference-key"
GRPC_PREFIX = "triton-grpc-protocol-"  # Triton's, before the name of a restricted protocol's header
INFERENCE_KEY_METADATA = GRPC_PREFIX + INFERENCE_KEY_HEADER
# How Triton begins the details of its refusal, whose code is UNAVAILABLE, as of a server that is gone.
REFUSAL = "This protocol is restricted"
LOCKED_OUT = (
    "Triton takes inference with its key alone, and this process has none or another one\n"
    f"fix: {INFERENCE_KEY_VARIABLE}, the same here and for `serve`"
)

# What neither Triton's flags nor headers take for something else, too long to be guessed.
_ALLOWED = re.compile(r"[A-Za-z0-9_-]{32,128}")


def find_inference_key(environ: Mapping[str, str]) -> str | None:
    """None where there is none; raises `ConfigError` for what cannot be one."""
    key = environ.get(INFERENCE_KEY_VARIABLE)
    if not key:
        return None
    if _ALLOWED.fullmatch(key) is None:
        # Never shown.
        raise ConfigError(
            f"{INFERENCE_KEY_VARIABLE}: its value is not allowed; 32 to 128 letters, digits, - and _\n"
            "fix: openssl rand -hex 32; or leave it out, and `serve` makes one"
        )
    return key


def unlock(stub: Any, key: str | None) -> Any:
    """`stub`, one of Triton's service, whose inference now carries `key`; what else it needs is open to everybody."""
    if key is not None:
        metadata = ((INFERENCE_KEY_METADATA, key),)
        stub.ModelInfer = partial(stub.ModelInfer, metadata=metadata)
        stub.ModelStreamInfer = partial(stub.ModelStreamInfer, metadata=metadata)
    return stub
