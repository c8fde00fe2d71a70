"""A GPU target built from end to end with stand-ins for the container's commands: order, resuming, what is checked."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from gpu_targets import alone, vary
from hypothesis import given
from hypothesis import strategies as st

from build import trtllm
from build.checkpoint_tokenizer import copy_tokenizer
from build.commands import explain, list_commands, make_products
from build.compiler import build
from build.errors import BuildError
from build.machine import check_machine
from build.model_rows import AnyModelRow, Checkpoint, ModelRow
from build.products import as_script
from build.recipes import RECIPES, Recipe
from build.rows import HERE, TargetRow, load_models, load_target
from orchestrator.config import read_toml
from orchestrator.triton.artifact import check_artifact

# One program under the names of four. It writes down how it was called, and what the real one would leave.
STAND_IN = """#!{python} -IS
import json, os, pathlib, sys
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
here = pathlib.Path({folder!r})
if name == "env":
    name, words = words[4].removeprefix("build."), words[5:]
if name == "nvidia-smi":
    print((here / "gpus").read_text(), end="")
    sys.exit()
with (here / "calls").open("a") as calls:
    calls.write(name + " " + " ".join(words) + "\\n")
if (here / "fail").exists() and name == (here / "fail").read_text():
    print("line one")
    print("CUDA out of memory")
    sys.exit(3)
values = dict(zip(words, words[1:]))
out = pathlib.Path(values["--local-dir" if name == "hf" else "--output_dir"])
out.mkdir(parents=True)
ranks = range(int(values.get("--tp_size") or values.get("--workers") or 1))
if name == "verify_engine":
    (out / "verified.json").write_text(json.dumps({{"token_agreement": 0.99}}))
elif name == "onnx_graph":
    for file in ("graph.onnx", "model.onnx", "samples.npz"):
        (out / file).write_text("graph of " + values["--engine"])
elif name == "tensorrt_plan":
    (out / "model.plan").write_text("plan")
    (out / "plan.json").write_text("{{}}")
elif name == "verify_plan":
    (out / "verified.json").write_text(json.dumps({{"outputs": {{}}}}))
elif name == "hf":
    config = json.loads((here / "configs.json").read_text())[words[1]]
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").write_text("weights of " + words[1])
    (out / "tokenizer.json").write_text("{{}}")
    (out / "tokenizer_config.json").write_text(json.dumps({{"chat_template": "template"}}))
    (out / ".cache").mkdir()
elif name == "python3":
    (out / "config.json").write_text("{{}}")
    for rank in ranks:
        (out / f"rank{{rank}}.safetensors").write_text("converted")
else:
    keys = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
    built = {{key: int(values["--" + key]) for key in keys}}
    (out / "config.json").write_text(json.dumps({{"version": "1.2.1", "build_config": built}}))
    for rank in ranks:
        (out / f"rank{{rank}}.engine").write_text("engine")
