"""A plan's commands: what decides them, and that our modules take them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from build import onnx_graph, plan_commands, tensorrt_plan, verify_engine, verify_plan
from build.commands import list_commands
from build.gpu_rows import Container, Gpu
from build.products import Product
from build.recipes import find_products, make_job
from build.rows import TargetRow, load_models, load_target

CACHE = Path("/a cache")
MODULES = {
    "build.onnx_graph": onnx_graph,
    "build.tensorrt_plan": tensorrt_plan,
    "build.verify_engine": verify_engine,
    "build.verify_plan": verify_plan,
}


def products_of(target: TargetRow) -> Iterator[Product]:
    for name in target.compiled:
        job = make_job(name, target, load_models(target), Path("repository"), CACHE)
        for _, product in find_products(job):
            yield product


def vary(model: str = "embedding_encoder", settings: dict[str, Any] | None = None, **parameters: Any) -> TargetRow:
    row = load_target("l4").model_dump()
    row["models"][model] |= settings or {}
    row["models"][model]["parameters"] |= parameters
    return TargetRow.model_validate(row)


def names_of(target: TargetRow, model: str = "embedding_encoder") -> list[str]:
    """Names of what is made for a model, with their hashes."""
    job = make_job(model, target, load_models(target), Path("repository"), CACHE)
    return [product.path(CACHE).name for _, product in find_products(job)]


def test_another_version_of_a_tool_makes_a_graph_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names_of(vary())
    plan_commands.tool_versions.cache_clear()
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: "9.9" if package == "onnx" else real(package))
    after = names_of(vary())
    plan_commands.tool_versions.cache_clear()
    assert not set(before) & set(after)


@pytest.mark.parametrize("name", ["l4", "a100-40g", "h100"])
def test_our_modules_take_the_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command goes through its module's own parser, to the end of it."""
    seen = set()

    class Parsed(Exception):
        pass

    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *words: Any) -> None:
        real(self, *words)  # exits with 2 for a word that it does not take
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for product in products_of(load_target(name)):
        command = product.command(CACHE)
        if command[0] != "env":
            continue
        assert command[1:5] == ["-C", str(Path(plan_commands.__file__).parents[1]), sys.executable, "-m"]
        seen.add(command[5])
        with pytest.raises(Parsed):
            MODULES[command[5]].main(command[6:])
    assert seen == set(MODULES)


@pytest.mark.parametrize(
    ("changed", "new"),
    [
        (vary(settings={"max_batch_size": 16}), (False, True, True)),
        (vary(profile_sizes=[256]), (False, True, True)),
        (vary(opt_batch_size=4), (False, True, True)),
        (vary(memory_mib=600), (False, True, True)),
        (vary(precision="fp32"), (True, True, True)),
        (vary(gpu_device_ids=[0]), (False, False, False)),
        (vary("ocr_detector", precision="fp32"), (False, False, False)),
    ],
)
def test_what_is_made_anew(changed: TargetRow, new: tuple[bool, ...]) -> None:
    before, after = names_of(load_target("l4")), names_of(changed)
    assert tuple(one != other for one, other in zip(before, after)) == new


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": {"name": "NVIDIA L4 24Q"}},
        {"gpu": {"sm": "8.6"}},
        {"container": {"tensorrt": "10.15.0.1"}},
        {"container": {"cuda": "13.2"}},
    ],
)
def test_a_plan_is_of_one_gpu_and_version(changes: dict[str, dict[str, str]]) -> None:
    target = load_target("l4")
    assert target.gpu is not None and target.container is not None
    gpu: Gpu = target.gpu.model_copy(update=changes.get("gpu", {}))
    container: Container = target.container.model_copy(update=changes.get("container", {}))
    other = target.model_copy(update={"gpu": gpu, "container": container})
    before, after = names_of(target), names_of(other)
    assert [one != other for one, other in zip(before, after)] == [False, True, True]


def test_other_weights_make_another_graph() -> None:
    target = load_target("l4")
    parameters, model = target.plans["embedding_encoder"][1], load_models(target)["all-minilm-l6-v2"]
    other = model.model_copy(update={"max_input_tokens": 128})
    made = [plan_commands.make_graph("encoder", parameters, each).key for each in (model, other, model)]
    assert made[0] == made[2] != made[1]


def test_timing_is_kept_by_gpu_and_version() -> None:
    (line,) = (
        line
        for line in list_commands(vary(), load_models(vary()), CACHE, "ocr_detector").splitlines()
        if "build.tensorrt_plan" in line
    )
    assert "--timing_cache '/a cache/timing/NVIDIA-L4-10.14.1.48-plans.cache'" in line


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    import numpy as np

    samples = [{"a": np.arange(3, dtype=np.int32), "b.c": np.ones((1, 2), np.uint8)}, {"a": np.zeros(1, np.int32)}]
    onnx_graph.save_samples(samples, tmp_path / "samples.npz")
    read = onnx_graph.load_samples(tmp_path / "samples.npz")
    assert [{name: array.tolist() for name, array in each.items()} for each in read] == [
        {name: array.tolist() for name, array in each.items()} for each in samples
    ]


# --- comparisons -------------------------------------------------------------------------------------------


def test_what_is_found_is_in_the_manifest_s_words() -> None:
    (product,) = (each for each in products_of(vary()) if each.name == "verified-ocr-detector-fp16")
    assert product.files == ("verified.json",)
    assert json.dumps(product.origin())  # nothing of this machine's
