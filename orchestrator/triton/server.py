"""Which Triton runs here, and with which command line and environment.

Looked for in this order: `tritonserver` in PATH, /opt/tritonserver (the container), nvidia-pytriton (of which
only the server inside is used: it is never imported).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contracts import FORWARDED_HEADERS, GRPC_URL_VARIABLE
from orchestrator.inference_key import INFERENCE_KEY_HEADER, INFERENCE_KEY_VARIABLE
from orchestrator.triton.ports import LOOPBACK, Ports
from orchestrator.triton.process import StartError

_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_STUB = "triton_python_backend_stub"

# Open: health and metadata. Inference by Triton passes keys and quotas by; over HTTP any web page could ask for it, and
# Triton 2.51 crashes on bodies of many chunks before it reads a word of them. All else can change what the server runs
# or watch what it does: nobody of ours needs it, so its key is another one, which only Triton has. Both protocols get
# both, because restricting one leaves the other open.
CONTROL_APIS = ("model-repository", "model-config", "shared-memory", "trace", "logging", "statistics")
_CONTROL_KEY_HEADER = "x-triton-realtime-key"

# Exactly our headers: Triton matches anywhere in the name (RE2 PartialMatch), hence the anchors.
HEADER_PATTERN = f"(?i)^({'|'.join(FORWARDED_HEADERS)})$"

# A stub that loads an LLM answers its first health check late on a busy machine, and vLLM compiles for a minute or two
# before; Triton's default is 30 s. Whatever takes longer, `serve` does not wait for either.
_STUB_TIMEOUT_S = 600


@dataclass(frozen=True)
class TritonInstall:
    """A Triton server on this machine.

    `source` says where it was found. `package` is the folder of nvidia-pytriton's server, whose libraries and
    stub need a hand (see `launch`); None for an installation that is complete by itself.
    """

    binary: Path
    source: str
    package: Path | None = None


@dataclass(frozen=True)
class TritonLaunch:
    """A command line, the whole environment and the folder to run it in. Never log `command`: it holds the keys.

    Triton's own children, which it cannot do without, are of this generation, counted from the command's.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path | None = None
    generations: int = 1


def find_triton(search_path: str, container: Path = Path("/opt/tritonserver")) -> TritonInstall:
    """The first Triton of the three places that can run Python models for this Python.

    Raises `StartError` when there is none, or when its Python backend is for another Python version.
    """
    if in_path := shutil.which("tritonserver", path=search_path):
        return _complete(Path(in_path).resolve(), "PATH")
    if (binary := container / "bin" / "tritonserver").is_file():
        return _complete(binary, str(container))
    # The spec of the parent alone: looking for `pytriton.tritonserver` would import pytriton.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise StartError(
            f"no Triton server found: neither `tritonserver` in PATH, nor {container}, nor nvidia-pytriton "
            f"in {sys.prefix}\nfix: pip install -c constraints.txt -e '.[cpu,gateway]', or Triton's container"
        )
    package = Path(spec.submodule_search_locations[0]) / "tritonserver"
    source = f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}"
    stubs = {stub.parent.name for stub in package.glob(f"python_backend_stubs/*/{_STUB}")}
    if _PYTHON not in stubs:
        raise _wrong_python(source, ", ".join(sorted(stubs)))
    return TritonInstall(package / "bin" / "tritonserver", source, package)


def launch(
    install: TritonInstall,
    *,
    model_repository: Path,
    ports: Ports,
    backends: Path | None,
    shm_prefix: str,
    inference_key: str,
    control_key: str,
    exit_timeout_s: int,
    environ: Mapping[str, str],
) -> TritonLaunch:
    """How to start `install` on loopback, serving `model_repository`, all models at boot and none after it.

    It runs in the artifact, from which the engines' paths are relative. `backends` is what `gather_backends` returned.

    Neither `backends` nor `model_repository` may have characters that mean something to a shell (`shell_safe`).
    `shm_prefix` begins the names of everything it puts into /dev/shm.
    The keys are what callers of inference and of the control APIs must send; the models find the first in their
    environment. Triton takes keys on its command line alone, which all users of the machine can read
    (/proc/<pid>/cmdline): they keep out who reaches the port, not who is logged in.
    Raises `StartError` when the Python stub's libpython cannot be found.
    """
    restricted = (
        f"inference:{INFERENCE_KEY_HEADER}={inference_key}",
        f"{','.join(CONTROL_APIS)}:{_CONTROL_KEY_HEADER}={control_key}",
    )
    command = [
        str(install.binary),
        f"--model-repository={model_repository}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",  # ours are complete; completing starts every Python stub twice
        f"--http-address={LOOPBACK}",
        f"--http-port={ports.triton_http}",
        f"--grpc-address={LOOPBACK}",
        f"--grpc-port={ports.triton_grpc}",
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={ports.triton_metrics}",
        f"--http-header-forward-pattern={HEADER_PATTERN}",
        f"--grpc-header-forward-pattern={HEADER_PATTERN}",
        *(f"--http-restricted-api={apis}" for apis in restricted),
        *(f"--grpc-restricted-protocol={apis}" for apis in restricted),
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT_S}",
        f"--exit-timeout-secs={exit_timeout_s}",
    ]
    # The Python stub runs isolated: it ignores PYTHONPATH and has the packages of the first python3 in PATH.
    env = dict(environ)
    env["PATH"] = _search_path(Path(sys.executable).parent, environ.get("PATH"))
    env["PYTHONUNBUFFERED"] = "1"
    env[INFERENCE_KEY_VARIABLE] = inference_key
    env[GRPC_URL_VARIABLE] = f"{LOOPBACK}:{ports.triton_grpc}"
    if backends is not None:
        command.append(f"--backend-directory={backends}")
    if install.package is not None:
        env["LD_LIBRARY_PATH"] = _search_path(*library_folders(install), environ.get("LD_LIBRARY_PATH"))
    return TritonLaunch(tuple(command), env, model_repository.parent)