"""


def config_of(model: ModelRow) -> dict[str, Any]:
    numbers = model.architecture
    return {
        "model_type": numbers.family,
        "num_hidden_layers": numbers.num_layers,
        "hidden_size": numbers.hidden_size,
        "intermediate_size": numbers.intermediate_size,
        "num_attention_heads": numbers.num_attention_heads,
        "num_key_value_heads": numbers.num_kv_heads,
        "vocab_size": numbers.vocab_size,
        "max_position_embeddings": numbers.context_window,
        "rope_theta": numbers.rope_theta,
        "rms_norm_eps": numbers.rms_norm_eps,
        "tie_word_embeddings": numbers.tie_word_embeddings,
    }


def row(name: str) -> ModelRow:
    return read_toml(HERE / "models" / f"{name}.toml", ModelRow)


class Container:
    """The stand-ins, and how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "a cache"
        bin_folder = folder / "bin"
        bin_folder.mkdir(parents=True)
        for name in ("env", "hf", "python3", "trtllm-build", "nvidia-smi"):
            (bin_folder / name).write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
            (bin_folder / name).chmod(0o755)
        rows = [row("llama-3.1-8b-instruct"), row("llama-3.2-1b-instruct")]
        configs = {each.checkpoint.repo: config_of(each) for each in rows if each.checkpoint}
        (folder / "configs.json").write_text(json.dumps(configs))
        self.say("NVIDIA L4, 8.9, 23034")

    def say(self, gpus: str) -> None:
        (self.folder / "gpus").write_text(
            f"{gpus}, {gpus.rpartition(', ')[2]}, 590.44.01\n" if "," in gpus else f"{gpus}\n"
        )

    @property
    def calls(self) -> list[str]:
        """The commands since the last look, by name and first word."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line.split()[0] for line in lines]

    def build(self, target: TargetRow, models: dict[str, AnyModelRow], name: str = "out") -> str | None:
        return build(target, models, self.folder / name, cache=self.cache, progress=quiet)


@contextmanager
def quiet(step: str) -> Iterator[None]:
    yield


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    for engine in ("wordpiece", "ocr"):
        monkeypatch.setitem(RECIPES, engine, Recipe((), ()))
    monkeypatch.setitem(RECIPES, "complexity_plan", RECIPES["plan"])  # without what is fetched
    made = Container(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    versions = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48", "onnxruntime-gpu": "1.23.2"}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: versions.get(package) or real(package))
    return made


# The commands of one engine, of one plan, and of a whole GPU target.
ENGINE = ["hf", "python3", "trtllm-build", "verify_engine"]
PLAN = ["onnx_graph", "tensorrt_plan", "verify_plan"]
ALL = ENGINE * 2 + PLAN * 4


def test_a_target_is_built_once(container: Container) -> None:
    target, models = vary("l4")
    assert container.build(target, models) == "not built yet"
    assert container.calls == ALL
    engine = container.folder / "out/model_repository/llm_large/1"
    assert {path.name for path in engine.iterdir()} == {"engine", "tokenizer"}
    assert {path.name for path in (engine / "engine").iterdir()} == {"config.json", "rank0.engine"}
    assert (engine / "tokenizer/chat_template.jinja").read_text() == "template"
    manifest = json.loads((container.folder / "out/manifest.json").read_text())
    assert manifest["tools"]["tensorrt_llm"] == "1.2.1"
    assert manifest["row"]["gpu"]["sm"] == "8.9"
    assert "model_repository/llm_large/1/engine/rank0.engine" in manifest["files"]
    assert "model_repository/ocr_detector/1/model.plan" in manifest["files"]
    assert manifest["verified"]["llm_large"] == {"token_agreement": 0.99}
    assert set(manifest["verified"]) == set(target.compiled)
    assert check_artifact(container.folder / "out").target == "l4"
    assert container.build(target, models) is None
    assert container.calls == []


def test_equal_inputs_give_an_equal_manifest_on_any_machine(container: Container, tmp_path: Path) -> None:
    target, models = vary("l4")
    container.build(target, models, "one")
    container.cache = tmp_path / "another cache"
    container.build(target, models, "two")
    assert (tmp_path / "one/manifest.json").read_bytes() == (tmp_path / "two/manifest.json").read_bytes()


def test_a_failing_command_is_told_and_the_next_build_goes_on_from_there(container: Container) -> None:
    target, models = vary("l4")
    (container.folder / "fail").write_text("trtllm-build")
    with pytest.raises(
        BuildError, match=r"engine-llama-3\.2-1b-instruct-fp8: exit code 3; .*\.log; its last lines:\nline"
    ) as caught:
        container.build(target, models)
    assert "CUDA out of memory" in str(caught.value)
    assert container.calls == ENGINE[:3]
    assert not (container.folder / "out").exists()
    (container.folder / "fail").unlink()
    container.build(target, models)
    assert container.calls == ALL[2:]


def test_what_a_killed_command_left_is_not_taken_for_finished(container: Container) -> None:
    target, models = vary("l4")
    made = trtllm.fetch_checkpoint(row("llama-3.2-1b-instruct").checkpoint)  # type: ignore[arg-type]
    scratch = made.path(container.cache).with_name(f".{made.path(container.cache).name}.tmp")
    scratch.mkdir(parents=True)
    (scratch / "half").write_text("half a file")
    container.build(target, models)
    assert container.calls == ALL
    assert not (made.path(container.cache) / "half").exists()


def test_a_command_that_leaves_out_a_file_has_failed(container: Container) -> None:
    target, models = alone("l4", tp_size=1)
    stand_in = container.folder / "bin" / "python3"
    stand_in.write_text(stand_in.read_text().replace("rank{rank}.safetensors", "other{rank}"))
    with pytest.raises(BuildError, match=r"the command succeeded, but wrote no rank0\.safetensors; see "):
        container.build(target, models)


def test_a_changed_limit_makes_the_engine_anew_and_nothing_else(container: Container) -> None:
    container.build(*vary("l4"))
    assert container.calls == ALL
    target, models = vary("l4", settings={"max_batch_size": 16})
    said = explain(target, models, container.folder / "out", container.cache)
    assert "rows, sources, code or tools changed" in said
    assert said.count("skipped: ") == len(ALL) - 2
    assert "the one there has --max_batch_size 32, not --max_batch_size 16" in said
    assert container.build(target, models) == "rows, sources, code or tools changed"
    assert container.calls == ["trtllm-build", "verify_engine"]
    assert "up to date, so no step runs" in explain(target, models, container.folder / "out", container.cache)
    said = explain(target, models, container.folder / "out", container.cache, force=True)
    assert "asked for by --force" in said
    assert "up to date" not in said
    too_long = vary("l4", kv_cache_share=0.001)
    with pytest.raises(BuildError, match="fewer than one sequence"):
        explain(*too_long, container.folder / "out", container.cache)


def test_prices_make_nothing_anew(container: Container) -> None:
    target, models = vary("l4")
    container.build(target, models)
    assert container.calls == ALL
    dearer = target.model_copy(update={"description": "another"})
    assert container.build(dearer, models) == "rows, sources, code or tools changed"
    assert container.calls == []


def test_the_script_does_what_the_build_does(container: Container) -> None:
    target, models = vary("l4")
    script = list_commands(target, models, container.cache)
    for _ in range(2):
        done = subprocess.run(["bash", "-c", script], cwd=container.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert container.calls == ALL
    container.build(target, models)
    assert container.calls == []


def test_the_script_stops_at_a_failure_and_can_be_run_again(container: Container) -> None:
    script = list_commands(*vary("l4"), container.cache)
    (container.folder / "fail").write_text("python3")
    assert subprocess.run(["bash", "-c", script], capture_output=True, timeout=60).returncode == 3
    assert container.calls == ["hf", "python3"]
    (container.folder / "fail").unlink()
    assert subprocess.run(["bash", "-c", script], capture_output=True, timeout=60).returncode == 0
    assert container.calls == ALL[1:]


@given(st.text(st.characters(exclude_characters="/\0\n\r", exclude_categories=["Cs"]), min_size=1))
def test_a_shell_reads_the_script_s_words_as_they_are(name: str) -> None:
    cache = Path("/") / name
    product = trtllm.fetch_checkpoint(Checkpoint(repo="some/one", revision="0" * 40))
    (line,) = [line for line in as_script([product], cache).split("\n") if line.startswith("  hf ")]
    assert shlex.split(line) == product.command(cache)


def test_one_model_can_be_made_ahead(container: Container) -> None:
    target, models = vary("l4")
    make_products(target, models, container.cache, quiet, "llm_large")
    assert container.calls == ENGINE
    make_products(target, models, container.cache, quiet, "embedding_encoder")
    assert container.calls == PLAN
    assert not (container.folder / "out").exists()
    container.build(target, models)
    assert container.calls == ENGINE + PLAN * 3


def test_what_happens_to_an_artifact_does_not_reach_the_cache(container: Container) -> None:
    target, models = vary("l4")
    container.build(target, models)
    assert container.calls == ALL
    engine = container.folder / "out/model_repository/llm_large/1/engine/rank0.engine"
    with engine.open("w") as file:  # in place, as a failing disk would
        file.write("half")
    assert (
        container.build(target, models) == "model_repository/llm_large/1/engine/rank0.engine is damaged, missing or new"
    )
    assert engine.read_text() == "engine"
    assert container.calls == []


def test_the_llm_api_model(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = container.folder / "nvidia"
    nvidia.mkdir()
    for name in ("model.py", "helpers.py", "model.yaml"):
        (nvidia / name).write_text(f"# NVIDIA's {name}")
    monkeypatch.setattr(trtllm, "LLMAPI_MODEL", str(nvidia))
    target, models = alone("l4", {"model": "llama-3.2-1b-instruct"}, runtime="llmapi", precision="bf16")
    container.build(target, models)
    assert container.calls == ["hf", *PLAN * 4]
    folder = container.folder / "out/model_repository/llm_large/1"
    assert {path.name for path in folder.iterdir()} == {
        "model.py",
        "helpers.py",
        "model.yaml",
        "checkpoint",
        "tokenizer",
    }
    assert (folder / "model.py").read_text() == "# NVIDIA's model.py"
    assert "decoupled: true" in (folder / "model.yaml").read_text()
    assert not (folder / "checkpoint/.cache").exists()


def test_a_rendered_artifact_is_no_finished_one(container: Container) -> None:
    target, models = vary("l4")
    out = container.folder / "out"
    assert build(target, models, out, cache=container.cache, progress=quiet, render_only=True) == "not built yet"
    assert json.loads((out / "manifest.json").read_text())["render_only"] is True
    assert container.calls == []
    assert container.build(target, models) == "rows, sources, code or tools changed"


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (
            "NVIDIA A10G, 8.6, 23028",
            r"gpu\.name is 'NVIDIA L4'; GPU 0 here says 'NVIDIA A10G'; run the build on a machine with 1 x",
        ),
        ("NVIDIA L4, 8.6, 23034", r"gpu\.sm is '8\.9'; GPU 0 here says '8\.6'"),
        ("NVIDIA L4, 8.9, 11517", r"gpu\.memory_mib is 23034; GPU 0 here has 11517"),
        ("", r"no NVIDIA GPU found here \(nvidia-smi names none\); run the build on a machine with 1 x"),
        ("No devices were found", r"no NVIDIA GPU found here"),
        (
            "NVIDIA L4, 8.9, [Insufficient Permissions]",
            r"gpu\.memory_mib is 23034; nvidia-smi does not tell that of GPU 0",
        ),
    ],
)
def test_another_machine_is_told(container: Container, gpus: str, message: str) -> None:
    container.say(gpus)
    with pytest.raises(BuildError, match=message):
        container.build(*vary("l4"))
    assert container.calls == []


def test_too_few_gpus_are_told(container: Container) -> None:
    with pytest.raises(BuildError, match=r"gpu\.count is 2; this machine has 1"):
        container.build(*vary("h100"))


def test_a_command_ends_with_its_build(tmp_path: Path) -> None:
    product = "Product('endless', ('sh', '-c', 'echo $$ > pid; exec sleep 600'), {}, ())"
    script = f"from pathlib import Path; from build.products import Product; {product}.make(Path('.'))"
    build = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    file = tmp_path / "products" / "pid"
    give_up_s = time.monotonic() + 30
    try:
        while not file.exists() or not file.read_text().strip():
            assert build.poll() is None and time.monotonic() < give_up_s
            time.sleep(0.02)
        build.kill()
        build.wait()
        # The command has the lock as well, so whoever comes next gets it when nobody writes any more.
        with next((tmp_path / "products").glob(".endless-*.lock")).open("w") as held:
            while True:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    assert time.monotonic() < give_up_s
                    time.sleep(0.02)
        status = Path("/proc", file.read_text().strip(), "stat")
        assert not status.exists() or status.read_text().rpartition(") ")[2][0] == "Z"
    finally:
        build.kill()
        build.wait()


def test_another_version_is_told(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "1.1.0")
    with pytest.raises(
        BuildError, match=r"container\.tensorrt_llm is 1\.2\.1; installed here is 1\.1\.0; run the build on"
    ):
        container.build(*vary("l4"))


def test_a_machine_without_a_gpu_is_told() -> None:
    target = load_target("h100")
    assert target.gpu is not None and target.container is not None
    if os.access("/usr/bin/nvidia-smi", os.X_OK):
        pytest.skip("this machine has a GPU")
    with pytest.raises(BuildError, match="no NVIDIA GPU found here .*--dry-run needs none"):
        check_machine(target.gpu, target.container)


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Path]:
    """Writes an engine folder of target l4's llm_large with some of its configuration changed."""

    def write(version: str = "1.2.1", num_ranks: int = 1, **limits: int) -> Path:
        built = {"max_batch_size": 32, "max_input_len": 6144, "max_seq_len": 8192, "max_num_tokens": 4096} | limits
        (tmp_path / "config.json").write_text(json.dumps({"version": version, "build_config": built}))
        for rank in range(num_ranks):
            (tmp_path / f"rank{rank}.engine").touch()
        return tmp_path

    return write


