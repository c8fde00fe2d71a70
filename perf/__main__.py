"""The command line: `python -m perf COMMAND`; perf/README.md says what each measures."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from perf.aiperf import Limits
from perf.cache_quality import cache_quality
from perf.cancel import cancel
from perf.errors import PerfError
from perf.everything import NAMES, everything
from perf.figures import figures
from perf.litellm import litellm
from perf.openai import KINDS as TRAFFIC
from perf.openai import openai
from perf.overhead import overhead
from perf.quality_drift import quality_drift
from perf.report import publish, write_json
from perf.router_quality import router_quality
from perf.routing import routing
from perf.safety_speed import safety_speed
from perf.soak import NAMES as FAULTS
from perf.soak import soak
from perf.speech import speech
from perf.stack import find_artifact
from perf.stagger import stagger
from perf.streams import streams
from perf.techniques import TECHNIQUES, techniques
from perf.token_path import token_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a measurement; returns the exit code: 0, 1 for an error, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    if options.command == "figures":
        print(figures(write=options.write), end="")
        return 0
    try:
        if options.command == "overhead":
            table, result = overhead(
                options.artifacts, options.requests, options.scripted_requests, options.first_token_ms
            )
        elif options.command == "litellm":
            table, result = litellm(options.artifacts, options.requests)
        elif options.command == "streams":
            table, result = streams(options.artifacts, options.streams, options.rounds, options.tokens)
        elif options.command == "token-path":
            table, result = token_path(options.artifacts, options.streams, options.tokens, options.itl_ms)
        elif options.command == "stagger":
            table, result = stagger(options.artifacts, options.rounds)
        elif options.command == "instrumentation":
            from perf.instrumentation import instrumentation  # no other command needs OpenTelemetry

            table, result = instrumentation(
                options.artifacts, options.target, options.pairs, options.streams, options.tokens
            )
        elif options.command == "soak":
            table, result = soak(options.minutes, options.replicas, only=options.faults)
        elif options.command == "cache-quality":
            from perf.embedder import ArtifactEmbedder  # no other command needs onnxruntime

            embedder = ArtifactEmbedder(find_artifact(options.artifacts, "cpu"))
            table, result = cache_quality(options.pairs, embedder, options.errors)
        elif options.command == "router-quality":
            from perf.router import ArtifactRouter

            router = ArtifactRouter(find_artifact(options.artifacts, "cpu"))
            table, result = router_quality(options.data, router, options.errors)
        elif options.command == "ocr":
            from perf.ocr import ocr  # nor Pillow

            table, result = ocr(options.clients, options.pages, options.rounds)
        elif options.command == "cache-speed":
            from perf.cache_speed import cache_speed  # nor Redis

            keep = partial(write_json, options.json)
            table, result = cache_speed(options.entries, options.clients, options.requests, options.stores, keep)
        elif options.command == "routing":
            table, result = routing(options.requests, options.rounds)
        elif options.command == "speech":
            table, result = speech(options.artifacts, options.rounds)
        elif options.command == "voice":
            from perf.voice import voice  # nor soundfile

            table, result = voice(options.artifacts, options.turns, options.barge_ins, options.pauses, options.parallel)
        elif options.command == "cache-lookup":
            from perf.cache_lookup_speed import cache_lookup_speed
            from perf.embedder import ArtifactEmbedder

            embedder = ArtifactEmbedder(find_artifact(options.artifacts, "cpu"))
            table, result = cache_lookup_speed(
                options.pairs, embedder, options.sizes, options.operations, options.stores
            )
        elif options.command == "quality":
            from perf.embedder import ArtifactEmbedder

            embedder = ArtifactEmbedder(find_artifact(options.artifacts, "cpu"))
            table, result = quality_drift(options.runs, options.topic_runs, embedder)
            if options.answers:
                from perf.likeness import likeness  # no command but this and the next needs httpx

                result["likeness"] = likeness(find_artifact(options.artifacts, "cpu"), embedder, options.answers)
                table += f"\n\ntwo answers: {result['likeness']}"
        elif options.command == "cost":
            from perf.cost import cost

            table, result = cost(options.artifacts, options.target, options.log, options.data, options.requests)
        elif options.command == "safety":
            table, result = safety_speed(options.rounds)
        elif options.command == "techniques":
            keep = partial(write_json, options.json)
            table, result = techniques(options.artifacts, options.only, options.rounds, keep)
        elif options.command == "all":
            table, result = everything(options.artifacts, options.only, options.folder)
        elif options.command == "simulate":
            from perf.simulate import simulate, validated

            if options.validate:
                table, result = validated(options.artifacts, options.seconds or 30.0, partial(write_json, options.json))
            else:
                table, result = simulate(
                    options.service,
                    options.tiers,
                    options.users,
                    options.think_s,
                    options.replicas,
                    options.seconds or 240.0,
                    options.seed,
                )
        elif options.command == "openai":
            table, result = openai(
                options.artifacts,
                options.target,
                options.run_dir,
                options.only,
                options.rate,
                options.requests,
                {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens},
                Limits(options.ttft_limit_ms, options.tpot_limit_ms),
                partial(write_json, options.json),
            )
        elif options.command == "triton":
            from perf.triton import triton

            table, result = triton(
                options.artifacts,
                options.target,
                options.run_dir,
                options.only,
                options.concurrency,
                options.loads,
                options.window_ms,
                partial(write_json, options.json),
            )
        else:
            table, result = cancel(options.artifacts, options.times, options.others)
        publish(table, result, options.json)
        if result.get("interrupted"):
            raise KeyboardInterrupt
        if failed := result.get("failed"):
            raise PerfError(failed)
    except (PerfError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything was stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--artifacts", type=Path, default=Path("artifacts"), metavar="DIR", help="what `python -m build` made"
    )
    common.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON line to FILE")
    parser = argparse.ArgumentParser(prog="python -m perf", description="Measure against the budgets.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, parents=[common], formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    command = add("overhead", "what gateway and orchestrator add to the first token")
    command.add_argument("--requests", type=_count, default=200, help="requests of each path, real engine")
    command.add_argument("--scripted-requests", type=_count, default=1000, help="the same, scripted engine")
    command.add_argument("--first-token-ms", type=float, default=40.0, help="when the scripted engine answers")
    command = add("litellm", "what LiteLLM's proxy adds to the first token beside us")
    command.add_argument("--requests", type=_count, default=300, help="requests of each path")
    command = add("routing", "what choosing a tier adds, and what a hung tier costs the others")
    command.add_argument("--requests", type=_count, default=300, help="questions, each as auto and pinned")
    command.add_argument("--rounds", type=_count, default=10, help="of a phase with and one without a hung engine")
    command = add("streams", "tokens/s out of SSE against the engine library alone")
    command.add_argument("--streams", type=_counts, default=[1, 8, 16, 32], help="such as 8,16")
    command.add_argument("--rounds", type=_count, default=3, help="rounds of each side")
    command.add_argument("--tokens", type=_count, default=64, help="tokens of each stream")
    command = add("token-path", "what a token costs each process that it passes")
    command.add_argument("--streams", type=_counts, default=[1, 16, 64], help="such as 1,16")
    command.add_argument("--tokens", type=_count, default=400, help="tokens of each stream")
    command.add_argument("--itl-ms", type=float, default=40.0, help="the pace of the engine that waits")
    command = add("stagger", "first tokens of six streams that start 200 ms apart")
    command.add_argument("--rounds", type=_count, default=9, help="rounds of six streams")
    command = add("instrumentation", "what logging, counting, timing and tracing every request costs")
    command.add_argument("--target", choices=("scripted", "cpu"), default="cpu", help="whose engine answers")
    command.add_argument("--pairs", type=_pairs, default=10, help="measurements with and without, at least 2")
    command.add_argument("--streams", type=_count, default=16, help="requests at once")
    command.add_argument("--tokens", type=_count, default=64, help="tokens of each stream")
    command = add("soak", "a server at 80 %% of what it can do while parts of it fail: is every answer right?")
    command.add_argument("--minutes", type=_positive, default=30.0, help="of the soak itself")
    command.add_argument("--replicas", type=_count, default=2, help="Tritons; one is killed where there are several")
    command.add_argument(
        "--faults", nargs="*", choices=FAULTS, default=list(FAULTS), metavar="NAME", help="these alone"
    )
    command = add("cancel", "how soon the engine lets go when a client leaves")
    command.add_argument("--times", type=_count, default=30, help="clients that leave, alone and beside others each")
    command.add_argument("--others", type=_count, default=8, help="other streams")
    command = add("cache-quality", "wrong and right hits of the semantic cache over pairs of questions")
    command.add_argument("--pairs", type=Path, default=Path("tests/data/cache_pairs_unseen.jsonl"), metavar="FILE")
    command.add_argument("--errors", type=Path, metavar="FILE", help="write the pairs that went wrong to FILE")
    command = add("router-quality", "how often the classifier finds the right tier")
    command.add_argument("--data", type=Path, default=Path("tests/data/router_unseen.jsonl"), metavar="FILE")
    command.add_argument("--errors", type=Path, metavar="FILE", help="write the conversations judged wrongly to FILE")
    command = add("quality", "how soon the quality monitor finds a drift, and how often it is wrong")
    command.add_argument("--runs", type=_count, default=200, help="simulated runs of 10,000 requests, of each kind")
    command.add_argument("--topic-runs", type=_count, default=16, help="runs with real questions")
    command.add_argument("--answers", type=_count, help="also ask target cpu so many questions twice")
    command = add("cost", "what routing and the cache save against the dearest tier alone")
    command.add_argument("--log", type=Path, metavar="FILE", help="a server's triton.log (default: make traffic)")
    command.add_argument("--target", default="cpu", help="whose prices count, and what the traffic goes to")
    command.add_argument("--data", type=Path, default=Path("build/data/router.jsonl"), metavar="FILE", help="traffic")
    command.add_argument("--requests", type=_count, default=200, help="conversations of the traffic")
    command = add("safety", "what the safety filter costs")
    command.add_argument("--rounds", type=_count, default=200, help="texts of each size")
    command = add("cache-speed", "how long a hit takes over HTTP, and what a miss costs")
    command.add_argument("--entries", type=_counts, default=[10, 1000, 100_000], help="stored answers, such as 10,1000")
    command.add_argument("--clients", type=_counts, default=[1, 16], help="such as 1,16")
    command.add_argument("--requests", type=_count, default=400, help="requests of each kind, over all clients")
    command.add_argument("--stores", nargs="+", choices=("memory", "redis"), default=["memory", "redis"])
    command = add("ocr", "pages read a second, batched and not, beside rapidocr called directly")
    command.add_argument("--clients", type=_counts, default=[1, 4, 16], help="such as 1,16")
    command.add_argument("--pages", type=_count, default=16, help="receipts of each round")
    command.add_argument("--rounds", type=_count, default=3, help="rounds of each way and number of clients")
    command = add("speech", "how fast questions are spoken and heard, over HTTP")
    command.add_argument("--rounds", type=_count, default=5, help="times that each question is spoken and heard")
    command = add("techniques", "each technique on against off, in one run")
    command.add_argument(
        "--only", nargs="+", choices=TECHNIQUES, default=list(TECHNIQUES), metavar="NAME", help="these alone"
    )
    command.add_argument("--rounds", type=_count, default=3, help="of both sides, of each technique")
    command = add("triton", "perf_analyzer's sweeps over every model of a server")
    command.add_argument("--target", help="what is served, or was (default: cpu-voice if it is built, else cpu)")
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="of a `serve` of the target that runs already")
    command.add_argument("--only", nargs="+", metavar="MODEL", help="these models alone")
    command.add_argument("--concurrency", type=_counts, default=[1, 4, 16], help="requests at once, such as 1,16")
    command.add_argument(
        "--loads", type=_shares, default=[0.5, 0.8], help="shares of the highest rate, such as 0.5,0.8"
    )
    command.add_argument("--window-ms", type=_count, default=2000, help="each of the three windows of a level")
    command = add("all", "all of this that the machine can run, with a report")
    command.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help="these commands alone"
    )
    command.add_argument(
        "--folder",
        type=Path,
        default=Path("perf/results"),
        metavar="DIR",
        help="where <machine>.json and .md are written",
    )
    command = add("simulate", "how many replicas so many users need, by a model fed with measured times")
    command.add_argument("--validate", action="store_true", help="measure the times, and hold the model against them")
    command.add_argument(
        "--service", type=Path, default=Path("perf/results/simulate.json"), metavar="FILE", help="what --validate wrote"
    )
    command.add_argument("--tiers", type=Path, metavar="FILE", help="JSON: what is asked (perf/README.md)")
    command.add_argument("--users", type=_counts, default=[100, 1000, 10_000], help="such as 100,10000")
    command.add_argument("--think-s", type=_positive, default=60.0, help="between answer and next question, on average")
    command.add_argument("--replicas", type=_counts, help="such as 1,2,4 (default: the fewest that are enough)")
    command.add_argument("--seconds", type=_positive, help="simulated (240), or of each load with --validate (30)")
    command.add_argument("--seed", type=int, default=0)
    command = add("openai", "AIPerf against the gateway: Poisson, shared prefix, several turns, cancellation")
    command.add_argument("--target", default="cpu", help="what is served, or was")
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="of a `serve` of the target that runs already")
    command.add_argument(
        "--only", nargs="+", choices=TRAFFIC, default=list(TRAFFIC), metavar="KIND", help="these kinds alone"
    )
    command.add_argument("--rate", type=_positive, default=1.5, help="requests a second, on average")
    command.add_argument("--requests", type=_count, default=60, help="of each kind")
    command.add_argument("--input-tokens", type=_count, default=96, help="of a request")
    command.add_argument("--output-tokens", type=_count, default=24, help="of an answer")
    command.add_argument("--ttft-limit-ms", type=_positive, default=500.0, help="of a good request")
    command.add_argument("--tpot-limit-ms", type=_positive, default=66.0, help="the same; 66 is 15 tokens a second")
    command = add("voice", "how soon a spoken question is answered aloud, and what interrupts whom")
    command.add_argument("--turns", type=_count, default=20, help="questions, one after the other")
    command.add_argument("--barge-ins", type=_count, default=12, help="interruptions")
    command.add_argument("--pauses", type=_count, default=40, help="pauses of 0.7 s inside of sentences, at least")
    command.add_argument("--parallel", type=_count, default=10, help="sessions at once")
    command = add("cache-lookup", "the semantic cache's lookup by itself, both stores")
    command.add_argument("--pairs", type=Path, default=Path("tests/data/cache_pairs.jsonl"), metavar="FILE")
    command.add_argument("--sizes", type=_counts, default=[10, 1000, 100_000], help="numbers of entries")
    command.add_argument("--operations", type=_count, default=300, help="of each kind")
    command.add_argument("--stores", nargs="+", choices=("memory", "redis"), default=["memory", "redis"])
    command = commands.add_parser("figures", help="README's table, out of perf/results/")
    command.add_argument("--write", action="store_true", help="put it into README")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 1")
    return int(text)


def _pairs(text: str) -> int:
    if (number := _count(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 2")
    return number


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number above 0")
    return number


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share <= 2 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; numbers above 0 and up to 2, such as 0.5,0.8")
    return shares


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run in order, as Ctrl-C does
    sys.exit(main())
