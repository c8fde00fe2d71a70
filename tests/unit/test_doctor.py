"""The doctor on artifacts and machines that are broken on purpose: each fault has a message of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_targets import MODELS, SPECULATION, render, vary, with_onnx
from standins.dress import seal, write_engine, write_plan

from build.rows import load_models, load_target
from orchestrator.doctor import files
from orchestrator.doctor.engines import check_graphs, longest_sequence
from orchestrator.doctor.examination import examine
from orchestrator.doctor.files import Verified, find_file_faults
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.hardware import check_backends
from orchestrator.doctor.machine import GpuFacts, ThisMachine
from orchestrator.doctor.repository import NUMERIC
from orchestrator.manifest import Manifest, TritonModel, TrtllmEngine, read_manifest
from orchestrator.triton.artifact import open_artifact
from orchestrator.triton.doctor import check_health
from orchestrator.triton.process import StartError
from orchestrator.triton.server import TritonInstall

L4 = GpuFacts("NVIDIA L4", "8.9", 23034.0, 22500.0, "590.44.01")
VERSIONS = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}


class FakeMachine:
    """A machine that is what it is told."""

    def __init__(
        self,
        gpus: Sequence[GpuFacts] = (L4,),
        versions: dict[str, str] = VERSIONS,
        programs: Sequence[str] = ("mpirun",),
        missing: Sequence[str] = (),
        shared_memory_bytes: int = 2 << 30,
    ) -> None:
        self._gpus, self._versions, self._programs, self._missing = gpus, versions, programs, missing
        self._shared_memory_bytes = shared_memory_bytes

    def gpus(self) -> list[GpuFacts]:
        return list(self._gpus)

    def version(self, package: str) -> str | None:
        return self._versions.get(package)

    def has_program(self, name: str) -> bool:
        return name in self._programs

    def missing_libraries(self, library: Path) -> list[str]:
        return list(self._missing)

    def shared_memory_bytes(self) -> int:
        return self._shared_memory_bytes


def write_tokenizer(folder: Path, num_tokens: int, eos: tuple[str, int]) -> None:
    """A tokenizer's files with so many tokens; of them only the last one and `eos` are there."""
    folder.mkdir(exist_ok=True)
    tokens = [{"id": eos[1], "content": eos[0], "special": True}]
    vocab = {"a": 0, "z": num_tokens - 1}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos[0]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def make(target: str, folder: Path) -> Path:
    """The artifact of a GPU target, small files in the place of engines."""
    row = load_target(target)
    artifact = render(row, load_models(row), folder)
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    del manifest["render_only"]
    for name, model in manifest["row"]["models"].items():
        if (model["parameters"] or {}).get("engine") == "tensorrt_llm":
            version = artifact / "model_repository" / name / "1"
            write_engine(version / "engine", model, manifest["models"][model["model"]]["architecture"], {"a": "b"})
            write_tokenizer(version / "tokenizer", 128256, ("<|eot_id|>", 128009))
        elif (model["parameters"] or {}).get("runtime") == "tensorrt":
            write_plan(artifact / "model_repository" / name, target)
    seal(artifact, manifest)
    return artifact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {target: make(target, tmp_path_factory.mktemp(target)) for target in ("l4", "h100")}


@pytest.fixture
def l4(whole: dict[str, Path], tmp_path: Path) -> Path:
    """To be broken."""
    return shutil.copytree(whole["l4"], tmp_path / "l4")


def backends(folder: Path) -> dict[str, Path]:
    for name in ("python", "tensorrt", "tensorrtllm"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"libtriton_{name}.so").touch()
    return {name: folder / name for name in ("python", "tensorrt", "tensorrtllm")}


def look(artifact: Path, machine: FakeMachine | None = None, programs: Sequence[str] = ()) -> list[Finding]:
    manifest = read_manifest(artifact)
    found = examine(
        artifact,
        manifest,
        machine or FakeMachine(),
        backends=backends(artifact.parent / "backends"),
        programs=programs,
        verified=None,
    )
    return list(found)


def faults(artifact: Path, machine: FakeMachine | None = None, programs: Sequence[str] = ()) -> list[str]:
    found = [finding for finding in look(artifact, machine, programs) if finding.is_fault]
    assert all(finding.found and finding.wanted and finding.fix for finding in found), found
    return [finding.text for finding in found]


def only(texts: list[str]) -> str:
    assert len(texts) == 1, texts
    return texts[0]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def config_of(artifact: Path, model: str = "llm_small") -> Path:
    return artifact / "model_repository" / model / "config.pbtxt"