def check(folder: Path) -> None:
    target = load_target("l4")
    assert target.container is not None
    trtllm.check_engine(folder, *target.trtllm_engines["llm_large"], target.container)


def test_an_engine_as_its_row_says_passes(engine: Callable[..., Path]) -> None:
    check(engine())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.1.0"}, r"built with TensorRT-LLM 1\.1\.0, the row says 1\.2\.1"),
        ({"max_batch_size": 8}, r"build_config\.max_batch_size is 8, the row says 32"),
        ({"max_seq_len": 2048}, r"build_config\.max_seq_len is 2048, the row says 8192"),
        ({"num_ranks": 2}, r"2 files rank\*\.engine, the row says 1 GPUs"),
    ],
)
def test_an_engine_unlike_its_row_is_told(engine: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check(engine(**changes))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": "1.2.1", "build_config": {}}'])
def test_an_engine_without_a_configuration_is_told(tmp_path: Path, text: str) -> None:
    # The backend's own words would be a trace of its JSON parser.
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BuildError, match=r"config\.json: not the configuration of an engine"):
        check(tmp_path)


# --- the tokenizer -----------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, settings: dict[str, Any], **config: Any) -> ModelRow:
    model = row("qwen2.5-7b-instruct")
    (folder / "config.json").write_text(json.dumps(config_of(model) | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize(
    ("settings", "file", "template"),
    [
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]}, None, "a"),
        ({"chat_template": "old"}, "new", "new"),
    ],
)
def test_the_chat_template_is_found(tmp_path: Path, settings: dict[str, Any], file: str | None, template: str) -> None:
    model = write_checkpoint(tmp_path, settings)
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    copy_tokenizer(tmp_path, model, tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "chat_template.jinja").read_text() == template


def test_a_checkpoint_without_a_template_is_told(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, {})
    with pytest.raises(BuildError, match="no chat template, neither chat_template.jinja nor in tokenizer_config.json"):
        copy_tokenizer(tmp_path, model, tmp_path / "tokenizer")


def test_the_checkpoint_of_another_model_is_told(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, {"chat_template": "one"}, num_hidden_layers=36)
    with pytest.raises(
        BuildError, match=r"num_hidden_layers is 36, the row of 'qwen2\.5-7b-instruct' says 28; fix the row"
    ):
        copy_tokenizer(tmp_path, model, tmp_path / "tokenizer")


def test_the_models_of_a_target_are_those_that_it_names() -> None:
    others = {"all-minilm-l6-v2", "complexity", "pp-ocrv6-small"}
    assert set(load_models(load_target("l4"))) == {"llama-3.1-8b-instruct", "llama-3.2-1b-instruct", *others}
