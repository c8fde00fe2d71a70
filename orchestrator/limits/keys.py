"""API keys: the file that holds them, and whose key a call came with.

A key is 256 random bits: nobody guesses it, so a plain SHA-256 of it is as good as a slow hash, which is for passwords
that people choose. The file holds digests alone: who reads it cannot call. Finding a key by its digest tells nothing
by its timing, since nobody can make a digest that begins as he likes and know the key.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, ValidationError, model_validator

from orchestrator.config import ConfigError, Row
from orchestrator.errors import UnauthorizedError
from orchestrator.files import write_whole
from orchestrator.row_faults import describe

log = logging.getLogger("orchestrator.limits")

# Where the orchestrator finds the file of keys: set by `serve --keys`; without it there are no keys, and no limits.
KEYS_VARIABLE = "TRITON_REALTIME_KEYS"
PREFIX = "rt-"  # by which scanners for leaked secrets know one
_SECRET_BYTES = 32
_SCHEME = "bearer"

Priority: TypeAlias = Literal["interactive", "batch"]
MAX_DEADLINE_MS = 3_600_000
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def _can_be_counted(usd: float) -> float:
    if usd < 1e-9:
        raise ValueError("must be at least 0.000000001, the least that is counted")
    return usd


# Up to here sums of money stay whole numbers in every store (2**53 billionths of a dollar).
Dollars = Annotated[float, Field(gt=0, le=1_000_000), AfterValidator(_can_be_counted)]
Count = Annotated[int, Field(gt=0, le=10**12)]


class Key(Row):
    """One key's rights; a limit that is left out is none.

    `digest` is the key's SHA-256 in hexadecimal. `tiers` are names of tiers, and "embedding", "ocr", "stt", "tts"; None
    allows all.
    `deadline_ms` counts from a request's arrival, for requests that set none. `may_read_metrics` opens `/metrics`,
    which shows all tenants' numbers, `may_order_cache` the orders to the cache, which reach all tenants' entries.
    `allow_cloud_sampling` lets the quality monitor ask a cloud tier what another tier has answered, `keep_text` lets it
    keep what was answered poorly, for the classifier's training. With `hold_flagged` an answer comes sentence by
    sentence, each after the safety filter has seen it.
    """

    id: Name
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: Name
    tiers: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    usd_per_day: Dollars | None = None
    priority: Priority = "interactive"
    deadline_ms: Annotated[int, Field(gt=0, le=MAX_DEADLINE_MS)] | None = None
    may_read_metrics: bool = False
    may_order_cache: bool = False
    allow_cloud_sampling: bool = False
    keep_text: bool = False
    hold_flagged: bool = False

    @property
    def has_limits(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.usd_per_day) != (None, None, None)


# Everybody, where there are no keys; only who reaches loopback is somebody then.
EVERYBODY = Key(id="default", digest="0" * 64, tenant="default", may_read_metrics=True, may_order_cache=True)


class KeyFile(Row):
    """The whole file, JSON. Ids are unique, and keys are."""

    keys: Annotated[tuple[Key, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _are_unique(self) -> KeyFile:
        for field in ("id", "digest"):
            for value, times in Counter(getattr(key, field) for key in self.keys).items():
                if times > 1:
                    raise ValueError(f"keys.{field}: {value!r} is used {times} times; each may be once")
        return self


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> KeyFile:
    """Raises `ConfigError` naming the file and every wrong field."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}\n"
            f"fix: python -m orchestrator keys add --keys {path} --tenant NAME"
        ) from error
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in describe(error, KeyFile))) from error


def change_keys(path: Path, change: Callable[[KeyFile], KeyFile]) -> KeyFile:
    """Replace the file by `change` of it, and return that; one that is not there is empty.

    It appears whole, for its owner alone. Several at a time take turns. Raises `ConfigError`, and as `change` does.
    """
    with _turn(path.parent):
        changed = change(read_keys(path) if path.exists() else KeyFile())
        changed = KeyFile.model_validate(changed.model_dump())
        write_whole(path, json.dumps(changed.model_dump(exclude_none=True), indent=2) + "\n")
        return changed


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Keyring:
    """The keys of a file, as it is now: a change counts from the next call on, and a broken file changes nothing."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when the file cannot be used."""
        self._path = path
        self._version = self._look()
        self._keys = {key.digest: key for key in read_keys(path).keys}

    def find(self, authorization: str | None) -> Key:
        """Whose key `authorization` (the header, ``Bearer <key>``) holds; raises `UnauthorizedError`."""
        self._follow_file()
        if authorization is None:
            raise UnauthorizedError("authorization: required; send the header `Authorization: Bearer <key>`")
        scheme, _, secret = authorization.partition(" ")
        key = self._keys.get(digest_of(secret.strip())) if scheme.lower() == _SCHEME else None
        if key is None:
            raise UnauthorizedError("authorization: not a valid key; send the header `Authorization: Bearer <key>`")
        return key

    def may_keep_text(self, tenant: str) -> bool:
        """Whether a key of this tenant allows it now."""
        self._follow_file()
        return any(key.tenant == tenant and key.keep_text for key in self._keys.values())

    def _look(self) -> tuple[int, int, int] | None:
        """What changes with the file; None when it is not there."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _follow_file(self) -> None:
        if (version := self._look()) == self._version:  # a stat: 2 µs
            return
        self._version = version
        try:
            self._keys = {key.digest: key for key in read_keys(self._path).keys}
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("%d keys read from %s", len(self._keys), self._path.name)