def library_folders(install: TritonInstall) -> list[Path]:
    """Where the libraries are that it is linked with, beside the loader's own places.

    Raises `StartError` when the Python stub's libpython cannot be found.
    """
    if install.package is None:
        return []
    folders = (install.package.parents[1] / "nvidia_pytriton.libs", _libpython_folder())
    return [folder for folder in folders if folder is not None]


def find_backends(install: TritonInstall, more_backends: Path | None) -> dict[str, Path]:
    """The folder of each backend that `install` has, by name; those of `more_backends` come first."""
    root = install.package or install.binary.parent.parent
    folders = [root / "backends"] + ([] if more_backends is None else [more_backends])
    return {path.name: path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}


def gather_backends(install: TritonInstall, more_backends: Path | None, backends_dir: Path) -> Path | None:
    """One folder with all backends, made anew; None where the installation's own is that already.

    nvidia-pytriton keeps the Python backend's stubs apart. `more_backends` is a folder with a folder for each further
    backend, or another one in the place of the installation's. Nothing may run with what lay in `backends_dir` before.

    Links but for the Python backend: Triton refuses its library, for a backend written in Python, where a symbolic link
    takes it out of its folder.
    """
    if install.package is None and more_backends is None:
        return None
    if backends_dir.is_dir():
        shutil.rmtree(backends_dir)  # a run-dir is used again
    backends_dir.mkdir(parents=True)
    for name, backend in find_backends(install, more_backends).items():
        folder = backends_dir / name
        if name != "python":
            folder.symlink_to(backend.absolute())
            continue
        shutil.copytree(backend, folder, ignore=shutil.ignore_patterns("__pycache__"))
        if install.package is not None and not (folder / _STUB).exists():
            shutil.copy2(install.package / "python_backend_stubs" / _PYTHON / _STUB, folder)
    return backends_dir


@contextlib.contextmanager
def shell_safe(folder: Path) -> Iterator[Path]:
    """A path of `folder` that a shell takes as it is: a link to it while the block runs, if its own is none.

    Triton's Python backend starts its stub by a shell and does not quote.
    """
    if re.fullmatch(r"[\w@%+=:,./-]+", str(folder), re.ASCII):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="triton-realtime-") as place:
        link = Path(place, "link")
        link.symlink_to(folder)
        yield link


def _complete(binary: Path, source: str) -> TritonInstall:
    """An installation as NVIDIA lays it out; its only stub must be linked with this Python's libpython."""
    stub = binary.parent.parent / "backends" / "python" / _STUB
    if stub.is_file():
        linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
        if linked is not None and linked[1].decode() != _PYTHON:
            raise _wrong_python(f"Triton in {source}", linked[1].decode())
    return TritonInstall(binary, source)


def _wrong_python(source: str, supported: str) -> StartError:
    return StartError(
        f"wrong Python: this is {_PYTHON}, and the Python backend of {source} is for {supported}\n"
        "fix: run serve with such a Python (TRITON_REALTIME_PYTHON=python3.11 scripts/serve)"
    )


def _search_path(*parts: Path | str | None) -> str:
    """Folders joined with colons, without empty ones: to a loader an empty one is the current directory."""
    return ":".join(str(part) for part in parts if part)


def _libpython_folder() -> Path | None:
    """Where the stub's libpython lies; None when the dynamic loader finds it by itself."""
    library = f"libpython{_PYTHON}.so.1.0"
    folder = sysconfig.get_config_var("LIBDIR")
    if folder and (Path(folder) / library).exists():
        return Path(folder)
    if find_library(f"python{_PYTHON}"):
        return None
    raise StartError(
        f"{library} not found: Triton's Python stub is linked with it, and {sys.base_prefix} comes without\n"
        f"fix: apt-get install libpython{_PYTHON}, or a Python built with --enable-shared "
        "(TRITON_REALTIME_PYTHON chooses one for the scripts)"
    )
