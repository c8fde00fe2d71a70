"""Every command for the container, for every target, model and runtime, against NVIDIA's own lists of flags."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_targets import FLAGS, GPU_TARGETS, LANGUAGE_MODELS, SPECULATION, alone, vary

from build.__main__ import main
from build.commands import list_commands
from build.engine_rows import Lookahead, TensorRTLLMParameters
from build.errors import BuildError
from build.rows import HERE, load_models, load_target

CACHE = Path("/a cache's $HOME")
PRECISIONS = TensorRTLLMParameters.model_fields["precision"].annotation.__args__  # type: ignore[union-attr]
KV_PRECISIONS = TensorRTLLMParameters.model_fields["kv_cache_precision"].annotation.__args__  # type: ignore[union-attr]
# The script's own words around the commands.
SHELL = ("set", "if", "fi", "mkdir", "rm", "mv", "compgen")


def find_commands(script: str) -> list[list[str]]:
    """The container's commands in a script, as a shell splits them."""
    lines = [line.split(maxsplit=1) for line in script.splitlines() if line.strip() and not line.startswith("#")]
    return [list(split(" ".join(line))) for line in lines if line[0] not in SHELL]


@functools.cache
def split(command: str) -> tuple[str, ...]:
    """`shlex.split`, which is slow, of what many scripts share."""
    return tuple(shlex.split(command))


def find_fault(words: list[str]) -> str | None:
    """What NVIDIA's list of flags says against a command; None if nothing."""
    if words[0] == "trtllm-build":
        known, words = FLAGS["trtllm-build"], words[1:]
    elif words[0] == "python3":
        known, words = FLAGS[words[1].removeprefix("/app/")], words[2:]
    elif words[:2] in (["hf", "download"], ["cp", "-r"], ["env", "-C"]):
        return None  # not NVIDIA's; of ours tests/unit/test_plan_commands.py
    else:
        return f"unknown command {words[0]}"
    flags = {flag["flag"]: flag for flag in known}
    seen = set()
    while words:
        name, words = words[0], words[1:]
        if name not in flags or name in seen:
            return f"{name} is no flag, or is there twice"
        seen.add(name)
        flag = flags[name]
        if flag["type"] == "flag":
            continue
        if not words:
            return f"{name} has no value"
        value, words = words[0], words[1:]
        if flag["type"] == "str list":
            while words and not words[0].startswith("--"):
                if "choices" in flag and words[0] not in flag["choices"]:
                    return f"{name} {words[0]} is none of {flag['choices']}"
                words = words[1:]
        if "choices" in flag and value not in flag["choices"]:
            return f"{name} {value} is none of {flag['choices']}"
        if flag["type"] == "int" and not value.isdigit():
            return f"{name} {value} is no number"
    return None


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("trtllm-build --checkpoint_dir a --max_batch_size 8", None),
        ("trtllm-build --max_output_len 8", "--max_output_len is no flag"),
        ("trtllm-build --gemm_plugin int8", "--gemm_plugin int8 is none of"),
        ("trtllm-build --max_batch_size many", "--max_batch_size many is no number"),
        ("trtllm-build --max_batch_size 8 --max_batch_size 8", "there twice"),
        ("trtllm-build --strip_plan --max_batch_size", "--max_batch_size has no value"),
        ("python3 /app/examples/models/core/qwen/convert_checkpoint.py --fp8_kv_cache", "--fp8_kv_cache is no flag"),
        ("trtllm-bench", "unknown command"),
    ],
)
def test_the_check_itself(command: str, fault: str | None) -> None:
    found = find_fault(shlex.split(command))
    assert found is None if fault is None else found is not None and fault in found


def combinations() -> Iterator[dict[str, Any]]:
    # Whether the KV cache is reused matters where the cache is quantised.
    kinds = [("auto", True), *itertools.product(KV_PRECISIONS[1:], (True, False))]
    for precision, (kv_precision, paged) in itertools.product(PRECISIONS, kinds):
        yield {
            "precision": precision,
            "kv_cache_precision": kv_precision,
            "enable_kv_cache_reuse": paged,
            "enable_chunked_context": paged,
        }
    for method in SPECULATION.values():
        yield {"speculation": method, "max_num_tokens": 16384}
        yield {"speculation": method, "max_num_tokens": 16384, "precision": "bf16", "kv_cache_precision": "auto"}


@pytest.mark.parametrize("runtime", ["engine", "llmapi"])
@pytest.mark.parametrize("model", LANGUAGE_MODELS)
@pytest.mark.parametrize("target_name", GPU_TARGETS)
def test_a_script_passes_the_contract_or_is_refused(target_name: str, model: str, runtime: str) -> None:
    limits = {"max_input_len": 4096, "max_seq_len": 8192, "max_num_tokens": 8192}
    num_scripts, refusals = 0, set()
    for parameters in combinations():
        target, models = alone(target_name, {"model": model}, **(limits | {"runtime": runtime} | parameters))
        try:
            script = list_commands(target, models, CACHE, "llm_large")
        except BuildError as error:
            assert str(error).startswith(f"{target_name}.toml: ")
            refusals.add(str(error))
            continue
        num_scripts += 1
        commands = find_commands(script)
        assert len(commands) >= 2
        for words in commands:
            assert find_fault(words) is None, shlex.join(words)
            assert not {*words} & {*FLAGS["trtllm-build removed"]}
    assert refusals
    # 70B on the small cards, and three KV heads over two GPUs, fit in no way.
    small = ("a100-40g", "l4", "rtx4090")
    impossible = (model == "llama-3.1-70b-instruct" and target_name in small) or (
        model == "smollm2-135m-instruct" and target_name == "h100"
    )
    if not impossible and not (model == "llama-3.1-70b-instruct" and runtime == "llmapi"):
        assert num_scripts >= 3, refusals


