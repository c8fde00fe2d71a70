"""What routing and the cache save against sending everything to the dearest tier, from what a server logged."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from build.router_data import Labelled, read_labelled
from orchestrator.config import Tier, load_tiers
from orchestrator.limits.gate import price_of
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stack import find_artifact, running_stack

_MAX_TOKENS = 64
_TIMEOUT_S = 120.0

# The published example: of a hundred requests so many go to each tier, at so many dollars each; and what a request
# costs that always goes to the one large model it is compared to. Published was $0.00061, 80 % saved.
PUBLISHED_SHARES = (0.60, 0.20, 0.15, 0.05)
PUBLISHED_PRICES = (0.0001, 0.0005, 0.003, 0.01)
PUBLISHED_ONE_MODEL = 0.003


# How a request ends without anybody's failing: whoever left, or had no more time, pays for what was generated.
_LEFT = ("cancelled", "deadline_exceeded")


class Served(NamedTuple):
    """A request out of the log; `cost_usd` is 0 for a stored answer, and for one that another caller pays for."""

    tier: str
    is_hit: bool
    input_tokens: int
    output_tokens: int
    cost_usd: float


class Beside(NamedTuple):
    """What else the log tells: requests that failed and what they were charged, and what the quality monitor spent."""

    num_failed: int = 0
    failed_usd: float = 0.0
    quality_usd: float = 0.0


_NOTHING = Beside()


def cost(artifacts: Path, target: str, log: Path | None, data: Path, num_requests: int) -> tuple[str, dict[str, Any]]:
    """From `log`, or from traffic of the labelled conversations in `data` against `target`, made now.

    Raises `PerfError` where no request can be found, or where the log is of a target with other tiers or prices.
    """
    artifact = find_artifact(artifacts, target)
    tiers = load_tiers(artifact / "tiers.toml").tier
    if log is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        served, beside, labels = read_log(lines), read_beside(lines), None
        if not served:
            raise PerfError(f"{log}: no answered request in it; a server's triton.log has a line for each")
        try:
            check_prices(served, tiers)
        except PerfError as error:
            raise PerfError(f"{log}: {error}\nfix: name by --target what was served; target {target} was not") from None
    else:
        served, beside, labels = _drive(artifact, data, num_requests)
    result: dict[str, Any] = {
        "command": "cost",
        "target": target,
        "source": "traffic made now" if log is None else "log",
    }
    result |= summarise_cost(served, tiers, beside)
    if labels is not None:
        result["by_label"] = _saving_by_label(served, labels, tiers)
    result["published_example"] = published_example()
    return _table(served, tiers, result), result


def read_log(lines: Iterable[str]) -> list[Served]:
    """The answered requests, whatever else is in the log; of those that were left, the ones that somebody paid for."""
    served = []
    for row in _rows(lines, "request"):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # refused: it has no answer
            one = _served(row)
            if row["outcome"] == "ok" or (row["outcome"] in _LEFT and one.cost_usd):
                served.append(one)
    return served


def read_beside(lines: Sequence[str]) -> Beside:
    """What is in the log beside the answered requests."""
    failed = [row for row in _rows(lines, "request") if "tier" in row and row.get("outcome") not in ("ok", *_LEFT)]
    asked = _rows(lines, "quality_asked")
    return Beside(len(failed), sum(map(_usd, failed)), sum(map(_usd, asked)))


def check_prices(served: Iterable[Served], tiers: Sequence[Tier]) -> None:
    """Raises `PerfError` unless what was charged are these tiers' prices."""
    prices = {tier.name: price_of(tier) for tier in tiers}
    for row in served:
        price = prices.get(row.tier)
        if price is None:
            raise PerfError(f"tier {row.tier!r} is none of {', '.join(prices)}")
        nano_usd = price.nano_usd(row.input_tokens, row.output_tokens)
        if row.cost_usd and abs(round(row.cost_usd * 1e9) - nano_usd) > 1:  # of a billionth, which is rounded
            raise PerfError(
                f"tier {row.tier!r} took {row.cost_usd:.9f} USD for {row.input_tokens} tokens in and "
                f"{row.output_tokens} out, which cost {nano_usd / 1e9:.9f} at its price"
            )


def _rows(lines: Iterable[str], event: str) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        if line.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):  # a line cut by the log's end, or not ours
                rows.append(json.loads(line))
    return [row for row in rows if row.get("event") == event]


def _served(facts: Mapping[str, Any]) -> Served:
    """Of a log line, or `rt`."""
    usd = float(facts["cost_usd"])
    is_hit = facts["cache"] in ("exact", "semantic") and not usd  # who pays for another has had it generated
    return Served(str(facts["tier"]), is_hit, int(facts["input_tokens"]), int(facts["tokens"]), usd)


def _usd(row: Mapping[str, Any]) -> float:
    usd = row.get("cost_usd")
    return float(usd) if isinstance(usd, (int, float)) else 0.0