def engine_of(artifact: Path, model: str = "llm_small") -> Path:
    return artifact / "model_repository" / model / "1" / "engine"


def test_what_is_well(whole: dict[str, Path]) -> None:
    lines = [finding.as_line() for finding in look(whole["l4"])]
    assert all(line.startswith("ok ") for line in lines)
    assert {line.split()[1] for line in lines} == {
        *("files", "config", "engine", "tokenizer", "backend", "gpu", "software", "memory"),
    }
    h100 = GpuFacts("NVIDIA H100 80GB HBM3", "9.0", 81559.0, 81000.0, "600.1")
    assert faults(whole["h100"], FakeMachine([h100, h100]), ["mpirun"]) == []


# --- the artifact ------------------------------------------------------------------------------------------


def test_a_half_copied_file(l4: Path) -> None:
    path = engine_of(l4) / "rank0.engine"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    text = only(faults(l4))
    assert text.startswith(f"{path}: changed since the build, or copied in part: {size // 2} bytes; wanted: {size} byt")
    assert text.endswith("\nfix: copy it again, or python -m build --target l4 --force")


def test_a_changed_file(l4: Path) -> None:
    path = engine_of(l4) / "rank0.engine"
    path.write_bytes(path.read_bytes()[::-1])
    assert only(faults(l4)).startswith(f"{path}: changed since the build (its sha256 differs from manifest.json); want")


def test_a_missing_file_and_one_too_many(l4: Path) -> None:
    path, more = engine_of(l4) / "rank0.engine", l4 / "model_repository" / "a model"
    path.rename(more)
    found = "\n".join(faults(l4))
    assert re.search(
        rf"^{path}: in manifest\.json, but missing; wanted: \d+ bytes, as built\nfix: copy it", found, re.M
    )
    assert f"{more}: not in manifest.json, so it is not part of what was built; wanted: nothing beside" in found
    assert f"\nfix: rm '{more}', or python -m build --target l4 --force" in found


def test_an_empty_engine_file(l4: Path) -> None:
    path = engine_of(l4) / "rank0.engine"
    path.write_bytes(b"")
    seal(l4)
    assert only(faults(l4)).startswith(f"{path}: missing or empty; wanted: 1 files, one a GPU\nfix: ")


def test_a_variable_that_was_never_filled(l4: Path) -> None:
    """E01."""
    path = config_of(l4)
    edit(path, "max_batch_size: 64", "max_batch_size: ${max_batch_size}")
    number = path.read_text().splitlines().index("max_batch_size: ${max_batch_size}") + 1
    seal(l4)
    assert only(faults(l4)) == (
        f"{path}:{number}: max_batch_size: ${{max_batch_size}} was never filled in; wanted: a value\n"
        "fix: python -m build --target l4 --force"
    )


def test_a_parameter_that_was_never_filled(l4: Path) -> None:
    path = config_of(l4)
    edit(path, 'string_value: "model_repository/llm_small/1/engine"', 'string_value: "${engine_dir}"')
    seal(l4)
    assert re.search(r"config\.pbtxt:\d+: gpt_model_path: \$\{engine_dir\} was never filled in", only(faults(l4)))


def test_an_empty_number(l4: Path) -> None:
    """E02."""
    path = config_of(l4)
    pool = re.search(r'"max_tokens_in_paged_kv_cache"\s+value \{\s+string_value: ("\d+")', path.read_text())
    assert pool is not None
    edit(path, f"string_value: {pool[1]}", 'string_value: ""')
    seal(l4)
    assert only(faults(l4)).startswith(
        f"{path}: parameters.max_tokens_in_paged_kv_cache is empty; wanted: a number or a boolean\nfix: "
    )


