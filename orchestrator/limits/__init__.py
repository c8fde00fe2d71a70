"""Who may ask, how much, and when: keys, quotas, deadlines and the queue in front of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.config import ConfigError
from orchestrator.limits.gate import Gate
from orchestrator.limits.guarded_ledger import GuardedLedger
from orchestrator.limits.keys import KEYS_VARIABLE, Keyring

# Where quotas are shared with other orchestrators; without it they are this process's own.
REDIS_VARIABLE = "REDIS_URL"


def create_gate(environ: Mapping[str, str]) -> Gate:
    """As the environment says; raises `ConfigError` for keys or an address that cannot be used.

    Redis need not be there: nothing connects yet.
    """
    path = environ.get(KEYS_VARIABLE)
    if not path:
        return Gate()
    url = environ.get(REDIS_VARIABLE)
    if not url:
        return Gate(Keyring(Path(path)))
    try:
        from orchestrator.limits.redis_ledger import RedisLedger

        ledger = RedisLedger(url)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{REDIS_VARIABLE} is set, which needs the package {error.name}; pip install 'triton-realtime[redis]'"
        ) from error
    except ValueError:
        # Neither shown nor chained: it may hold the password.
        raise ConfigError(
            f"{REDIS_VARIABLE}: its value is not allowed; redis://, rediss:// or unix:// and an address"
        ) from None
    return Gate(Keyring(Path(path)), GuardedLedger(ledger))
