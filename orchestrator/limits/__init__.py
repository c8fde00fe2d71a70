"""Who may ask, how much, and when: keys, quotas, deadlines and the queue in front of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.limits.gate import Gate
from orchestrator.limits.guarded_ledger import GuardedLedger
from orchestrator.limits.keys import KEYS_VARIABLE, Keyring
from orchestrator.redis_address import REDIS_VARIABLE, explained


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
    with explained():
        from orchestrator.limits.redis_ledger import RedisLedger

        ledger = RedisLedger(url)
    return Gate(Keyring(Path(path)), GuardedLedger(ledger))
