"""Chooses the store: in this process, or in the Redis that the environment names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from urllib.parse import urlsplit

from orchestrator.cache.store import MemoryStore, Store
from orchestrator.config import ConfigError
from orchestrator.redis_address import REDIS_VARIABLE

_SCHEMES = ("redis", "rediss", "unix")


def create_store(max_bytes: int, environ: Mapping[str, str], errors: Counter[str] | None = None) -> Store:
    """A store of at most `max_bytes`: in Redis if `REDIS_URL` is set and not empty, else in this process.

    `errors` counts what Redis failed to do, by kind. Nothing connects yet, so Redis need not be there. Raises
    `ConfigError` for a URL that is none, without telling its password, and when the extra `redis` is not installed.
    """
    url = environ.get(REDIS_VARIABLE, "")
    if not url:
        return MemoryStore(max_bytes)
    try:
        from orchestrator.cache.guarded_store import GuardedStore
        from orchestrator.cache.redis_store import RedisStore, connect
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{REDIS_VARIABLE} is set, which needs the package {error.name}; pip install 'triton-realtime[redis]'"
        ) from error
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(
            f"{REDIS_VARIABLE}: {_redacted(url)} is not allowed; redis://, rediss:// or unix:// and an address, "
            "such as redis://:password@host:6379/0"
        )
    try:
        client = connect(url)
    except ValueError:
        # Not chained: its text may hold the password.
        raise ConfigError(
            f"{REDIS_VARIABLE}: {_redacted(url)} is no URL that redis-py reads; fix its port, database or options"
        ) from None
    counted: Counter[str] = Counter() if errors is None else errors
    return GuardedStore(RedisStore(client, max_bytes, errors=counted), counted)


def _redacted(url: str) -> str:
    """Scheme and host alone: a password may stand in the user's part, in the query, or anywhere in what is no URL."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}" if parts.scheme in _SCHEMES and parts.hostname else "its value"
    except ValueError:
        return "its value"
