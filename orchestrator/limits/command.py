"""`python -m orchestrator keys add|list|revoke`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from orchestrator.config import ConfigError, load_tiers
from orchestrator.limits.keys import Key, KeyFile, change_keys, digest_of, new_secret, read_keys
from orchestrator.limits.operations import Model
from orchestrator.row_faults import describe

# What tiers are called, unless somebody gives them names of his own.
USUAL_TIERS = ("simple", "medium", "complex", "expert", "cloud")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="make a key, and show it once")
    listing = actions.add_parser("list", help="what keys there are")
    revoke = actions.add_parser("revoke", help="take a key back; a running server heeds it at once")
    for action in (add, listing, revoke):
        action.add_argument("--keys", type=Path, required=True, metavar="FILE", help="as `serve --keys` has it")
    add.add_argument("--tenant", required=True, metavar="NAME", help="whose it is; tenants share nothing")
    add.add_argument("--id", metavar="NAME", help="what the key is called (default: the tenant and a number)")
    add.add_argument(
        "--tier", action="append", metavar="NAME", help="a tier, embedding, ocr, stt, tts; repeatable (default all)"
    )
    add.add_argument(
        "--artifact", type=Path, metavar="DIR", help="what is served, such as artifacts/cpu: --tier must be of it"
    )
    add.add_argument("--requests-per-minute", type=int, metavar="N", help="default: no limit")
    add.add_argument("--tokens-per-minute", type=int, metavar="N", help="prompt and answer; default: no limit")
    add.add_argument("--usd-per-day", type=float, metavar="X", help="default: no limit")
    add.add_argument("--priority", choices=("interactive", "batch"), default="interactive", help="default %(default)s")
    add.add_argument("--deadline-ms", type=int, metavar="N", help="for requests without x-deadline-ms; default: none")
    add.add_argument("--metrics", action="store_true", help="it may read /metrics")
    add.add_argument("--cache", action="store_true", help="it may invalidate what the cache has, of all tenants")
    add.add_argument(
        "--allow-cloud-sampling", action="store_true", help="sampled questions may go to a cloud tier, to judge answers"
    )
    add.add_argument(
        "--keep-text", action="store_true", help="poorly answered conversations may be kept, to train the classifier"
    )
    add.add_argument(
        "--hold-flagged", action="store_true", help="send no sentence before the safety filter has seen it"
    )
    revoke.add_argument("id", metavar="ID")
    add.set_defaults(run=_add)
    listing.set_defaults(run=_list)
    revoke.set_defaults(run=_revoke)


def _add(options: argparse.Namespace) -> None:
    """Prints the key alone on stdout, for scripts."""
    _check_tiers(options.tier or (), options.artifact)
    secret = new_secret()

    def add(file: KeyFile) -> KeyFile:
        ids = {key.id for key in file.keys}
        number = next(number for number in range(1, len(ids) + 2) if f"{options.tenant}-{number}" not in ids)
        key_id = options.id or f"{options.tenant}-{number}"
        if key_id in ids:
            raise ConfigError(f"--id: {key_id!r} is there already; choose another, or revoke it first")
        fields = {
            "id": key_id,
            "digest": digest_of(secret),
            "tenant": options.tenant,
            "tiers": options.tier,
            "requests_per_minute": options.requests_per_minute,
            "tokens_per_minute": options.tokens_per_minute,
            "usd_per_day": options.usd_per_day,
            "priority": options.priority,
            "deadline_ms": options.deadline_ms,
            "may_read_metrics": options.metrics,
            "may_order_cache": options.cache,
            "allow_cloud_sampling": options.allow_cloud_sampling,
            "keep_text": options.keep_text,
            "hold_flagged": options.hold_flagged,
        }
        return KeyFile(keys=(*file.keys, _checked(fields)))

    made = change_keys(options.keys, add).keys[-1]
    print(f"the key {made.id!r}, shown this once:", file=sys.stderr)
    print(secret)


def _check_tiers(names: Sequence[str], artifact: Path | None) -> None:
    """Raises `ConfigError` for a name that opens nothing of `artifact`; without one it can only be warned of."""
    tiers = USUAL_TIERS if artifact is None else [tier.name for tier in load_tiers(artifact / "tiers.toml").tier]
    known = (*tiers, *get_args(Model))
    for name in names:
        if name not in known and artifact is not None:
            raise ConfigError(f"--tier: {name!r} is no tier of {artifact}; one of {', '.join(known)}")
        if name not in known:
            print(
                f"warning: --tier: {name!r} is none of the usual {', '.join(known)}; where no tier is called so, it "
                "opens nothing. Name what is served by --artifact to have it checked.",
                file=sys.stderr,
            )


def _checked(fields: dict[str, object]) -> Key:
    try:
        return Key.model_validate(fields)
    except ValidationError as error:
        lines = [line.partition(":") for line in describe(error)]
        raise ConfigError("\n".join(f"--{field.replace('_', '-')}:{text}" for field, _, text in lines)) from error


def _list(options: argparse.Namespace) -> None:
    rows: list[tuple[str, ...]] = [
        ("id", "tenant", "tiers", "requests/min", "tokens/min", "USD/day", "priority", "deadline ms", "rights")
    ]
    for key in read_keys(options.keys).keys:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.usd_per_day)
        rows.append(
            (
                *(key.id, key.tenant, ",".join(key.tiers or ("all",))),
                *("-" if limit is None else f"{limit:g}" for limit in limits),
                *(key.priority, str(key.deadline_ms or "-"), ",".join(_rights(key)) or "-"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def _rights(key: Key) -> list[str]:
    """What the key allows or wants beyond answers, by the flags of `add`."""
    given = {
        "metrics": key.may_read_metrics,
        "cache": key.may_order_cache,
        "allow-cloud-sampling": key.allow_cloud_sampling,
        "keep-text": key.keep_text,
        "hold-flagged": key.hold_flagged,
    }
    return [name for name, is_given in given.items() if is_given]


def _revoke(options: argparse.Namespace) -> None:
    def revoke(file: KeyFile) -> KeyFile:
        if options.id not in (ids := [key.id for key in file.keys]):
            raise ConfigError(f"{options.keys}: no key {options.id!r}; there are {', '.join(ids) or 'none'}")
        return KeyFile(keys=tuple(key for key in file.keys if key.id != options.id))

    if not options.keys.exists():
        read_keys(options.keys)  # says so
    change_keys(options.keys, revoke)
    print(f"revoked {options.id!r}", file=sys.stderr)
