"""`REDIS_URL`: where state is that several orchestrators share. Without it each has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.config import ConfigError

REDIS_VARIABLE = "REDIS_URL"


@contextmanager
def explained() -> Iterator[None]:
    """Around loading the client and reading the address; raises `ConfigError` where either cannot be."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{REDIS_VARIABLE} is set, which needs the package {error.name}; pip install 'triton-realtime[redis]'"
        ) from error
    except ValueError:
        # Neither shown nor chained: it may hold the password.
        raise ConfigError(
            f"{REDIS_VARIABLE}: its value is not allowed; redis://, rediss:// or unix:// and an address"
        ) from None