def summarise_cost(served: Sequence[Served], tiers: Sequence[Tier], beside: Beside = _NOTHING) -> dict[str, Any]:
    """`saving` is all of it, `saving_by_routing` leaves stored answers out; shares of what the dearest tier costs.

    What the quality monitor asked again is spent for routing's sake, so both are less by it.
    """
    expert = price_of(tiers[-1])

    def at_expert(rows: Iterable[Served]) -> float:
        return sum(expert.nano_usd(row.input_tokens, row.output_tokens) for row in rows) / 1e9

    spent, generated = sum(row.cost_usd for row in served), [row for row in served if not row.is_hit]
    all_expert, generated_expert = at_expert(served), at_expert(generated)
    return {
        "requests": len(served),
        "expert": tiers[-1].name,
        "cost_usd": round(spent, 9),
        "quality_usd": round(beside.quality_usd, 9),
        "all_expert_usd": round(all_expert, 9),
        "saving": _saving(spent + beside.quality_usd, all_expert),
        "saving_by_routing": _saving(spent + beside.quality_usd, generated_expert),
        "hits": len(served) - len(generated),
        "failed_requests": beside.num_failed,
        "failed_requests_usd": round(beside.failed_usd, 9),
        "tiers": {tier.name: sum(row.tier == tier.name for row in served) for tier in tiers},
    }


def published_example() -> dict[str, float]:
    """The weighted cost of the published split, and what it saves against the article's one large model, and against
    its dearest tier."""
    mean = sum(share * price for share, price in zip(PUBLISHED_SHARES, PUBLISHED_PRICES))
    return {
        "cost_usd": round(mean, 8),
        "saving": round(1 - mean / PUBLISHED_ONE_MODEL, 4),
        "saving_against_expert": round(1 - mean / PUBLISHED_PRICES[-1], 4),
    }


def _saving(spent: float, instead: float) -> float:
    return round(1 - spent / instead, 4) if instead else 0.0


def _drive(artifact: Path, data: Path, num_requests: int) -> tuple[list[Served], Beside, list[str]]:
    """Conversations drawn by their labels' share, asked of "auto"; returns what was said of each, and the labels.

    Of the quality monitor's spending what it had asked by then.
    """
    rows = read_labelled(data)
    chosen = random.Random(0).sample(rows, min(num_requests, len(rows)))
    served = []
    with running_stack(artifact) as stack, httpx.Client(base_url=stack.gateway_url, timeout=_TIMEOUT_S) as client:
        for number, row in enumerate(chosen, 1):
            served.append(_ask(client, row))
            if number % 50 == 0:
                say(f"{number} of {len(chosen)} conversations")
        beside = read_beside(stack.triton_log.read_text(encoding="utf-8", errors="replace").splitlines())
    return served, beside, [row.tier for row in chosen]


def _ask(client: httpx.Client, row: Labelled) -> Served:
    body = {
        "model": "auto",
        "messages": [message.model_dump() for message in row.messages],
        "max_tokens": _MAX_TOKENS,
    }
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise PerfError(f"a conversation was refused with {response.status_code}: {response.text[:200]}")
    return _served(response.json()["rt"])


def _saving_by_label(served: Sequence[Served], labels: Sequence[str], tiers: Sequence[Tier]) -> dict[str, float]:
    """What the same tokens would cost at the tiers that people said are needed."""
    prices = {tier.name: price_of(tier) for tier in tiers}
    if not set(labels) <= prices.keys():
        return {}
    pairs = list(zip(served, labels))
    at_label = sum(prices[label].nano_usd(row.input_tokens, row.output_tokens) for row, label in pairs) / 1e9
    expert = price_of(tiers[-1])
    at_expert = sum(expert.nano_usd(row.input_tokens, row.output_tokens) for row in served) / 1e9
    return {
        "saving": _saving(at_label, at_expert),
        "as_labelled": round(sum(row.tier == label for row, label in pairs) / len(pairs), 4),
    }


def _table(served: Sequence[Served], tiers: Sequence[Tier], result: dict[str, Any]) -> str:
    rows: list[list[object]] = []
    for tier in tiers:
        own = [row for row in served if row.tier == tier.name]
        rows.append(
            [
                tier.name,
                len(own),
                sum(row.is_hit for row in own),
                sum(row.input_tokens for row in own),
                sum(row.output_tokens for row in own),
                f"{sum(row.cost_usd for row in own):.6f}",
            ]
        )
    table = format_table(("tier", "requests", "stored", "tokens in", "tokens out", "USD"), rows)
    published = result["published_example"]
    quality, failed = "", ""
    if result["quality_usd"]:
        quality = f"the quality monitor asked again for {result['quality_usd']:.6f} USD, which is spent too\n"
    if result["failed_requests"]:
        usd = f"{result['failed_requests_usd']:.6f} USD"
        failed = f"{result['failed_requests']} failed, not counted; {usd} charged for what came of them\n"
    return (
        f"{table}\n\n{quality}{failed}all at {result['expert']}: {result['all_expert_usd']:.6f} USD; "
        f"saved {result['saving']:.1%}, by routing alone {result['saving_by_routing']:.1%}\n"
        f"published example: ${published['cost_usd']:.5f} a request, {published['saving']:.0%} saved"
    )
