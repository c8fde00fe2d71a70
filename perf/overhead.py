"""`python -m perf overhead`: what gateway and orchestrator add to the first token.

Two paths to one engine, in turns in one run: over HTTP through the gateway, and by gRPC to the engine model
with the token ids that the orchestrator would send. The two requests of a round are the same question, each
with a number of its own in front: equally many tokens, and neither finds the other's prefix cached. Who
goes first alternates. Each request waits until the one before is over.

The clock starts when the request's last byte was handed to the kernel (HTTP), or the request to gRPC's open
stream; what gRPC then does to send and receive counts for the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from perf.engine_client import EngineClient
from perf.errors import PerfError
from perf.prompts import fresh_question, script
from perf.report import format_table, say
from perf.sse import SseConnection, chat_body
from perf.stack import Stack, find_artifact, running_stack
from perf.stats import percentile, summarize

P50_BAR_MS = 4.0  # with the real engine
P99_BAR_MS = 10.0  # with the scripted one
_WARM_UP_ROUNDS = 10
# The first token is what is measured; the second keeps the answer a stream.
_MAX_TOKENS = 2
_SCRIPT_TEXT = "one two"  # two tokens
_SCRIPT_ITL_MS = 2.0

Prompt = Callable[[int, int], str]


def overhead(
    artifacts: Path, num_requests: int, num_scripted_requests: int, first_token_ms: float
) -> tuple[str, dict[str, Any]]:
    """Measure both engines; returns table and result. Raises `PerfError`."""
    with running_stack(find_artifact(artifacts, "cpu")) as stack:
        real = measure(stack, fresh_question, num_requests)
    with running_stack(find_artifact(artifacts, "scripted")) as stack:
        scripted = measure(
            stack,
            lambda _, number: script(_SCRIPT_TEXT, first_token_ms, _SCRIPT_ITL_MS, number),
            num_scripted_requests,
        )
    result = {
        "command": "overhead",
        "added_ttft_ms": {"p50": _added(real, 50), "p99": _added(scripted, 99)},
        "real": _describe(real),
        "scripted": {**_describe(scripted), "first_token_ms": first_token_ms},
    }
    return _table(result), result


def measure(
    stack: Stack, prompt: Prompt, num_rounds: int, proxies: Mapping[str, str] | None = None
) -> dict[str, list[float]]:
    """First-token times in ms by path: "gateway", "engine" and `proxies` (name and URL) that stand before the gateway.

    `prompt` makes a text of a round's index and a number used once.
    """
    tokenizer = stack.load_tokenizer()
    urls = {"gateway": stack.gateway_url, **(proxies or {})}
    times: dict[str, list[float]] = {name: [] for name in (*urls, "engine")}
    with ExitStack() as opened:
        engine = opened.enter_context(EngineClient(stack.triton_grpc_url, stack.tier.model, stack.inference_key()))
        http = {name: opened.enter_context(SseConnection(url)) for name, url in urls.items()}

        def ask(name: str, text: str, token_ids: list[int]) -> float:
            if name == "engine":
                return engine.first_token_ms(token_ids, _MAX_TOKENS)
            return http[name].ask(chat_body(text, _MAX_TOKENS)).ttft_ms

        for index in range(-_WARM_UP_ROUNDS, num_rounds):
            number = len(times) * (index + _WARM_UP_ROUNDS)
            texts = {name: prompt(index, number + place) for place, name in enumerate(times)}
            ids = {name: tokenizer.encode_chat([{"role": "user", "content": text}]) for name, text in texts.items()}
            if len({len(token_ids) for token_ids in ids.values()}) > 1:
                raise PerfError(f"prompts of unequally many tokens cannot be compared: {list(texts.values())}")
            names = deque(times)
            names.rotate(index)
            for name in names:
                ttft_ms = ask(name, texts[name], ids[name])
                if index >= 0:
                    times[name].append(ttft_ms)
            if index >= 0 and (index + 1) % 50 == 0:
                say(f"  {index + 1} of {num_rounds} rounds")
    return times


def _added(times: dict[str, list[float]], percent: float) -> float:
    return round(percentile(times["gateway"], percent) - percentile(times["engine"], percent), 3)


def _describe(times: dict[str, list[float]]) -> dict[str, Any]:
    added = {f"p{percent}": _added(times, percent) for percent in (50, 90, 99)}
    # Of equal prompts side by side: stays useful when the machine is too noisy for a difference of percentiles.
    pairs = [gateway - engine for gateway, engine in zip(times["gateway"], times["engine"])]
    added["p50_of_pairs"] = round(percentile(pairs, 50), 3)
    return {path: summarize(values) for path, values in times.items()} | {"added_ttft_ms": added}


def _table(result: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for engine in ("real", "scripted"):
        measured = result[engine]
        for path in ("gateway", "engine"):
            times = measured[path]
            rows.append((f"{engine}: {path}", times["num"], times["p50"], times["p90"], times["p99"], ""))
        added = measured["added_ttft_ms"]
        bar = f"p50 <= {P50_BAR_MS:.0f}" if engine == "real" else f"p99 <= {P99_BAR_MS:.0f}"
        rows.append((f"{engine}: added", "", added["p50"], added["p90"], added["p99"], bar))
    return format_table(("first token, ms", "requests", "p50", "p90", "p99", "bar"), rows)
