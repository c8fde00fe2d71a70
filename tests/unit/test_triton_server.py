"""Finding a Triton, its command line and environment, and the checks on artifact and ports."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
from pathlib import Path

import pytest

from orchestrator.triton import server
from orchestrator.triton.artifact import check_artifact
from orchestrator.triton.front import FrontOptions
from orchestrator.triton.ports import LOOPBACK, Ports, settle
from orchestrator.triton.process import StartError
from orchestrator.triton.server import TritonInstall, find_triton, gather_backends, launch

THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
NOWHERE = Path("/nonexistent")


def make_install(root: Path, python: str = THIS_PYTHON) -> Path:
    """A folder laid out as /opt/tritonserver is, its stub linked with `python`'s libpython."""
    binary = root / "bin" / "tritonserver"
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    for file in (binary, stub):
        file.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    stub.write_bytes(b"\x7fELF\0libpython" + python.encode() + b".so.1.0\0")
    return binary


def make_package(root: Path, monkeypatch: pytest.MonkeyPatch, stubs: tuple[str, ...] = (THIS_PYTHON,)) -> Path:
    """A stand-in for nvidia-pytriton whose import would fail."""
    package = root / "pytriton" / "tritonserver"
    for file in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        *(f"python_backend_stubs/{version}/triton_python_backend_stub" for version in stubs),
    ):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(Path(file).parent.name)
    (root / "pytriton" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.7.0")
    return package


# --- which Triton ------------------------------------------------------------------------------------------


def test_a_triton_in_path_comes_first(tmp_path: Path) -> None:
    in_path, container = make_install(tmp_path / "a"), tmp_path / "b"
    make_install(container)
    assert find_triton(str(in_path.parent), container) == TritonInstall(in_path, "PATH")


def test_then_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path / "site", monkeypatch)
    container = tmp_path / "opt"
    binary = make_install(container)
    assert find_triton("", container) == TritonInstall(binary, str(container))


def test_then_the_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path, monkeypatch)
    found = find_triton("", NOWHERE)
    assert found == TritonInstall(package / "bin" / "tritonserver", "nvidia-pytriton 0.7.0", package)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"no Triton server found: .*\n.*fix: pip install"):
        find_triton("", NOWHERE)


def test_wrong_python_for_an_installed_triton(tmp_path: Path) -> None:
    make_install(tmp_path, python="3.8")
    with pytest.raises(StartError, match=rf"wrong Python: this is {re.escape(THIS_PYTHON)}.* is for 3\.8\nfix: "):
        find_triton("", tmp_path)


def test_wrong_python_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, monkeypatch, stubs=("3.8", "3.9"))
    with pytest.raises(StartError, match=r"wrong Python.* is for 3\.8, 3\.9"):
        find_triton("", NOWHERE)


# --- how it is started -------------------------------------------------------------------------------------


def launch_at(
    tmp_path: Path, install: TritonInstall, environ: dict[str, str], more: Path | None = None
) -> server.TritonLaunch:
    return launch(
        install,
        model_repository=tmp_path / "model_repository",
        ports=Ports(1, 2, 3, 4, 5),
        backends=gather_backends(install, more, tmp_path / "backends"),
        shm_prefix="prefix-",
        inference_key="answers",
        control_key="secret",
        exit_timeout_s=7,
        environ=environ,
    )


def test_command_line(tmp_path: Path) -> None:
    launched = launch_at(tmp_path, TritonInstall(Path("/t/tritonserver"), "PATH"), {"PATH": "/bin"})
    restricted = (
        "inference:x-triton-realtime-inference-key=answers",
        "model-repository,model-config,shared-memory,trace,logging,statistics:x-triton-realtime-key=secret",
    )
    assert launched.command[0] == "/t/tritonserver"
    assert {
        f"--model-repository={tmp_path}/model_repository",
        "--model-control-mode=none",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--http-port=2",
        "--grpc-port=3",
        "--metrics-port=4",
        *(f"--http-restricted-api={apis}" for apis in restricted),
        *(f"--grpc-restricted-protocol={apis}" for apis in restricted),
        "--backend-config=python,shm-region-prefix-name=prefix-",
        "--exit-timeout-secs=7",
    } < set(launched.command)
    assert launched.env == {
        "PATH": f"{Path(sys.executable).parent}:/bin",
        "PYTHONUNBUFFERED": "1",
        "TRITON_REALTIME_GRPC_URL": "127.0.0.1:3",
        "TRITON_REALTIME_INFERENCE_KEY": "answers",
    }


