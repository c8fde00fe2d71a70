"""The project's own rules: no tool skips the folder `build`, the wheel is one package, imports point down."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the configuration, with a `build` folder in which every tool has something to find."""
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("orchestrator", "build", "perf"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "build" / "planted.py").write_text('import os\nsize: int = "large"\n')
    (tmp_path / "tests" / "build").mkdir(parents=True)
    (tmp_path / "tests" / "build" / "test_planted.py").write_text("def test_planted():\n    pass\n")
    return tmp_path


# --- no tool skips `build` ---------------------------------------------------------------------------------


def test_ruff_checks_the_build_folder(checkout: Path) -> None:
    done = run(sys.executable, "-m", "ruff", "check", "--no-cache", cwd=checkout)
    assert done.returncode == 1
    assert "build/planted.py" in done.stdout
    assert "F401" in done.stdout


def test_ruff_formats_the_build_folder(checkout: Path) -> None:
    (checkout / "build" / "planted.py").write_text("x   =   1\n")
    done = run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", cwd=checkout)
    assert done.returncode == 1
    assert "build/planted.py" in done.stdout


def test_mypy_checks_the_build_folder(checkout: Path) -> None:
    done = run(sys.executable, "-m", "mypy", "--cache-dir=/dev/null", cwd=checkout)
    assert done.returncode == 1
    assert "build/planted.py:2: error" in done.stdout


def test_pytest_collects_from_a_build_folder(checkout: Path) -> None:
    done = run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=checkout)
    assert "tests/build/test_planted.py::test_planted" in done.stdout


def test_git_does_not_ignore_the_build_folder(checkout: Path) -> None:
    run("git", "init", "--quiet", cwd=checkout)
    assert run("git", "check-ignore", "build/planted.py", "tests/build/test_planted.py", cwd=checkout).stdout == ""
    ignored = run("git", "check-ignore", "artifacts/cpu/manifest.json", ".run/8080/serve.json", cwd=checkout).stdout
    assert ignored.split() == ["artifacts/cpu/manifest.json", ".run/8080/serve.json"]


# --- the wheel ---------------------------------------------------------------------------------------------


def test_the_wheel_holds_orchestrator_alone(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"orchestrator"}
    assert "orchestrator/py.typed" in names


# --- dependencies point down -------------------------------------------------------------------------------

# From the bottom up; a module may import from lower layers, and from its own folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("contracts",),
    ("errors", "stages", "row_faults"),
    ("grammars",),
    ("regexes",),
    ("schemas",),
    ("config", "wire", "call", "files", "unread"),
    ("inference_key", "manifest", "redis_address", "instrumentation", "replica_set", "local_socket"),
    ("doctor",),
    ("streaming", "infer_streams", "readiness", "routing", "onnx_session", "vision"),
    ("request", "engines", "limits", "quality"),
    ("answer", "text_engine", "latencies", "replicas", "token_lines"),
    ("generation", "embedding", "cache", "safety", "money", "voice"),
    ("cloud", "compression", "flight", "timeouts", "tracing"),
    ("backend",),
    ("dispatch", "afterwards"),
    ("pipeline",),
    ("triton", "gateway", "grpc_front", "chat", "talk"),
    ("__main__",),
)
LAYER_OF = {part: level for level, layer in enumerate(LAYERS) for part in layer}

# A heavy library is imported by the one place that wraps it.
HEAVY = {
    "PIL": ("vision/images.py",),
    "cv2": ("vision/", "triton/ocr_model.py"),
    "faster_whisper": ("voice/whisper.py",),
    "piper": (),  # GPL-3.0: model_repository/tts alone
    "gguf": (),
    "onnx": (),
    "onnxruntime": ("onnx_session.py",),
    "h2": ("cloud/http2.py",),
    "httpcore": ("cloud/http2.py",),
    "httpx": ("cloud/client.py",),
    "openvino": ("engines/openvino.py", "engines/guides.py"),
    "openvino_genai": ("engines/openvino.py", "engines/guides.py"),
    "prometheus_client": ("gateway/",),
    "opentelemetry": ("tracing.py",),
    "pytriton": (),
    "redis": ("cache/redis_store.py", "cache/guarded_store.py", "limits/redis_ledger.py", "quality/redis_store.py"),
    "soundfile": ("voice/recording.py",),
    "soxr": ("voice/recording.py", "voice/pcm.py", "gateway/speech.py"),
    "snowballstemmer": ("cache/lexicon/",),
    "starlette": ("gateway/",),
    "torch": (),
    "triton_python_backend_utils": ("triton/",),
    "usearch": ("cache/index.py",),
    "uvicorn": ("gateway/",),
    "vllm": ("engines/vllm.py",),
    "websockets": ("talk.py",),
}

MODULES = sorted((ROOT / "orchestrator").rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether at module level) for each import that runs; not those for types alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) not in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [""] if node.module != "orchestrator" else [f".{alias.name}" for alias in node.names]
            for name in names:
                yield f"{node.module}{name}", node.lineno, id(node) not in inside


def part_of(module: str) -> str:
    """The part of the package: `streaming` of `orchestrator.streaming.stops`."""
    return f"{module}.".split(".")[1]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_dependencies_point_down(path: Path) -> None:
    own = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own == "__init__":
        assert not list(imports(path)), "the package itself imports nothing"
        return
    assert own in LAYER_OF, f"{own}: give it a place in LAYERS"
    for module, line, at_top in imports(path):
        if not module.startswith("orchestrator"):
            continue
        other = part_of(module)
        # A swap point's factory loads what was chosen, so that the others' libraries need not be installed.
        assert at_top or own == other in ("cache", "cloud", "engines", "limits", "quality"), (
            f"{path}:{line}: an import inside a function can hide a ring"
        )
        if other in ("", own, "__version__"):
            continue
        assert LAYER_OF[other] < LAYER_OF[own], f"{path}:{line}: {own} must not import {other} (same layer or above)"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_heavy_libraries_stay_in_their_place(path: Path) -> None:
    name = path.relative_to(ROOT / "orchestrator").as_posix()
    for module, line, _ in imports(path):
        allowed = HEAVY.get(module.split(".")[0])
        assert allowed is None or name.startswith(allowed), f"{path}:{line}: {module} belongs to {allowed}"
