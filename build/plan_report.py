"""A plan as a table for people; `--json` gives the same numbers."""

from __future__ import annotations

import argparse
import dataclasses
import json

from build.errors import BuildError
from build.pairs import check_pairs
from build.plan import GIB, EnginePlan, Lengths, Plan, make_plan
from build.rows import TargetRow, load_models, load_target


def run_plan(argv: list[str]) -> int:
    """`python -m build plan`: print the plan of a target; raises `BuildError` when it does not fit."""
    usual = Lengths()
    parser = argparse.ArgumentParser(prog="python -m build plan", description="What a GPU target holds and costs.")
    parser.add_argument("--target", required=True, help="a target with a GPU")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many there are (default: the row's gpu.count)")
    parser.add_argument("--input-tokens", type=int, metavar="N", help=f"of a request (default: {usual.input_tokens})")
    parser.add_argument(
        "--output-tokens", type=int, metavar="N", help=f"of its answer (default: {usual.output_tokens})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    for name in ("gpus", "input_tokens", "output_tokens"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: {value} is less than 1")
    target = load_target(arguments.target)
    models = load_models(target)
    check_pairs(target, models)
    usual = _usual_lengths(target)
    lengths = Lengths(arguments.input_tokens or usual.input_tokens, arguments.output_tokens or usual.output_tokens)
    _check_lengths(target, lengths)
    plan = make_plan(target, models, lengths, arguments.gpus)
    print(json.dumps(dataclasses.asdict(plan)) if arguments.json else as_table(plan))
    return 0


def _usual_lengths(target: TargetRow) -> Lengths:
    """The default ones, or shorter where an engine takes no such requests."""
    usual = Lengths()
    for _, parameters in target.trtllm_engines.values():
        input_tokens = min(usual.input_tokens, parameters.max_input_len, max(parameters.max_seq_len - 1, 1))
        usual = Lengths(input_tokens, min(usual.output_tokens, max(parameters.max_seq_len - input_tokens, 1)))
    return usual


def _check_lengths(target: TargetRow, lengths: Lengths) -> None:
    whole = lengths.input_tokens + lengths.output_tokens
    for name, (_, parameters) in target.trtllm_engines.items():
        if lengths.input_tokens > parameters.max_input_len or whole > parameters.max_seq_len:
            raise BuildError(
                f"--input-tokens, --output-tokens: {lengths.input_tokens} + {lengths.output_tokens} = {whole}; "
                f"{target.name}.toml: models.{name} takes prompts of up to {parameters.max_input_len} "
                f"(max_input_len) and {parameters.max_seq_len} with the answer (max_seq_len)"
            )


def as_table(plan: Plan) -> str:
    """The plan as lines of text."""
    free = ", ".join(f"GPU {device}: {size / GIB:.1f} GiB" for device, size in plan.free_bytes.items())
    requests = f"{plan.lengths.input_tokens} + {plan.lengths.output_tokens} tokens"
    num_used = plan.num_replicas * len(plan.free_bytes)
    idle = f", idle: {plan.num_gpus - num_used}" if num_used < plan.num_gpus else ""
    lines = [
        f"{plan.target}: {plan.num_gpus} x {plan.gpu}, replicas: {plan.num_replicas}{idle}, "
        f"${plan.cost_per_month:,.0f} a month, {plan.tokens_per_day_ceiling / 1e9:.2f} billion tokens a day at most",
        f"free for KV caches: {free}; requests of {requests}"
        + (f"; GPUs are joined by {plan.interconnect}" if len(plan.free_bytes) > 1 else ""),
        "Floors and ceilings are what the hardware allows at best; nothing here was measured.",
    ]
    for name, engine in plan.engines.items():
        lines += ["", f"{name}: {engine.model}, {engine.precision}, KV cache {engine.kv_cache_precision}"]
        lines += [f"  {label:<36}{value}" for label, value in _rows(engine)]
    return "\n".join(lines)


def _rows(engine: EnginePlan) -> list[tuple[str, str]]:
    needed = "more than 8" if engine.tp_size_needed is None else str(engine.tp_size_needed)
    rows = [
        ("GPUs (tp x pp)", f"{engine.tp_size} x {engine.pp_size}; the fewest that hold it alone: tp {needed}"),
        ("weights a GPU", f"{engine.weight_bytes / GIB:.2f} GiB"),
        ("activations, runtime", f"{engine.activation_bytes / GIB:.2f} + {engine.runtime_bytes / GIB:.2f} GiB"),
        ("KV cache a GPU", f"{engine.kv_pool_bytes / GIB:.2f} GiB, {engine.kv_bytes_per_token} bytes a token"),
        ("max_tokens_in_paged_kv_cache", f"{engine.max_tokens_in_paged_kv_cache}"),
        ("kv_cache_free_gpu_mem_fraction", f"{engine.kv_cache_free_gpu_mem_fraction}"),
        ("sequences at once", f"{engine.max_sequences}"),
        ("prefill floor", f"{engine.prefill_floor_ms:.1f} ms"),
        ("ITL floor, alone and full", f"{engine.itl_floor_ms:.2f} ms, {engine.itl_floor_full_batch_ms:.2f} ms"),
        ("tokens/s ceiling", f"{engine.tokens_per_s_ceiling:,.0f}"),
        ("cost of a million tokens, at least", f"${engine.cost_floor_per_million_tokens:.3f}"),
    ]
    if engine.speculative_gain is not None:
        note = " if drafts came with the requests; none do yet: 1.00x" if engine.needs_drafts else ""
        rows.append(("expected speculative gain", f"{engine.speculative_gain:.2f}x{note}"))
    return rows
