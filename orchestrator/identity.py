"""Who a call is from: the one place that decides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from orchestrator.call import Call

DEFAULT_TENANT = "default"


class Caller(NamedTuple):
    """Tenants never share a stored answer. With `may_cache` false nothing is stored or looked up."""

    tenant: str = DEFAULT_TENANT
    may_cache: bool = True


Identify = Callable[[Call], Caller]


def identify(call: Call) -> Caller:
    """Everybody is one tenant until there are keys: nothing that a caller writes may name another."""
    return Caller()
