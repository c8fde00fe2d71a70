"""`python -m perf figures`: README's tables of what was measured, out of `perf/results/`.

`--write` puts them into README, between the marks; a test holds README against them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "perf" / "results"
_MARKED = {
    name: re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL) for name in ("figures", "gpu")
}

Result = Mapping[str, Any]


class Figure(NamedTuple):
    """One line: `bar` is what `value` is held against, `sign` says how; without one it is for information."""

    what: str
    text: str
    value: float = 0
    sign: str = ""
    bar: float = 0
    unit: str = ""

    def row(self) -> str:
        is_met = {"": True, "≤": self.value <= self.bar, "≥": self.value >= self.bar}[self.sign]
        bar = f"{self.sign} {self.bar:g}{self.unit}" if self.sign else ""
        return f"| {self.what} | {self.text}{'' if is_met else ': missed'} | {bar} |"


def _overhead(result: Result) -> list[Figure]:
    real, scripted, added = result["real"], result["scripted"], result["added_ttft_ms"]

    def difference(side: Result, at: str) -> str:
        return f"{side['gateway'][at]:.1f} − {side['engine'][at]:.1f} = {side['added_ttft_ms'][at]:.1f} ms"

    return [
        Figure(
            "first token through the gateway − of the engine model by gRPC, p50, real engine, "
            f"{real['gateway']['num']} requests",
            f"{difference(real, 'p50')} (median of the pairs {real['added_ttft_ms']['p50_of_pairs']:.1f})",
            added["p50"],
            "≤",
            4,
            " ms",
        ),
        Figure(
            f"the same, p99, scripted engine at {result['scripted']['first_token_ms']:.0f} ms, "
            f"{scripted['gateway']['num']} requests",
            f"{difference(scripted, 'p99')} (p50 {scripted['added_ttft_ms']['p50']:.1f})",
            added["p99"],
            "≤",
            10,
            " ms",
        ),
    ]


def _litellm(result: Result) -> list[Figure]:
    ours, theirs, share = result["added_ttft_ms"]["ours"], result["added_ttft_ms"]["litellm"], result["share"]
    parts = [f"{ours[at]:.1f} ÷ {theirs[at]:.1f} = {share[at]:.2f}" for at in ("p50", "p99")]
    what = f"what we add ÷ what LiteLLM's proxy adds, p50 and p99, scripted engine, {result['gateway']['num']} requests"
    return [Figure(what, ", ".join(parts), max(share.values()), "≤", 0.33)]


def _streams(result: Result) -> list[Figure]:
    at_16 = result["streams"]["16"]
    rates = f"{at_16['sse_tokens_per_s']:.0f} ÷ {at_16['bare_tokens_per_s']:.0f}"
    others = ", ".join(f"{ratio:.2f} at {num}" for num, ratio in result["ratio"].items() if num != "16")
    return [
        Figure(
            "tokens/s out of SSE ÷ the bare engine library, 16 streams, median of the rounds",
            f"{result['ratio']['16']:.2f} ({rates}; {others})",
            result["ratio"]["16"],
            "≥",
            0.9,
        ),
        Figure(
            "tokens per event, 16 streams",
            f"{result['tokens_per_event']['16']:.2f}",
            result["tokens_per_event"]["16"],
            "≤",
            2,
        ),
    ]


def _token_path(result: Result) -> list[Figure]:
    paced, full = result["paced"]["16"], result["full_speed"]["16"]
    return [
        Figure(
            "processor time of a token on its way, all processes together, 16 streams",
            f"{paced['us_per_token']['all']:.0f} µs paced at 25 tokens/s, "
            f"{full['us_per_token']['all']:.0f} µs at full speed ({full['tokens_per_s']:,.0f} tokens/s)",
        )
    ]


def _stagger(result: Result) -> list[Figure]:
    what = "first token of the last of six streams started 200 ms apart ÷ of the first, medians of 9 rounds"
    return [Figure(what, f"{result['ratio']:.2f}", result["ratio"], "≤", 1.5)]


def _cancel(result: Result) -> list[Figure]:
    after_ms, steps = result["after_leave_ms"], result["steps_after_leave"]["max"]
    return [
        Figure(
            f"after a client leaves: until the engine let go, {after_ms['num']} clients, p99",
            f"{after_ms['p99']:.0f} ms",
            after_ms["p99"],
            "≤",
            150,
            " ms",
        ),
        Figure("the same: decode steps begun after the orchestrator saw it, most", str(steps), steps, "≤", 1),
    ]


def _cache_quality(result: Result) -> list[Figure]:
    alone, english = result["threshold_alone"], result["languages"]["en"]
    num_misses, num_hits = result["num_misses_due"], english["num_hits_due"]
    others = ", ".join(f"{name} {each['recall']:.0%}" for name, each in result["languages"].items() if name != "en")
    wrong = (
        f"{result['num_false_hits']} ({result['false_hit_rate']:.1%}; a cosine of {alone['threshold']} alone: "
        f"{alone['num_false_hits']})"
    )
    return [
        Figure(
            f"wrong answers that the cache serves to {num_misses} unseen near questions",
            wrong,
            result["false_hit_rate"],
            "≤",
            0.01,
        ),
        Figure(
            f"of {num_hits} unseen English paraphrases, found",
            f"{english['recall']:.1%} ({others})",
            english["recall"],
            "≥",
            0.6,
        ),
    ]


def _cache_speed(result: Result) -> list[Figure]:
    """Of one client with the most entries; the bars are for both stores."""
    most = max(run["entries"] for run in result["runs"])
    memory, redis = (
        next(run for run in result["runs"] if (run["store"], run["entries"], run["clients"]) == (store, most, 1))
        for store in ("memory", "redis")
    )

    def line(what: str, read: Callable[[Result], float], bar: float) -> Figure:
        here, there = read(memory), read(redis)
        return Figure(what, f"{here:.1f} ms (Redis {there:.1f})", max(here, there), "≤", bar, " ms")

    where = f"{most:,} entries, one client, scripted engine, p50"
    return [
        line(f"an exact hit of the cache over HTTP, {where}", lambda run: run["exact_ms"]["p50"], 3),
        line("a semantic hit, embedding included", lambda run: run["semantic_ms"]["p50"], 10),
        line("a miss − the same without the cache", lambda run: run["miss_added_ms"], 8),
    ]


def _routing(result: Result) -> list[Figure]:
    added, ratio = result["routing_added_ms"]["p50"], result["hung_ratio_p99"]
    return [
        Figure("what choosing a tier adds to a miss of the cache, p50", f"{added:.1f} ms", added, "≤", 1, " ms"),
        Figure("p99 of one tier while another's engine hangs ÷ while it answers", f"{ratio:.2f}", ratio, "≤", 1.2),
    ]


def _voice(result: Result) -> list[Figure]:
    sound_ms, barge_in_ms, beside = (
        result["speech_end_to_audio_ms"],
        result["barge_in_ms"],
        result["parallel"]["speech_end_to_audio_ms"],
    )
    many = f"{result['parallel']['sessions']} sessions at once: {beside['p50']:.0f}, {beside['p95']:.0f}"
    what = f"from the last sound of a spoken question to the first of its answer, {result['turns']} turns"
    cut = f"pauses of 0.7 s inside of a sentence that were taken for its end, of {result['pauses']}"
    return [
        Figure(f"{what}, p50 ({many} ms)", f"{sound_ms['p50']:.0f} ms", sound_ms["p50"], "≤", 900, " ms"),
        Figure("the same, p95", f"{sound_ms['p95']:.0f} ms", sound_ms["p95"], "≤", 1500, " ms"),
        Figure(
            "from the first sound of an interruption to silence, p95",
            f"{barge_in_ms['p95']:.0f} ms",
            barge_in_ms["p95"],
            "≤",
            200,
            " ms",
        ),
        Figure(cut, f"{result['false_cutoffs']:.0%}", result["false_cutoffs"], "≤", 0.05),
    ]


def _ocr(result: Result) -> list[Figure]:
    batched, unbatched = result["batched"]["16"]["pages_per_s"], result["unbatched"]["16"]["pages_per_s"]
    gain, against = result["batching_gain"], result["against_rapidocr"]["16"]
    return [
        Figure(
            "OCR, pages/s with dynamic batching ÷ without, 16 clients",
            f"{gain:.2f} ({batched:.1f} ÷ {unbatched:.1f}; lines a batch {result['batch_size']:.1f}; "
            f"÷ rapidocr called directly {against:.1f})",
            gain,
            "≥",
            1,
        )
    ]


def _instrumentation(result: Result) -> list[Figure]:
    cost = result["cost"]
    what = (
        f"tokens/s lost to logs, metrics and traces, {result['streams']} streams, target {result['target']}, "
        f"{len(result['pairs'])} pairs, 95 % upper bound"
    )
    return [Figure(what, f"{cost['upper_95']:.1%} (mean {cost['mean']:.1%})", cost["upper_95"], "≤", 0.05)]


def _techniques(result: Result) -> list[Figure]:
    batching, prefix = (result["techniques"][name] for name in ("in-flight-batching", "prefix-cache"))
    return [
        Figure(
            f"in-flight batching ÷ batches of {batching['static_batch']}, {batching['requests']} answers of "
            "{} to {} tokens, tokens/s".format(*batching["answer_tokens"]),
            f"{batching['ratio']:.1f} ({batching['on']:.0f} ÷ {batching['off']:.0f}; one at a time "
            f"{batching['one_at_a_time']:.0f})",
            batching["ratio"],
            "≥",
            3,
        ),
        Figure(
            "first token of a prompt of 900 tokens ÷ with all but its last line in the prefix cache",
            f"{prefix['ratio']:.1f} ({prefix['off']:.0f} ÷ {prefix['on']:.0f} ms)",
            prefix["ratio"],
            "≥",
            8,
        ),
    ]


def _quality(result: Result) -> list[Figure]:
    runs = [*result["tier"].values(), result["cluster"]]
    num_runs, num_found = (sum(each[key] for each in runs) for key in ("runs", "found"))
    most = max(each["delay_requests"]["max"] for each in runs)
    what = f"a tier or a cluster that starts answering nonsense is found after, most of {num_runs:,} simulated runs"
    if num_found < num_runs:
        most = float("inf")
    num_alarms = sum(each["runs_with_false_alarm"] for each in runs)
    return [
        Figure(what, f"{most:,.0f} requests", most, "≤", 1500, " requests"),
        Figure(
            "the same: runs with a false alarm in the 10,000 good requests before", str(num_alarms), num_alarms, "≤", 0
        ),
    ]


def _simulate(result: Result) -> list[Figure]:
    loads = ", ".join(result["targets"]["cpu"])
    two = result["two_replicas"]
    return [
        Figure(
            f"model of replicas against targets scripted and cpu at loads {loads}: largest error",
            f"{result['worst_error']:.1%}",
            result["worst_error"],
            "≤",
            0.15,
        ),
        Figure(
            "two replicas ÷ one by that model, each with its cores",
            f"{two['own_cores']:.2f} (sharing this machine's: {two['this_machine']:.2f})",
            two["own_cores"],
            "≥",
            two["bar"],
        ),
    ]


def _soak(result: Result) -> list[Figure]:
    rows = [row for row in result["memory"] if row["growth"] is not None]
    worst = max(rows, key=lambda row: float(row["growth"]))
    together = sum(row["to_mib"] for row in rows) / sum(row["from_mib"] for row in rows) - 1
    wrong = [each for each in result["failures"] if not each["what"].startswith("memory: ")]
    what = (
        f"soak of {result['minutes']:.0f} minutes at 80 % of capacity ({result['requests_per_s']:.0f} requests/s, "
        f"{len(result['faults'])} faults)"
    )
    return [
        Figure(
            f"{what}: wrong, mixed, lost or unaccounted answers of {result['accounts']['sent']:,}",
            str(len(wrong)),
            len(wrong),
            "≤",
            0,
        ),
        Figure(
            "the same: growth of resident memory from minute 5 on, the process that grew most",
            f"{worst['growth']:.1%} ({worst['process']}, by {worst['to_mib'] - worst['from_mib']:.1f} MiB; "
            f"all together {together:.1%})",
            worst["growth"],
            "≤",
            0.05,
        ),
    ]


# By the name of the file, in README's order.
FIGURES: dict[str, Callable[[Result], list[Figure]]] = {
    "overhead": _overhead,
    "litellm": _litellm,
    "streams": _streams,
    "token-path": _token_path,
    "stagger": _stagger,
    "cancel": _cancel,
    "cache-quality": _cache_quality,
    "cache-speed": _cache_speed,
    "routing": _routing,
    "voice": _voice,
    "ocr": _ocr,
    "instrumentation": _instrumentation,
    "techniques": _techniques,
    "quality": _quality,
    "simulate": _simulate,
    "soak": _soak,
}


def _gpu(result: Result) -> list[Figure]:
    lines = []
    for name, part in (("BF16", result["speed-bf16"]), ("FP8", result["speed-fp8"])):
        bare, stack = part["bare"], part["stack"]
        for streams, bar in (("64", 0.95), ("256", 0.9)):
            ratio = part["ratios"]["tokens_per_s_over_bare"][streams]
            rate, of_rate = (f"{side['loads'][streams]['tokens_per_s']:,.0f}" for side in (stack, bare))
            what = f"tokens/s out of SSE ÷ AsyncLLM alone, {name}, {streams} streams"
            lines.append(Figure(what, f"{ratio:.3f} ({rate} ÷ {of_rate})", ratio, "≥", bar))
    bf16, fp8 = result["speed-bf16"], result["speed-fp8"]
    for name, part in (("BF16", bf16), ("FP8", fp8)):
        own = part["ratios"]["tokens_per_s_over_own"]
        others = ", ".join(f"{ratio:.3f} at {streams}" for streams, ratio in own.items())
        what = f"tokens/s out of SSE ÷ out of vLLM's own server, {name}"
        lines.append(Figure(what, others, min(own.values()), "≥", 1))
    first = (("BF16", result["first-bf16"]), ("FP8", result["first-fp8"]))
    for name, part in first:
        first_ms = part["stack"]["ttft_ms"]["512"]["p50"]
        beside = f"AsyncLLM alone {part['bare']['ttft_ms']['512']['p50']:.1f}"
        what = f"first token of a prompt of 512 tokens, one stream, {name}, p50"
        lines.append(Figure(what, f"{first_ms:.1f} ms ({beside})", first_ms, "≤", 22, " ms"))
    rates = [part["stack"]["loads"]["1"]["tokens_per_s"] for part in (fp8, bf16)]
    ratio = rates[0] / rates[1]
    lines.append(Figure("FP8 ÷ BF16, one stream", f"{ratio:.2f} ({rates[0]:.0f} ÷ {rates[1]:.0f})", ratio, "≥", 1.35))
    for name, part in first:
        cache = part["prefix_cache"]
        text = f"{cache['ratio']:.1f} ({cache['cold_ms']['p50']:.1f} ÷ {cache['cached_ms']['p50']:.1f} ms)"
        what = f"first token behind 4,000 new tokens ÷ behind 4,000 cached ones, {name}"
        lines.append(Figure(what, text, cache["ratio"], "≥", 5))
    return lines


def load(name: str) -> Result:
    """A result of `perf/results/`."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def tables() -> dict[str, str]:
    """The tables in Markdown, by the name of their marks."""
    of_cpu = [figure for name, read in FIGURES.items() for figure in read(load(name))]
    return {name: _table(lines) for name, lines in (("figures", of_cpu), ("gpu", _gpu(load("h200"))))}


def _table(lines: list[Figure]) -> str:
    rows = ["| what | measured | bar |", "| --- | --- | --- |", *(figure.row() for figure in lines)]
    return "\n".join(rows) + "\n"


def figures(*, write: bool) -> str:
    """The tables; `write` also puts them into README. Raises `ValueError` if README has no marks for one."""
    found = tables()
    if write:
        readme = README.read_text(encoding="utf-8")
        for name, text in found.items():
            readme, num = _MARKED[name].subn(text.replace("\\", r"\\"), readme)
            if num != 1:
                raise ValueError(f"README.md: has {num} places between <!-- {name} --> and <!-- /{name} -->; needs one")
        README.write_text(readme, encoding="utf-8")
    return "\n".join(found.values())


def in_readme() -> dict[str, str]:
    """The tables as README has them."""
    readme = README.read_text(encoding="utf-8")
    return {name: found.group() for name, marked in _MARKED.items() if (found := marked.search(readme))}
