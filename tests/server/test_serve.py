"""`python -m orchestrator serve` for real: Triton, gateway, ports, headers, stop, death."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from serving import PORTS
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.triton.server import CONTROL_APIS

READY_S = 60.0


class Server:
    """A `serve` of the tests' own, on free ports."""

    def __init__(self, artifact: Path, run_dir: Path, *flags: str) -> None:
        self.run_dir = run_dir
        ports = [f"--{name}=0" for name in PORTS]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "orchestrator",
                "serve",
                str(artifact),
                f"--run-dir={run_dir}",
                *ports,
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> dict[str, Any]:
        ready_file = self.run_dir / "serve.json"
        wait_for(lambda: ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return json.loads(ready_file.read_text())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Exit code, stdout and stderr after a signal."""
        self.process.send_signal(number)
        return self.outcome()

    def outcome(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=READY_S)
        return self.process.returncode, out, err

    def children(self) -> dict[str, int]:
        """The process ids of Triton, the gateway and the gRPC front."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        names = {"tritonserver": "triton", "orchestrator.gateway": "gateway", "orchestrator.grpc_front": "grpc_front"}
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in map(int, listed)}
        return {names[mark]: pid for pid, command in commands.items() for mark in names if mark in command}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, and ends those that a test has left."""
    servers: list[Server] = []

    def start(artifact: Path, *flags: str) -> Server:
        servers.append(Server(artifact, tmp_path / f"run{len(servers)}", *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def scripted(artifact: Callable[[str], Path]) -> Path:
    return artifact("scripted")


def wait_for(condition: Callable[[], bool], timeout_s: float = READY_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)


def get(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def our_shared_memory(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"triton-realtime-{pid}-*"))


def is_listening(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((str(address.hostname), int(address.port or 0))) == 0


def test_serve_and_stop(start: Callable[..., Server], scripted: Path) -> None:
    server = start(scripted)
    facts = server.wait_until_ready()
    assert facts["pid"] == server.process.pid
    assert get(facts["gateway_url"], "/ready")[0] == 200
    assert get(facts["triton_http_url"], "/v2/health/ready")[0] == 200
    assert "nv_" in get(facts["triton_metrics_url"], "/metrics")[1]
    assert all(Path(log).stat().st_size for log in facts["logs"].values())

    code, out, err = server.end()
    assert (code, err) == (0, "")
    assert facts["triton"] in out
    assert f"curl -N {facts['gateway_url']}/v1/chat/completions" in out
    assert not is_listening(facts["gateway_url"])
    assert not is_listening(facts["triton_http_url"])
    assert not (server.run_dir / "serve.json").exists()
    assert not our_shared_memory(server.process.pid)


def test_the_restricted_apis_are_closed_on_both_protocols(start: Callable[..., Server], scripted: Path) -> None:
    facts = start(scripted).wait_until_ready()
    for method, path in (
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/orchestrator/load"),
        ("GET", "/v2/models/orchestrator/config"),
        ("GET", "/v2/models/orchestrator/stats"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/logging"),
    ):
        status, body = get(facts["triton_http_url"], path, method)
        assert (status, "restricted" in body) == (403, True), path

    with grpc.insecure_channel(facts["triton_grpc_url"]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = {
            "model-repository": lambda: stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()),
            "model-config": lambda: stub.ModelConfig(service_pb2.ModelConfigRequest(name="orchestrator")),
            "statistics": lambda: stub.ModelStatistics(service_pb2.ModelStatisticsRequest()),
            "shared-memory": lambda: stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest()),
            "trace": lambda: stub.TraceSetting(service_pb2.TraceSettingRequest()),
            "logging": lambda: stub.LogSettings(service_pb2.LogSettingsRequest()),
        }
        assert set(calls) == set(CONTROL_APIS)
        for name, call in calls.items():
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert "restricted" in caught.value.details(), name
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    for log in facts["logs"].values():
        assert "x-triton-realtime-" not in Path(log).read_text()


def test_all_listen_on_loopback_alone(start: Callable[..., Server], scripted: Path) -> None:
    facts = start(scripted).wait_until_ready()
    ports = {
        int(facts[key].split(":")[-1].split("/")[0])
        for key in ("gateway_url", "grpc_front_url", "triton_http_url", "triton_grpc_url", "triton_metrics_url")
    }
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == "0A" and int(port, 16) in ports:
                listening.add(int(port, 16))
                assert address.endswith("0100007F"), line  # 127.0.0.1, or the same mapped into IPv6
    assert listening == ports


@pytest.mark.parametrize("victim", ["triton", "gateway", "grpc_front"])
def test_when_one_dies_the_others_stop(start: Callable[..., Server], scripted: Path, victim: str) -> None:
    server = start(scripted)
    facts = server.wait_until_ready()
    children = server.children()
    os.kill(children[victim], signal.SIGKILL)
    code, _, err = server.outcome()
    assert code == 1
    assert err.startswith(f"error: {victim} (pid {children[victim]}) was killed by SIGKILL\nlast lines of ")
    assert facts["logs"][victim] in err
    assert "\n  | " in err
    assert len(children) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in children.values())
    assert not our_shared_memory(server.process.pid)


def test_nothing_outlives_a_killed_supervisor(start: Callable[..., Server], scripted: Path) -> None:
    server = start(scripted)
    facts = server.wait_until_ready()
    server.process.kill()
    wait_for(lambda: not is_listening(facts["gateway_url"]) and not is_listening(facts["triton_http_url"]))
    wait_for(lambda: not our_shared_memory(server.process.pid))  # Triton's stubs notice by themselves


def test_a_model_that_cannot_load_is_reported(start: Callable[..., Server], scripted: Path, tmp_path: Path) -> None:
    """The artifact is whole by its manifest, but Triton cannot use it: the embedder's tokenizer says nothing."""
    broken = tmp_path / "broken"
    shutil.copytree(scripted, broken, ignore=shutil.ignore_patterns("__pycache__"))
    name = "model_repository/embedding_tokenizer/1/tokenizer.json"
    (broken / name).write_bytes(b"")
    manifest = json.loads((broken / "manifest.json").read_text())
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of nothing
    manifest["files"][name] = {"sha256": empty, "bytes": 0}
    (broken / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = start(broken).outcome()
    assert code == 1
    assert err.startswith("error: triton (pid ")
    assert "embedding_tokenizer" in err


def test_a_changed_artifact_is_refused(start: Callable[..., Server], scripted: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(scripted, changed, ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "tiers.toml").open("a") as file:
        file.write("\n")
    code, out, err = start(changed).outcome()
    assert (code, out) == (1, "")
    assert f"{changed}/tiers.toml: changed since the build" in err
    assert err.endswith("fix: copy it again, or python -m build --target scripted --force\n")


def test_a_taken_port_is_refused(start: Callable[..., Server], scripted: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, _, err = start(scripted, f"--triton-grpc-port={port}").outcome()
    assert code == 1
    assert err.startswith(
        f"error: --triton-grpc-port {port}: cannot listen on 127.0.0.1:{port} (Address already in use)"
    )
