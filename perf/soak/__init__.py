"""`python -m perf soak`: a server at 80 % of what it can do, for long, while parts of it fail.

Target scripted, with the cache and the routing of target cpu, keys, and Redis: every answer is known beforehand. First
a closed loop tells how many requests a second there can be, then they come by Poisson at 80 % of it, and faults strike.
In the end every request must have had its answer, unless a fault explains its error; must be in the server's log once,
and in its metrics; and no process may have grown.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from build.compiler import build
from build.fetch import cache_folder
from build.rows import load_models, load_target
from perf.errors import PerfError
from perf.report import format_table, say
from perf.soak.accounts import Books, RequestLog
from perf.soak.faults import FAULTS, NAMES, Fault, Strike, Striking, World
from perf.soak.load import Load
from perf.soak.memory import Memory, describe
from perf.soak.traffic import KINDS, Heard, Traffic
from perf.stack import running_stack
from perf.stats import summarize

LOAD = 0.8  # of the capacity
NUM_CLIENTS = 16  # of the closed loop
_WARM_UP_S = 3.0
_STEP_S = 10.0  # between two lines of progress
# Full within minutes: what the store takes by then, it takes for good.
_CACHE_BYTES = 4 << 20
_SEED = 11
_MAX_LISTED = 200
_PER_MINUTE = 1_000_000_000  # quotas that are counted and never reached

__all__ = ["NAMES", "soak"]


def soak(
    minutes: float,
    num_replicas: int = 2,
    capacity_s: float = 15.0,
    memory_period_s: float = 10.0,
    only: Sequence[str] = NAMES,
) -> tuple[str, dict[str, Any]]:
    """Soak for so long; returns table and result, which has `failed` if anything was not as it must be.

    Of the faults `only` those strike that there are enough Tritons for. Ctrl-C leaves what was seen until then. Raises
    `PerfError` where it cannot begin.
    """
    from perf.redis_server import RedisServer  # no other command but one needs its wheel

    faults = [fault for fault in FAULTS if fault.name in only and (num_replicas > 1 or not fault.needs_replicas)]
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="perf-soak-")))
        say("building target scripted with a cache")
        artifact, keys = _build(folder / "scripted"), folder / "keys.json"
        key = _add_key(keys)
        redis = RedisServer()
        redis.start()
        opened.callback(redis.stop)
        flags = (f"--keys={keys}", f"--replicas={num_replicas}")
        stack = opened.enter_context(running_stack(artifact, *flags, environ={"REDIS_URL": redis.url}))
        logs = [RequestLog(Path(each["log"]), each["name"] if num_replicas > 1 else "") for each in stack.replicas()]
        world = World(stack, redis, key, threading.Event())
        table, result = _Run(world, Traffic(key, _SEED), Books(stack.gateway_url, key, logs)).run(
            60 * minutes, capacity_s, memory_period_s, faults
        )
        return table, {**result, "replicas": num_replicas}


def _build(artifact: Path) -> Path:
    cpu = load_target("cpu")
    assert cpu.cache is not None
    cache = cpu.cache.model_copy(update={"max_bytes": _CACHE_BYTES})
    target = load_target("scripted").model_copy(update={"cache": cache, "routing": cpu.routing})
    build(target, load_models(target), artifact, cache=cache_folder(), progress=lambda _: nullcontext())
    return artifact


def _add_key(keys: Path) -> str:
    command = [sys.executable, "-m", "orchestrator", "keys", "add", "--keys", str(keys), "--tenant=soak", "--metrics"]
    command += [f"--{what}-per-minute={_PER_MINUTE}" for what in ("requests", "tokens")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class _Run:
    """One soak, and what is known of it so far."""

    def __init__(self, world: World, traffic: Traffic, books: Books) -> None:
        self._world, self._traffic, self._books = world, traffic, books
        self._strikes: list[Strike] = []  # `Striking`'s, which grows
        self._kinds: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self._times_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._failures: list[dict[str, Any]] = []
        self._num_failures = 0
        self._began_s = time.monotonic()

    def run(
        self, seconds: float, capacity_s: float, memory_period_s: float, faults: Sequence[Fault]
    ) -> tuple[str, dict[str, Any]]:
        result: dict[str, Any] = {"command": "soak", "minutes": round(seconds / 60, 3)}
        stack, redis = self._world.stack, self._world.redis
        load = Load(stack.gateway_url, iter(self._traffic), self._hear)
        memory = Memory(stack.serve_pid, redis.pids, memory_period_s)
        try:
            say(f"capacity: {NUM_CLIENTS} clients for {capacity_s:.0f} s")
            load.run_closed(NUM_CLIENTS, min(_WARM_UP_S, capacity_s))
            capacity = load.run_closed(NUM_CLIENTS, capacity_s)
            rate = LOAD * capacity
            result |= {"capacity": {"clients": NUM_CLIENTS, "requests_per_s": round(capacity, 1)}}
            result |= {"requests_per_s": round(rate, 1)}
            say(f"  {capacity:.1f} requests/s; soaking at {rate:.1f} for {seconds / 60:.1f} min")
            memory = Memory(stack.serve_pid, redis.pids, memory_period_s)
            self._began_s = time.monotonic()
            with memory, Striking(self._world, faults, seconds, say) as striking:
                self._strikes = striking.strikes
                self._soak(load, rate, seconds)
            load.finish()
        except KeyboardInterrupt:
            result["interrupted"] = True
        finally:
            load.close()
        return self._close(result, memory, time.monotonic() - self._began_s)

    def _soak(self, load: Load, rate: float, seconds: float) -> None:
        ends_s = self._began_s + seconds
        for step in range(1 << 30):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return
            load.run_poisson(rate, min(_STEP_S, left_s), _SEED + step)
            self._books.read()
            num, passed_s = sum(kind.total() for kind in self._kinds.values()), time.monotonic() - self._began_s
            say(f"  {passed_s:.0f} of {seconds:.0f} s: {num} answers, {self._num_failures} failures")

    def _hear(self, heard: Heard) -> None:
        """Judge an answer, and enter it in the books."""
        verdict, kind = self._traffic.judge(heard), heard.ask.kind
        self._books.enter(heard, verdict.code)
        if verdict.is_right:
            self._kinds[kind]["right"] += 1
            self._times_ms[kind].append((heard.ended_s - heard.sent_s) * 1000)
            return
        if verdict.code is not None:
            for strike in self._strikes:
                if strike.explains(verdict.code, heard.sent_s, heard.ended_s):
                    strike.note(verdict.code, heard.ended_s)
                    self._kinds[kind]["failed_by_faults"] += 1
                    return
        self._kinds[kind]["failed"] += 1
        self._fail(
            f"{kind}: {verdict.wrong or verdict.code}",
            id=heard.ask.request_id,
            at_s=round(heard.sent_s - self._began_s, 2),
            took_s=round(heard.ended_s - heard.sent_s, 2),
            status=heard.status,
        )

    def _fail(self, what: str, **facts: Any) -> None:
        self._num_failures += 1
        if len(self._failures) < _MAX_LISTED:
            self._failures.append({"what": what, **facts})

    def _close(self, result: dict[str, Any], memory: Memory, seconds: float) -> tuple[str, dict[str, Any]]:
        rows, grown = describe(list(memory.series.values()), seconds)
        for fault in grown:
            self._fail(fault)
        for strike in self._strikes:
            if strike.not_back is not None:
                self._fail(f"{strike.fault.name}: {strike.not_back}")
        try:
            accounts, differences = self._books.close(
                lambda sent_s, ended_s: any(strike.may_lose(sent_s, ended_s) for strike in self._strikes)
            )
        except (PerfError, OSError) as error:
            accounts, differences = {}, [f"metrics: cannot be read: {error}"]
        # What was open when it was interrupted is in the server's books and not in ours.
        for difference in [] if "interrupted" in result else differences:
            self._fail(difference)
        result |= {
            "requests": {kind: dict(counts) for kind, counts in self._kinds.items()},
            "ms": {kind: summarize(times) for kind, times in self._times_ms.items() if times},
            "faults": [self._describe_strike(strike) for strike in self._strikes],
            "accounts": accounts,
            "memory": rows,
            "num_failures": self._num_failures,
            "failures": self._failures,
        }
        if self._num_failures:
            result["failed"] = f"soak: {self._num_failures} failures; the first: {self._failures[0]['what']}"
        return _table(result), result

    def _describe_strike(self, strike: Strike) -> dict[str, Any]:
        def since(at_s: float | None) -> float | None:
            return None if at_s is None else round(at_s - strike.began_s, 2)

        return {
            "fault": strike.fault.name,
            "at_s": round(strike.began_s - self._began_s, 1),
            "back_after_s": since(strike.back_s),
            "last_error_after_s": since(strike.last_error_s),
            "errors": strike.errors,
        }


def _table(result: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for kind, counts in result["requests"].items():
        times = result["ms"].get(kind, {})
        ends = [counts.get(end, 0) for end in ("right", "failed_by_faults", "failed")]
        rows.append((kind, *ends, times.get("p50", ""), times.get("p99", "")))
    tables = [format_table(("requests", "right", "failed by faults", "failed", "p50, ms", "p99, ms"), rows)]
    if result["faults"]:
        keys = ("at_s", "back_after_s", "last_error_after_s")
        struck = [(row["fault"], *(_or_dash(row[key]) for key in keys), row["errors"]) for row in result["faults"]]
        tables.append(format_table(("fault", "at, s", "back, s", "last error, s", "errors"), struck))
    if result["memory"]:
        grown = [
            (
                f"{row['process']} ({row['pid']})",
                row["first_mib"],
                row["last_mib"],
                "-" if row["growth"] is None else f"{100 * row['growth']:+.1f} %",
            )
            for row in result["memory"]
        ]
        tables.append(format_table(("resident memory", "first, MiB", "last, MiB", "growth, <= 5 %"), grown))
    tables.append(format_table(("books", ""), [(name, value) for name, value in result["accounts"].items()]))
    tables.append(f"{result['num_failures']} failures")
    tables += [str(failure) for failure in result["failures"][:20]]
    return "\n\n".join(tables)


def _or_dash(value: float | None) -> object:
    return "-" if value is None else value