def test_the_package_gets_its_libraries_and_this_pythons_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path, monkeypatch, stubs=(THIS_PYTHON, "3.8"))
    monkeypatch.setattr(server, "_libpython_folder", lambda: Path("/python/lib"))
    install = TritonInstall(package / "bin" / "tritonserver", "", package)
    for _ in range(2):  # a run-dir is used again
        launched = launch_at(tmp_path, install, {"LD_LIBRARY_PATH": "/mine"})
    assert launched.env["LD_LIBRARY_PATH"] == f"{tmp_path}/nvidia_pytriton.libs:/python/lib:/mine"
    assert f"--backend-directory={tmp_path}/backends" in launched.command
    files = {file.name: file.read_text() for file in (tmp_path / "backends" / "python").iterdir()}
    assert files == {
        "libtriton_python.so": "python",
        "triton_python_backend_utils.py": "python",
        "triton_python_backend_stub": THIS_PYTHON,
    }


@pytest.mark.parametrize("is_package", [False, True])
def test_further_backends_stand_beside_the_installation_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_package: bool
) -> None:
    monkeypatch.setattr(server, "_libpython_folder", lambda: None)
    if is_package:
        package = make_package(tmp_path, monkeypatch)
        install = TritonInstall(package / "bin" / "tritonserver", "", package)
    else:
        install = TritonInstall(make_install(tmp_path / "opt"), "PATH")
    for name in ("tensorrt", "onnxruntime"):
        (tmp_path / "more" / name).mkdir(parents=True)
        (tmp_path / "more" / name / f"libtriton_{name}.so").touch()
    for _ in range(2):
        launched = launch_at(tmp_path, install, {}, tmp_path / "more")
    assert f"--backend-directory={tmp_path}/backends" in launched.command
    assert {path.name for path in (tmp_path / "backends").iterdir()} == {"python", "tensorrt", "onnxruntime"}
    assert (tmp_path / "backends" / "tensorrt" / "libtriton_tensorrt.so").is_file()
    assert (tmp_path / "backends" / "python" / "triton_python_backend_stub").is_file()
    assert launched.folder == tmp_path


