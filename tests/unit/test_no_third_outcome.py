"""Rows that are wrong by chance: for each a script that NVIDIA's lists allow, or a refusal that names the file."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu_targets import GPU_TARGETS, LANGUAGE_MODELS, SPECULATION, WEIGHTS, quiet
from test_trtllm_flags import CACHE, find_commands, find_fault

from build.commands import explain, list_commands
from build.compiler import build
from build.errors import BuildError
from build.pairs import check_pairs
from build.plan import Plan, make_plan
from build.rows import HERE, TargetRow, load_models
from orchestrator.config import ConfigError, check_toml, parse_toml

FILE = Path("odd.toml")
ROWS = {name: parse_toml(HERE / "targets" / f"{name}.toml") for name in GPU_TARGETS}
ENGINES = ("llm_small", "llm_large")
# What each key may be that decides the commands; most pairs of them cannot be.
LIKELY: dict[str, tuple[Any, ...]] = {
    "runtime": ("engine", "llmapi", "tensorrt", "onnxruntime_gpu"),
    "backend": ("python", "tensorrtllm", "tensorrt", "onnxruntime"),
    "precision": ("bf16", "fp16", "fp8", "int8_sq", "int8_wo", "int4_awq", "int4_wo", "w4a8_awq"),
    "kv_cache_precision": ("auto", "int8", "fp8"),
    "tp_size": (1, 2, 3, 4, 8),
    "pp_size": (1, 2, 3),
    "gpu_device_ids": ([0], [0, 1], [1], [0, 0], [0, 1, 2, 3]),
    "max_input_len": (1, 1024, 4096),
    "max_seq_len": (2, 2048, 5000, 131072),
    "max_num_tokens": (64, 512, 8192, 65536),
    "tokens_per_block": (32, 64, 128),
    "kv_cache_share": (0.001, 0.3, 0.95),
    "enable_kv_cache_reuse": (True, False),
    "enable_chunked_context": (True, False),
    "gemm_plugin": ("auto", "fp8", "disable"),
    "speculation": tuple(method for method in SPECULATION.values() if method is not None),
    "adapters": ([{"name": "legal", "checkpoint": WEIGHTS}],),
    "max_lora_rank": (1, 16, 64),
    "profile_sizes": ([16], [16, 8], [320, 2784], [640], [1000000]),
    "opt_batch_size": (1, 4, 64),
    "memory_mib": (1, 10**6),
    "sm": ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"),
    "count": (1, 2, 4, 8, 10**9),
    "memory_gb_per_s": (5e-324, 1e308),
    "instance_count": (1, 2, 8),
    "max_batch_size": (0, 1, 64, 2048),
    "model": (*LANGUAGE_MODELS, "complexity", "all-minilm-l6-v2", "nobody"),
    "tensorrt_llm": ("1.3.0", "1.1.0", "0.9"),
}
# What nothing should be.
ODD: tuple[Any, ...] = (
    *(
        0,
        -1,
        10**30,
        -0.5,
        0.0,
        1e9,
        float("nan"),
        float("inf"),
        True,
        "",
        "../x",
        "$(id)",
        "a'b",
        "${x}",
        "a\nb",
        "\0",
    ),
    *([], [0.5], {}, {"a": 1}),
)


def tables(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a row: those that say something of hardware, image, engines and plans."""
    yield from (row["gpu"], row["container"])
    for model in row["models"].values():
        yield model
        if "parameters" in model:
            yield model["parameters"]


def make_odd(chance: random.Random) -> dict[str, Any]:
    """A target's row with up to four keys changed or taken away."""
    row = copy.deepcopy(ROWS[chance.choice(GPU_TARGETS)]) | {"name": FILE.stem}
    everything, gpu = list(tables(row)), row["gpu"]
    engines = [(row["models"][name], row["models"][name]["parameters"]) for name in ENGINES]
    for _ in range(chance.randint(1, 4)):
        engine, parameters = chance.choice(engines)
        table = chance.choice([gpu, engine, parameters, parameters, *everything])
        key = chance.choice([*table, *(("speculation", "adapters") if table is parameters else ("count",))])
        how = chance.random()
        if how < 0.1:
            table.pop(key, None)
        elif how < 0.25:
            table[key] = chance.choice(ODD)
        elif key in LIKELY:
            table[key] = copy.deepcopy(chance.choice(LIKELY[key]))
        if key == "adapters":
            table["max_lora_rank"] = 16
        if key == "runtime" and parameters.get("runtime") == "llmapi":
            engine["backend"] = "python"
            engine.pop("max_queue_delay_microseconds", None)
    return row


def outcomes(row: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Of each command what it says in the end: "" for all well, or its refusal."""
    try:
        target = check_toml(FILE, dict(row), TargetRow)
        models = load_models(target)
    except (BuildError, ConfigError) as error:
        return {"rows": str(error)}

    def plan() -> Plan:
        check_pairs(target, models)
        return make_plan(target, models)

    commands: dict[str, Callable[[], Any]] = {
        "--dry-run": lambda: list_commands(target, models, CACHE),
        "plan": plan,
        "--explain": lambda: explain(target, models, folder / "none", CACHE),
        "--render-only": lambda: build(
            target, models, folder / "odd", cache=folder, progress=quiet, force=True, render_only=True
        ),
    }
    found = {}
    for name, command in commands.items():
        try:
            result = command()
        except (BuildError, ConfigError) as error:
            found[name] = str(error)
            continue
        found[name] = ""
        if name == "--dry-run":
            assert [fault for words in find_commands(result) if (fault := find_fault(words)) is not None] == []
        if name == "plan":
            json.dumps(dataclasses.asdict(result), allow_nan=False)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_script_or_a_refusal_with_its_reason(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    num_scripts = num_refusals = 0
    for _ in range(40):
        row = make_odd(chance)
        found = outcomes(row, tmp_path)
        # All commands agree, and a refusal names the file.
        assert len(set(found.values())) == 1, (found, row)
        reason = next(iter(found.values()))
        num_scripts, num_refusals = num_scripts + (not reason), num_refusals + bool(reason)
        assert not reason or FILE.stem in reason, (reason, row)
    assert num_scripts
    assert num_refusals