@pytest.mark.parametrize("target_name", GPU_TARGETS)
def test_the_rows_as_they_are_pass(target_name: str) -> None:
    target = load_target(target_name)
    script = list_commands(target, load_models(target), CACHE)
    assert [find_fault(words) for words in find_commands(script)] == [None] * (2 * 4 + 4 * 3)
    assert "${" not in script


def script_of(**parameters: Any) -> str:
    return list_commands(*alone("h200", **parameters), CACHE)


def has(script: str, words: str) -> bool:
    """Whether a command of the script has these words, one after another."""
    wanted = shlex.split(words)
    return any(
        command[start : start + len(wanted)] == wanted
        for command in find_commands(script)
        for start in range(len(command))
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "--qformat fp8"),
        ({}, "--kv_cache_dtype fp8"),
        ({}, "--use_paged_context_fmha enable --use_fp8_context_fmha enable"),
        ({}, "--kv_cache_type paged --tokens_per_block 32"),
        ({"precision": "int8_sq", "kv_cache_precision": "auto"}, "--qformat int8_sq"),
        ({"precision": "int8_sq", "kv_cache_precision": "auto"}, "--use_fp8_context_fmha disable"),
        ({"precision": "int4_awq", "kv_cache_precision": "auto"}, "--awq_block_size 128"),
        ({"precision": "w4a8_awq", "kv_cache_precision": "auto"}, "--dtype float16 --qformat w4a8_awq"),
        ({"speculation": SPECULATION["lookahead"], "max_num_tokens": 16384}, "--max_draft_len 83"),
        ({"speculation": SPECULATION["draft_target"]}, "--speculative_decoding_mode draft_tokens_external"),
        ({"speculation": SPECULATION["medusa"], "max_num_tokens": 8192}, "--speculative_decoding_mode medusa"),
        ({"speculation": SPECULATION["medusa"], "max_num_tokens": 8192}, "--num_medusa_heads 4 --max_draft_len 63"),
    ],
)
def test_what_a_row_says_is_in_the_command(parameters: dict[str, Any], words: str) -> None:
    assert has(script_of(**parameters), words)


def test_sixteen_bits_are_converted_and_not_quantised() -> None:
    target, models = alone("l4", {"model": "qwen2.5-7b-instruct"}, precision="bf16", kv_cache_precision="auto")
    script = list_commands(target, models, CACHE)
    assert has(script, "python3 /app/examples/models/core/qwen/convert_checkpoint.py --model_dir")
    assert "quantize.py" not in script


def test_draft_tokens_of_lookahead() -> None:
    # TensorRT-LLM's own example: window, n-gram and verification set of 7 each take --max_draft_len 83.
    assert Lookahead.model_validate(SPECULATION["lookahead"]).max_draft_len == 83


def test_engines_of_one_model_are_made_once() -> None:
    target, models = vary("l4", settings={"model": "llama-3.2-1b-instruct"})
    script = list_commands(target, models, CACHE)
    assert script.count("\n  hf download") == 1
    assert script.count("\n  trtllm-build") == 2  # other limits, another engine


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "h100", "--dry-run", "--only", "llm_small"]) == 0
    script = capsys.readouterr().out
    assert "llama-3.1-8b-instruct" in script and "70b" not in script
    assert main(["--target", "h100", "--dry-run", "--only", "llm_medium"]) == 1
    assert "no such engine, 'llm_medium'; there are llm_small, llm_large, emb" in capsys.readouterr().err
    assert main(["--target", "cpu", "--dry-run"]) == 0
    assert "#   llm_small: convert weights to OpenVINO IR" in capsys.readouterr().out
    assert main(["--target", "cpu", "--only", "llm_small"]) == 1
    assert "'llm_small' has no commands in a container" in capsys.readouterr().err
    assert main(["--target", "h100", "--explain"]) == 0
    assert "llm_large: build engine" in capsys.readouterr().out
    assert main(["--target", "h100", "--explain", "--only", "llm_small"]) == 0
    first, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith("artifacts/h100: ")
    assert all(step.startswith("  llm_small: ") for step in steps)
    reasons = [re.search(r"  (will run: |skipped: |runs with )", step) for step in steps]
    assert len({reason and reason.start() for reason in reasons}) == 1  # below one another
    with pytest.raises(SystemExit):
        main(["--target", "h100", "--explain", "--dry-run"])


def test_whoever_has_read_enough_is_no_error() -> None:
    script = f"{shlex.quote(sys.executable)} -m build --target l4 --dry-run | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=HERE.parent, capture_output=True, text=True, timeout=60)
    # Much or little of it was written when the reader left.
    assert done.stdout in ("#!/usr/bin/env bash\n141\n", "#!/usr/bin/env bash\n0\n")
    assert done.stderr == ""