def test_the_numbers_are_nvidia_s() -> None:
    listed = {each["key"]: each["allowed"] for each in MODELS["tensorrtllm parameters"]}
    kinds = ("int", "bool", "0..1", "positive int")
    assert {key for key, allowed in listed.items() if allowed.startswith(kinds)} == NUMERIC


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_batch_size: 64", "max_batch_size: many", "not a model configuration: "),
        ('"model_repository/llm_small/1/engine"', '"/work/engine"', "is '/work/engine', a path of one machine; wanted"),
        ("decoupled: true", "decoupled: false", "model_transaction_policy.decoupled is false; wanted: true"),
        ("count: 1", "count: 2", "instance_group.count is 2; wanted: 1, the row's"),
        ("max_batch_size: 64", "max_batch_size: 999", "max_batch_size is 999; wanted: 64, the row's"),
        ('name: "llm_small"', 'name: "other"', "name is 'other'; wanted: 'llm_small', the row's"),
        ('backend: "tensorrtllm"', 'backend: "nope"', "backend is 'nope'; wanted: 'tensorrtllm', the row's"),
        (
            "model_repository/llm_small/1",
            "model_repository/llm_large/1",
            "gpt_model_path is 'model_repository/llm_large",
        ),
        ('"guided_decoding_backend"', '"guided"', "guided_decoding_backend is missing; wanted: there, even if empty"),
        ('"guaranteed_no_evict"', '"whatever"', "batch_scheduler_policy is 'whatever'; wanted: guaranteed_no_evict or"),
    ],
)
def test_a_wrong_configuration(l4: Path, old: str, new: str, message: str) -> None:
    edit(config_of(l4), old, new)
    seal(l4)
    assert message in faults(l4)[0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_tokens_in_paged_kv_cache", "abc", "'abc'; wanted: a number or a boolean"),
        ("kv_cache_free_gpu_mem_fraction", "2.5", "2.5; wanted: above 0, up to 1"),
        ("gpu_device_ids", "5", "'5'; wanted: '0', the row's"),
    ],
)
def test_a_wrong_parameter(l4: Path, key: str, value: str, message: str) -> None:
    path = config_of(l4)
    found = re.search(rf'"{key}"\s+value \{{\s+string_value: ("[^"]*")', path.read_text())
    assert found is not None
    edit(path, found[0], found[0].replace(found[1], f'"{value}"'))
    seal(l4)
    assert faults(l4)[0].startswith(f"{path}: parameters.{key} is {message}")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": {"x": 1}}),
        ("tokenizer_config.json", {"eos_token": ["x"]}),
        ("tokenizer.json", {"model": {"vocab": {"a": "b"}}, "added_tokens": []}),
    ],
)
def test_an_odd_tokenizer(l4: Path, file: str, content: dict[str, Any]) -> None:
    folder = l4 / "model_repository" / "llm_small" / "1" / "tokenizer"
    (folder / file).write_text(json.dumps(content))
    seal(l4)
    assert only(faults(l4)).startswith(f"{folder}: not a tokenizer: ")


@pytest.mark.parametrize(("method", "tokens"), [(None, 8192), ("draft_target", 8224), ("lookahead", 8288)])
def test_the_longest_sequence_has_its_drafts(method: str | None, tokens: int) -> None:
    target, _ = vary("l4", speculation=SPECULATION[method] if method else None, max_num_tokens=4096)
    settings, parameters = target.trtllm_engines["llm_large"]
    row = TritonModel.model_validate(settings.model_dump())
    assert row.parameters is not None and row.parameters.max_draft_len == parameters.max_draft_len
    assert longest_sequence(TrtllmEngine(name="llm_large", settings=row, parameters=row.parameters)) == tokens


def change_engine(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = engine_of(artifact) / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    seal(artifact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.update(version="1.1.0"),
            "an engine of TensorRT-LLM 1.1.0; wanted: 1.2.1, which will load it\nfix: python -m build --target l4",
        ),
        (lambda config: config.clear(), "not the configuration of an engine: KeyError('version')"),
        (
            lambda config: config["build_config"].update(max_input_len=1),
            "build_config.max_input_len is 1; wanted: 6144, the row's",
        ),
        (
            lambda config: config["build_config"].update(max_batch_size=1),
            "build_config.max_batch_size is 1; wanted: 64",
        ),
        (lambda config: config["pretrained_config"]["mapping"].update(tp_size=2), "an engine of {'tp_size': 2, 'pp_"),
    ],
)
def test_a_wrong_engine(l4: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    change_engine(l4, change)
    assert message in only(faults(l4))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.plan", "", "model.plan: missing or empty; wanted: the plan that the build makes\nfix: python -m build"),
        ("plan.json", "{}", "plan.json: not the description of a plan: KeyError('version')"),
        (
            "plan.json",
            '{"version": "10.14.1.480"}',
            "a plan of TensorRT 10.14.1.480; wanted: 10.14.1.48, which will lo",
        ),
        ("plan.json", '{"version": "10.14.1.48.post1"}', None),
    ],
)
def test_a_wrong_plan(l4: Path, file: str, text: str, message: str | None) -> None:
    (l4 / "model_repository" / "ocr_detector" / "1" / file).write_text(text)
    seal(l4)
    found = faults(l4)
    assert found == [] if message is None else message in only(found)