def test_no_empty_search_path_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader reads an empty entry as the current directory."""
    package = make_package(tmp_path, monkeypatch)
    monkeypatch.setattr(server, "_libpython_folder", lambda: None)
    env = launch_at(tmp_path, TritonInstall(package / "bin" / "tritonserver", "", package), {}).env
    assert "" not in env["LD_LIBRARY_PATH"].split(":") + env["PATH"].split(":")


def test_no_libpython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.sysconfig, "get_config_var", lambda name: "/nonexistent")
    monkeypatch.setattr(server, "find_library", lambda name: None)
    with pytest.raises(StartError, match=r"libpython3\.\d+\.so\.1\.0 not found.*\nfix: apt-get install libpython3"):
        server._libpython_folder()


@pytest.mark.parametrize("name", ["authorization", "X-Request-Id", "CACHE-CONTROL", "traceparent", "x-deadline-ms"])
def test_forwarded_headers(name: str) -> None:
    assert re.search(server.HEADER_PATTERN, name)


@pytest.mark.parametrize(
    "name", ["cookie", "xauthorization", "authorization2", "x-request-id-x", "proxy-authorization"]
)
def test_headers_that_stay_outside(name: str) -> None:
    assert not re.search(server.HEADER_PATTERN, name)


# --- artifact ----------------------------------------------------------------------------------------------


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    root = tmp_path / "artifact"
    files = {"tiers.toml": b"tiers", "model_repository/m/1/model.py": b"model"}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    entries = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)} for name, content in files.items()
    }
    manifest = {"schema": 1, "target": "cpu", "row": {}, "files": entries}
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def test_a_whole_artifact(artifact: Path) -> None:
    caches = artifact / "model_repository" / "m" / "1" / "__pycache__"
    caches.mkdir()
    (caches / "model.cpython-311.pyc").touch()
    checked = check_artifact(artifact)
    assert (checked.target, checked.model_repository) == ("cpu", artifact / "model_repository")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "tiers.toml").unlink(), "/tiers.toml: in manifest.json, but missing"),
        (lambda root: (root / "tiers.toml").write_bytes(b"tierz"), "/tiers.toml: changed since the build"),
        (lambda root: (root / "tiers.toml").write_bytes(b"tiers+"), "/tiers.toml: changed since the build"),
        (
            lambda root: (root / "model_repository" / "x.py").touch(),
            "/model_repository/x.py: not in manifest.json",
        ),
    ],
)
def test_a_damaged_artifact(artifact: Path, damage: object, message: str) -> None:
    damage(artifact)  # type: ignore[operator]
    with pytest.raises(StartError, match=re.escape(message)) as caught:
        check_artifact(artifact)
    assert re.search("\nfix: ((copy it again|rm \\S+), or )?python -m build --target cpu --force$", str(caught.value))


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no finished artifact here .*\nfix: python -m build --target cpu$"):
        check_artifact(tmp_path / "nothing")
    with pytest.raises(StartError, match=r"no finished artifact here .*\nfix: python -m build --target h100$"):
        check_artifact(tmp_path / "artifacts" / "h100")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"schema": 2, "target": "cpu", "files": {}}', r"schema: Input should be 1 \(got 2\)"),
        ('{"schema": 1, "files": {"a": {"bytes": 1, "sha256": ""}}}', "target: Field required"),
    ],
)
def test_a_broken_manifest(tmp_path: Path, manifest: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(StartError, match=message):
        check_artifact(tmp_path)


# --- ports -------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_zero_becomes_a_free_port() -> None:
    ports = settle(Ports(0, 0, 0, 0, 0), LOOPBACK)
    assert len(set(ports)) == 5
    assert all(20000 <= port < 32768 for port in ports)


def test_a_taken_port_is_named(taken: int) -> None:
    with pytest.raises(
        StartError, match=rf"--triton-grpc-port {taken}: cannot listen .*\nfix: .*another --triton-grpc"
    ):
        settle(Ports(0, 0, taken, 0, 0), LOOPBACK)


def test_a_port_given_twice() -> None:
    (port, *_) = settle(Ports(0, 0, 0, 0, 0), LOOPBACK)
    with pytest.raises(StartError, match=f"--triton-http-port {port}: the same port is given twice"):
        settle(Ports(port, port, 0, 0, 0), LOOPBACK)


def test_an_unknown_host() -> None:
    with pytest.raises(StartError, match=r"--port 8080: cannot listen on 192\.0\.2\.1:8080"):
        settle(Ports(8080, 0, 0, 0, 0), "192.0.2.1")  # TEST-NET-1: nobody's address
    with pytest.raises(StartError, match=r"--grpc-front-port 9001: cannot listen on 192\.0\.2\.1:9001"):
        settle(Ports(0, 0, 0, 0, 9001), LOOPBACK, "192.0.2.1")


# --- the gRPC front ----------------------------------------------------------------------------------------


def test_the_fronts_command_line() -> None:
    options = FrontOptions("0.0.0.0", Path("c.pem"), Path("k.pem"))
    command = options.command(Path("a"), Ports(1, 2, 3, 4, 5), 6.5, Path("r.json"))
    assert command[1:] == (
        *(
            "-m",
            "orchestrator.grpc_front",
            "--artifact",
            "a",
            "--replicas",
            "r.json",
            "--host",
            "0.0.0.0",
            "--port",
            "5",
        ),
        *("--drain-timeout-s", "7", "--cert", "c.pem", "--key", "k.pem"),
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback_without_tls_is_warned_of(host: str) -> None:
    assert "without TLS" in (FrontOptions(host).warning or "")
    assert FrontOptions(host, Path("c"), Path("k")).warning is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_on_loopback_there_is_nothing_to_warn_of(host: str) -> None:
    FrontOptions(host).check()
    assert FrontOptions(host).warning is None


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    for options, message in (
        (FrontOptions(cert=tmp_path / "c"), "--grpc-front-cert needs --grpc-front-key"),
        (FrontOptions(key=tmp_path / "k"), "--grpc-front-key needs --grpc-front-cert"),
        (FrontOptions(cert=tmp_path / "c", key=tmp_path / "k"), r"--grpc-front-cert .*: .*No such file.*\nfix: "),
    ):
        with pytest.raises(StartError, match=message):
            options.check()


def test_what_is_no_certificate(tmp_path: Path) -> None:
    for name in ("c", "k"):
        (tmp_path / name).write_text("no PEM")
    with pytest.raises(StartError, match=r"--grpc-front-key .*: .*PEM.*\nfix: a certificate chain"):
        FrontOptions(cert=tmp_path / "c", key=tmp_path / "k").check()


@pytest.mark.parametrize(("name", "is_linked"), [("plain-1.2_x", False), ("with space", True), ("é;$(x)", True)])
def test_a_path_that_a_shell_would_not_take_is_linked(tmp_path: Path, name: str, is_linked: bool) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "file").touch()
    with server.shell_safe(folder) as path:
        assert (path != folder) is is_linked
        assert re.fullmatch(r"[\w/.-]+", str(path), re.ASCII)
        assert (path / "file").exists()
    assert path.exists() is not is_linked
    assert (folder / "file").exists()
