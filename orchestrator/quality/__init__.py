"""Whether cheap tiers' answers are as good as they used to be, watched by asking a few questions again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.config import QualityPolicy, Tiers
from orchestrator.quality.cases import CASES_FILE, Cases
from orchestrator.quality.monitor import Monitor
from orchestrator.quality.sampler import Quality
from orchestrator.quality.store import STATE_FILE, FileStore, Store
from orchestrator.quality.vectors import Embed
from orchestrator.redis_address import REDIS_VARIABLE, explained

# The folder of this server's own state: set by `serve`; without it nothing outlives the process.
FOLDER_VARIABLE = "TRITON_REALTIME_RUN_DIR"


def create_quality(
    tiers: Tiers, embed: Embed, environ: Mapping[str, str], may_keep: Callable[[str], bool] = lambda tenant: True
) -> Quality | None:
    """None without a table `[quality]`; raises `ConfigError` for a Redis that cannot be used.

    Redis need not be there: nothing connects yet.
    """
    policy = tiers.quality
    if policy is None:
        return None
    folder = Path(environ[FOLDER_VARIABLE]) if environ.get(FOLDER_VARIABLE) else None
    prints = fingerprints(policy, tiers)
    return Quality(
        policy,
        [tier.name for tier in tiers.tier],
        Monitor(policy, prints),
        embed,
        store=create_store(policy, prints, folder, environ.get(REDIS_VARIABLE, "")),
        cases=Cases(None if folder is None else folder / CASES_FILE, policy.keep_days),
        may_keep=may_keep,
    )


def create_store(policy: QualityPolicy, prints: Mapping[str, str], folder: Path | None, redis_url: str) -> Store:
    """In Redis if there is an address, else in the file of `folder`; raises `ConfigError`."""
    if not redis_url:
        return FileStore(None if folder is None else folder / STATE_FILE)
    with explained():
        from orchestrator.quality.redis_store import RedisStore

        return RedisStore(redis_url, prints, policy.keep_days)


def fingerprints(policy: QualityPolicy, tiers: Tiers) -> dict[str, str]:
    """Of each watched tier: what changes with its row, the expert's, or what a good answer is."""
    rows = {tier.name: tier.model_dump_json() for tier in tiers.tier}
    return {
        name: hashlib.sha256(f"{rows[name]}{rows[policy.expert]}{policy.similarity}".encode()).hexdigest()[:16]
        for name in policy.tiers
    }