def test_an_empty_engine_configuration(l4: Path) -> None:
    (engine_of(l4) / "config.json").write_text("")
    seal(l4)
    assert "config.json: not the configuration of an engine: JSONDecodeError" in only(faults(l4))


def test_a_kv_cache_smaller_than_one_sequence(l4: Path) -> None:
    """E05."""
    path = config_of(l4)
    pool = re.search(r'"max_tokens_in_paged_kv_cache"\s+value \{\s+string_value: ("\d+")', path.read_text())
    assert pool is not None
    edit(path, f"string_value: {pool[1]}", 'string_value: "8160"')
    seal(l4)
    assert only(faults(l4)) == (
        "llm_small: the KV cache holds 8160 tokens (max_tokens_in_paged_kv_cache); wanted: 8192, one sequence of "
        "max_seq_len\nfix: raise kv_cache_share or lower max_seq_len in the row, then python -m build --target l4 "
        "--force"
    )


def test_an_artifact_without_engines(l4: Path) -> None:
    manifest = json.loads((l4 / "manifest.json").read_bytes())
    seal(l4, {**manifest, "render_only": True})
    assert only(faults(l4)) == (
        "none: the artifact was made with --render-only; wanted: engines and tokenizers\n"
        "fix: python -m build --target l4"
    )


@pytest.mark.parametrize(
    ("num_tokens", "eos", "message"),
    [
        (
            49152,
            ("<|im_end|>", 2),
            "the tokenizer of another model: it has 49152 tokens; wanted: 128256, those of llam",
        ),
        (151665, ("<|im_end|>", 151645), "it has 151665 tokens; wanted: 128256"),
        (128256, ("<|end|>", 128001), "its answers end with '<|end|>', id 128001; wanted: id 128009, the engine's"),
    ],
)
def test_the_tokenizer_of_another_model(l4: Path, num_tokens: int, eos: tuple[str, int], message: str) -> None:
    write_tokenizer(l4 / "model_repository" / "llm_small" / "1" / "tokenizer", num_tokens, eos)
    seal(l4)
    assert message in only(faults(l4))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("model_repository/llm_small/1/tokenizer/tokenizer.json", "{", "not a tokenizer: JSONDecodeError"),
        ("model_repository/llm_small/1/tokenizer/tokenizer_config.json", "[]", "not a tokenizer: AttributeError"),
        ("tiers.toml", "tier = 1", "tier: Input should be a valid list (got 1); wanted: tiers as the build wrote them"),
        ("model_repository/llm_small/config.pbtxt", "\udce4", "config.pbtxt: cannot be read: "),
    ],
)
def test_a_damaged_file(l4: Path, path: str, text: str, message: str) -> None:
    (l4 / path).write_bytes(text.encode(errors="surrogateescape"))
    seal(l4)
    assert any(message in fault for fault in faults(l4))


def test_a_missing_template(l4: Path) -> None:
    path = l4 / "model_repository" / "llm_large" / "1" / "tokenizer" / "chat_template.jinja"
    path.unlink()
    seal(l4)
    assert only(faults(l4)).startswith(f"{path}: missing or empty; wanted: a file\nfix: ")


# --- the machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            FakeMachine([]),
            "no NVIDIA GPU (nvidia-smi finds none); wanted: a machine with 1 x NVIDIA L4\nfix: docker run",
        ),
        (  # E04
            FakeMachine([L4._replace(name="NVIDIA H100 80GB HBM3", sm="9.0")]),
            "GPU 0: NVIDIA H100 80GB HBM3, SM 9.0; wanted: SM 8.9, the engines'\nfix: python -m build --target X on th",
        ),
        (FakeMachine([L4._replace(name="NVIDIA L40S")]), "GPU 0: NVIDIA L40S; wanted: NVIDIA L4, whose kernels were t"),
        (FakeMachine([L4._replace(memory_mib=16000.0)]), "GPU 0: 16000 MiB; wanted: 23034 MiB"),
        (FakeMachine([L4._replace(driver="570.1")]), "driver 570.1; wanted: 590.44.01 or later"),
        (
            FakeMachine([L4._replace(free_mib=1000.0)]),
            "GPU 0: 1.0 GiB free; wanted: 8.3 GiB of weights, KV cache and plans\nfix: end what else runs on it",
        ),
        (
            FakeMachine(versions={**VERSIONS, "tensorrt_llm": "1.1.0"}),
            "tensorrt_llm 1.1.0; wanted: 1.2.1, which built the engines\nfix: docker run --gpus all nvcr.io/nvidia/tri",
        ),
        (FakeMachine(versions={"tensorrt_llm": "1.2.1"}), "tensorrt is not installed; wanted: 10.14.1.48"),
    ],
)
def test_a_wrong_machine(whole: dict[str, Path], machine: FakeMachine, message: str) -> None:
    assert message in only(faults(whole["l4"], machine))


