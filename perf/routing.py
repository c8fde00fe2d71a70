"""`python -m perf routing`: what choosing a tier adds to a request, and what a hung tier costs the others.

Target scripted with two engines, `llm_small` behind the tiers simple and medium and `llm_large` behind complex and
expert, and with target cpu's cache. Embedder and classifier are the real ones, the engines answer as they are told.

Added: each question is asked as "auto" and pinned, who goes first alternates. The cache keeps them apart, so both are
misses and both embed the question. Hung: phases alternate in which `llm_large` answers, or does nothing at all; some
clients keep asking it, and one asks the tier simple, whose times are what is measured.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from build.compiler import build
from build.fetch import cache_folder
from build.rows import TargetRow, load_models, load_target
from orchestrator.config import Routing
from perf.errors import PerfError
from perf.prompts import fresh_question, script
from perf.report import format_table, say
from perf.stack import Stack, running_stack
from perf.stats import percentile, summarize

ADDED_BAR_MS = 1.0
HUNG_BAR = 1.2
_WARM_UP = 20
_TIMEOUT_S = 1.0  # of the engine that hangs; as long it is left alone after that
_HANG_S = 4.0
_NUM_ASKING = 4  # clients of the hung tier
_PAUSE_S = 0.2  # theirs, between two requests
_RECOVER_S = 60.0


def two_engines(timeout_s: float = _TIMEOUT_S) -> TargetRow:
    """Target scripted with a second engine for its two dear tiers, short timeouts, and the cache of target cpu."""
    target = load_target("scripted")
    timeouts = {"first_token_timeout_s": timeout_s, "token_timeout_s": timeout_s}
    tiers = [
        tier.model_copy(update={"model": "llm_small" if tier.name in ("simple", "medium") else "llm_large", **timeouts})
        for tier in target.tiers
    ]
    return target.model_copy(
        update={
            "models": {**target.models, "llm_large": target.models["llm_small"]},
            "tiers": tiers,
            "routing": Routing(open_s=timeout_s),
            "cache": load_target("cpu").cache,
        }
    )


def build_two_engines(artifact: Path) -> Path:
    """Build it; returns `artifact`."""
    target = two_engines()
    build(target, load_models(target), artifact, cache=cache_folder(), progress=lambda _: nullcontext())
    return artifact


def routing(num_requests: int, num_rounds: int) -> tuple[str, dict[str, Any]]:
    """Measure both; returns table and result. Raises `PerfError`."""
    with tempfile.TemporaryDirectory(prefix="perf-routing-") as folder:
        say("building target scripted with two engines")
        with running_stack(build_two_engines(Path(folder) / "scripted")) as stack:
            times, tiers = measure_added(stack, num_requests)
            phases = measure_hung(stack, num_rounds)
    pairs = [auto - pinned for auto, pinned in zip(times["auto"], times["pinned"])]
    added = {f"p{at}": round(percentile(times["auto"], at) - percentile(times["pinned"], at), 3) for at in (50, 90, 99)}
    result = {
        "command": "routing",
        "routing_added_ms": {**added, "p50_of_pairs": round(percentile(pairs, 50), 3)},
        "hung_ratio_p99": round(percentile(phases["hung"], 99) / percentile(phases["healthy"], 99), 3),
        **{name: summarize(values) for name, values in (times | phases).items()},
        "auto_tiers": tiers,
    }
    return _table(result), result


class _Client:
    """One keep-alive connection, whole answers."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def ask(self, model: str, text: str, *, stored: bool = False) -> tuple[float, int, dict[str, Any]]:
        """Milliseconds for the whole answer, its status, and the answer."""
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]})
        headers = {"content-type": "application/json", **({} if stored else {"cache-control": "no-store"})}
        started_s = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        response = self._connection.getresponse()
        raw = response.read()
        return (time.perf_counter() - started_s) * 1000, response.status, json.loads(raw)

    def close(self) -> None:
        self._connection.close()


def measure_added(stack: Stack, num_requests: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Times in ms of "auto" and "pinned", and how often "auto" went to which tier."""
    say("auto and pinned, in turns")
    client = _Client(stack.gateway_url)
    times: dict[str, list[float]] = {"auto": [], "pinned": []}
    tiers: dict[str, int] = {}
    for index in range(-_WARM_UP, num_requests):
        question = fresh_question(index, index + _WARM_UP)
        names = ("auto", "pinned") if index % 2 else ("pinned", "auto")
        for name in names:
            took_ms, status, answer = client.ask("auto" if name == "auto" else "simple", question, stored=True)
            if status != http.HTTPStatus.OK or answer["rt"]["cache"] != "miss":
                raise PerfError(f"{question!r} as {name}: {status}, {answer}")
            if index >= 0:
                times[name].append(took_ms)
                if name == "auto":
                    tier = answer["rt"]["tier"]
                    tiers[tier] = tiers.get(tier, 0) + 1
    client.close()
    return times, tiers


def measure_hung(stack: Stack, num_rounds: int) -> dict[str, list[float]]:
    """Times in ms of the tier simple, while the other engine is "healthy" or "hung"."""
    client = _Client(stack.gateway_url)
    phases: dict[str, list[float]] = {"healthy": [], "hung": []}
    for number in range(num_rounds):
        for phase in ("healthy", "hung") if number % 2 else ("hung", "healthy"):
            with _asking(stack, "expert"):
                if phase == "hung":
                    threading.Thread(target=_hang, args=(stack.gateway_url,), daemon=True).start()
                    time.sleep(0.1)
                ends_s = time.monotonic() + _HANG_S - 0.5
                while time.monotonic() < ends_s:
                    took_ms, status, answer = client.ask("simple", script("one two", 5, 1, number))
                    if status != http.HTTPStatus.OK:
                        raise PerfError(f"the tier that lives: {status}, {answer}")
                    phases[phase].append(took_ms)
            _wait_until_back(client)
        say(f"  {number + 1} of {num_rounds} rounds")
    client.close()
    return phases


@contextmanager
def _asking(stack: Stack, model: str) -> Iterator[None]:
    """Some clients ask `model` all the time, whatever they hear."""
    is_over = threading.Event()

    def ask() -> None:
        client = _Client(stack.gateway_url)
        while not is_over.wait(_PAUSE_S):
            client.ask(model, script("one two", 5, 1, 0))
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(_NUM_ASKING)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _hang(url: str) -> None:
    client = _Client(url)
    client.ask("expert", f"#script {json.dumps({'text': 'x', 'hang_ms': _HANG_S * 1000})}")
    client.close()


def _wait_until_back(client: _Client) -> None:
    ends_s = time.monotonic() + _RECOVER_S
    while client.ask("expert", script("one", 0, 0, 0))[1] != http.HTTPStatus.OK:
        if time.monotonic() > ends_s:
            raise PerfError(f"the hung engine is not back after {_RECOVER_S:.0f} s")
        time.sleep(0.1)


def _table(result: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for name, label in (
        ("pinned", "a miss, pinned"),
        ("auto", "the same as auto"),
        ("healthy", "another tier answers: simple"),
        ("hung", "another tier hangs: simple"),
    ):
        points = result[name]
        rows.append((label, points["num"], points["p50"], points["p90"], points["p99"], ""))
    added = result["routing_added_ms"]
    rows.insert(2, ("added", "", added["p50"], added["p90"], added["p99"], f"p50 <= {ADDED_BAR_MS:.0f}"))
    rows.append(("hung / healthy", "", "", "", result["hung_ratio_p99"], f"p99 <= {HUNG_BAR}"))
    return format_table(("whole answer over HTTP, ms", "requests", "p50", "p90", "p99", "bar"), rows)