def test_tensor_parallelism_without_enough_gpus(whole: dict[str, Path]) -> None:
    h100 = GpuFacts("NVIDIA H100 80GB HBM3", "9.0", 81559.0, 81000.0, "600.1")
    found = "".join(faults(whole["h100"], FakeMachine([h100]), ["mpirun"]))
    assert "llm_large (tp_size 2, gpu_device_ids [0, 1]): 1 GPUs here; wanted: 2\nfix: a machine with 2 x" in found
    assert "llm_small (tp_size 1" in found  # it has an instance on the other one


def test_programs_and_shared_memory(whole: dict[str, Path]) -> None:
    h100 = GpuFacts("NVIDIA H100 80GB HBM3", "9.0", 81559.0, 81000.0, "600.1")
    machine = FakeMachine([h100, h100], programs=(), shared_memory_bytes=64 << 20)
    assert "mpirun is not in PATH" in only(faults(whole["h100"], machine, ["mpirun"]))
    (shm,) = [finding.as_line() for finding in look(whole["h100"], machine) if finding.check == "shm"]
    assert shm.startswith("warn shm         /dev/shm has 0.1 GiB; wanted: 2 GiB") and "--shm-size=2g" in shm


def test_backends(whole: dict[str, Path], tmp_path: Path) -> None:
    manifest = read_manifest(whole["l4"])
    here = backends(tmp_path)
    missing = FakeMachine(missing=["libnvinfer.so.10"])
    texts = [finding.text for finding in check_backends(manifest, missing, here)]
    assert all("libnvinfer.so.10 not found; wanted: all libraries it is linked with" in text for text in texts)
    found = check_backends(manifest, FakeMachine(), {"python": here["python"]})
    plans, fault = (each for each in found if each.is_fault)
    # NVIDIA's image lacks it; ours has it.
    assert plans.text.startswith(
        "tensorrt: Triton has no such backend; wanted: a folder of backends\nfix: docker build"
    )
    assert fault.text.startswith(
        "tensorrtllm: Triton has no such backend; wanted: a folder of backends\nfix: docker build -f deploy/Dockerfile"
    )


def test_graphs_for_onnx_runtime(tmp_path: Path) -> None:
    """The fallback: the graph has to be there, and Triton's backend for it."""
    row = with_onnx("l4", "embedding_encoder")
    artifact = render(row, load_models(row), tmp_path)
    manifest = read_manifest(artifact)
    (graph,) = [each for each in manifest.graphs if each.name == "embedding_encoder"]
    assert (graph.name, graph.parameters.memory_mib) == ("embedding_encoder", 256)
    (fault,) = [each.text for each in check_graphs(artifact, manifest) if "embedding_encoder" in each.text]
    assert "1/model.onnx: missing or empty; wanted: the graph that the build makes" in fault
    (artifact / "model_repository" / "embedding_encoder" / "1" / "model.onnx").write_text("graph")
    (well,) = [each for each in check_graphs(artifact, manifest) if "embedding_encoder" in each.text]
    assert well.text == "embedding_encoder: all-minilm-l6-v2, a graph for ONNX Runtime" and not well.is_fault
    found = [each.text for each in check_backends(manifest, FakeMachine(), backends(tmp_path / "backends"))]
    assert found[0].startswith("onnxruntime: Triton has no such backend; wanted: a folder of backends\nfix: docker")


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA L4, 8.9, 23034, 22500, 590.44.01'\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = ThisMachine()
    assert machine.gpus() == []  # not to be run yet
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.gpus() == [L4]
    assert machine.version("pydantic") and machine.version("no-such-package") is None
    # What a container has is outside of our virtual environment.
    (tmp_path / "bin").mkdir()
    outside = tmp_path / "bin" / "python3"
    outside.write_text('#!/bin/sh\n[ "$4" = tensorrt_llm ] && echo 1.2.1\n')
    outside.chmod(0o755)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert (machine.version("tensorrt_llm"), machine.version("no-such-package")) == ("1.2.1", None)
    assert machine.has_program("sh") and not machine.has_program("no-such-program")
    assert machine.missing_libraries(Path("/bin/sh").resolve()) == []
    assert machine.shared_memory_bytes() > 0


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("No devices were found", []),
        ("", []),
        ("NVIDIA A100-SXM4-40GB, 8.0, [Insufficient Permissions], [N/A], 590.44.01", [(None, None)]),
        ("\\377\\376, 8.9, 23034, 22500, 590.44.01", [(23034.0, 22500.0)]),
    ],
)
def test_what_nvidia_smi_says_in_words(
    said: str, gpus: list[tuple[float | None, float | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [(facts.memory_mib, facts.free_mib) for facts in ThisMachine().gpus()] == gpus


def test_memory_that_nobody_tells_is_a_warning(whole: dict[str, Path]) -> None:
    silent = L4._replace(memory_mib=None, free_mib=None)
    (finding,) = [each for each in look(whole["l4"], FakeMachine(gpus=(silent,))) if each.fix]
    assert finding.may_start
    assert finding.text.startswith(
        "GPU 0: NVIDIA L4, of whose memory nvidia-smi does not tell; wanted: 23034 MiB\nfix: "
    )


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "libtriton_empty.so"
    empty.touch()
    (said,) = ThisMachine().missing_libraries(empty)
    assert "not a dynamic executable" in said
    program = tmp_path / "ldd"
    program.write_text(
        '#!/bin/sh\necho "$1: /lib/libstdc++.so.6: version \\`GLIBCXX_3.4.32\' not found (required by $1)" >&2\n'
        "echo '  libnvinfer.so.10 => not found'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert ThisMachine().missing_libraries(empty) == ["libnvinfer.so.10", "GLIBCXX_3.4.32"]


# --- large files are read once -----------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files whose bytes were read."""
    names: list[str] = []
    read = files._sha256

    def note(path: Path) -> str:
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(files, "_sha256", note)
    monkeypatch.setattr(files, "LARGE_BYTES", 50)
    return names


def test_a_large_file_is_read_once(tmp_path: Path, reads: list[str]) -> None:
    root = tmp_path / "a"
    root.mkdir()
    (root / "large").write_bytes(b"x" * 100)
    (root / "small").write_bytes(b"x")
    (root / "manifest.json").write_text('{"schema": 1, "target": "cpu"}')
    seal(root)
    manifest, place = read_manifest(root), tmp_path / "cache" / "verified.json"

    def start() -> list[Finding]:
        reads.clear()
        verified = Verified(place)
        found = list(find_file_faults(root, manifest, verified))
        verified.save()
        return found

    assert (start(), reads) == ([], ["large", "small"])
    assert (start(), reads) == ([], ["small"])
    # Same size, same mtime: the system's ctime tells.
    times = (root / "large").stat()
    (root / "large").write_bytes(b"y" * 100)
    os.utime(root / "large", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "sha256 differs" in only([finding.text for finding in start()])
    assert "large" in reads
    place.write_text("{")  # damaged: everything is read again
    (root / "large").write_bytes(b"x" * 100)
    assert (start(), reads) == ([], ["large", "small"])


def test_the_record_may_have_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    verified = Verified(tmp_path / "file" / "verified.json")
    verified.save()
    Verified(None).save()


# --- serve asks first --------------------------------------------------------------------------------------


def test_serve_says_all_that_is_wrong(l4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install = TritonInstall(tmp_path / "opt" / "bin" / "tritonserver", "PATH")
    backends(tmp_path / "opt" / "backends")
    check_health(open_artifact(l4), install, None, FakeMachine())
    change_engine(l4, lambda config: config.update(version="1.1.0"))
    with pytest.raises(StartError) as caught:
        check_health(open_artifact(l4), install, None, FakeMachine([]))
    assert "an engine of TensorRT-LLM 1.1.0" in str(caught.value)
    assert "no NVIDIA GPU" in str(caught.value)


def test_a_target_without_gpus_asks_for_none(tmp_path: Path) -> None:
    manifest = Manifest(schema=1, target="cpu", files={})
    (tmp_path / "model_repository").mkdir()
    found = examine(tmp_path, manifest, FakeMachine([]), backends={}, programs=(), verified=None)
    assert [finding.check for finding in found if finding.is_fault] == ["tokenizer"]  # no tiers.toml
