"""The supervisor with small Python scripts in place of Triton, the gateway and the gRPC front."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.__main__ import main
from orchestrator.manifest import Manifest
from orchestrator.triton.artifact import Artifact
from orchestrator.triton.fleet import Fleet, Replica
from orchestrator.triton.front import FrontOptions
from orchestrator.triton.ports import LOOPBACK, Ports, settle
from orchestrator.triton.process import Child, ChildDied, Cleaner, StartError
from orchestrator.triton.server import TritonInstall, TritonLaunch
from orchestrator.triton.supervisor import ServeFacts, ServeOptions, Signals, gateway_command, supervise

# Answers 200 to every GET; notes its SIGTERM in the file ORDER. BEHAVIOUR is put in before it serves.
FAKE = """
import http.server, os, signal, sys, threading
name, port, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
def stop(*args):
    open(order, "a").write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
print(name, "says", "hello", flush=True)
{behaviour}
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES_AT_ONCE = "print('boom', flush=True); sys.exit(3)"
DIES_LATER = """
def die():
    while not os.path.exists(os.path.join(os.path.dirname(order), "serve.json")):
        threading.Event().wait(0.05)
    print('boom', flush=True); os._exit(4)
threading.Thread(target=die).start()
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Fakes:
    """A supervisor on fake children."""

    def __init__(self, run_dir: Path) -> None:
        self.ports = settle(Ports(0, 0, 0, 0, 0), LOOPBACK)
        self.facts = ServeFacts(TritonInstall(Path("/t/tritonserver"), "PATH"), LOOPBACK, LOOPBACK, self.ports, run_dir)
        self.order = run_dir / "order"
        self.ready_file = run_dir / "serve.json"

    def command(self, name: str, port: int, behaviour: str = "") -> tuple[str, ...]:
        return (sys.executable, "-c", FAKE.format(behaviour=behaviour), name, str(port), str(self.order))

    def run(
        self, signals: Signals, triton: str = "", gateway: str = "", grpc_front: str = "", drain_timeout_s: float = 5.0
    ) -> None:
        command = self.command("gateway", self.ports.gateway, gateway)
        front = self.command("grpc_front", self.ports.grpc_front, grpc_front)
        artifact = Artifact(self.facts.run_dir, Manifest(schema=1, target="scripted", files={}))

        def launch(_: Artifact, replica: Replica, shm_prefix: str) -> TritonLaunch:
            return TritonLaunch(self.command("triton", replica.ports.triton_http, triton), os.environ)

        with Cleaner() as cleaner:
            fleet = Fleet(launch, artifact, 1, self.ports, self.facts.run_dir, cleaner, drain_timeout_s, print)
            supervise(
                fleet,
                command,
                front,
                dict(os.environ),
                self.facts,
                drain_timeout_s,
                signals,
                cleaner,
                lambda _: artifact,
            )

    def is_ready(self) -> bool:
        return self.ready_file.exists()


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.fixture
def when() -> Iterator[Callable[[Callable[[], bool], Callable[[], object]], None]]:
    """`when(condition, action)`: beside the test, wait for the condition, then act."""
    threads = []

    def start(condition: Callable[[], bool], action: Callable[[], object]) -> None:
        def run() -> None:
            wait_for(condition)
            action()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# --- a signal ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("send", [interrupt, terminate])
def test_a_signal_stops_triton_last(fakes: Fakes, when, send, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    when(fakes.is_ready, lambda: (seen.append(json.loads(fakes.ready_file.read_text())), send()))
    with Signals() as signals:
        fakes.run(signals)
    *others, last = fakes.order.read_text().split()
    assert (sorted(others), last) == (["gateway", "grpc_front"], "triton")
    assert not fakes.ready_file.exists()
    (triton,) = seen[0].pop("replicas")
    assert triton.pop("pid") > 0
    assert triton == {
        "name": "triton",
        "state": "serving",
        "artifact": str(fakes.facts.run_dir),
        "http_url": f"http://127.0.0.1:{fakes.ports.triton_http}",
        "grpc_url": f"127.0.0.1:{fakes.ports.triton_grpc}",
        "metrics_url": f"http://127.0.0.1:{fakes.ports.triton_metrics}/metrics",
        "log": str(fakes.facts.log("triton")),
    }
    assert seen == [
        {
            "pid": os.getpid(),
            "triton": "/t/tritonserver",
            "gateway_url": f"http://127.0.0.1:{fakes.ports.gateway}",
            "grpc_front_url": f"127.0.0.1:{fakes.ports.grpc_front}",
            "triton_http_url": f"http://127.0.0.1:{fakes.ports.triton_http}",
            "triton_grpc_url": f"127.0.0.1:{fakes.ports.triton_grpc}",
            "triton_metrics_url": f"http://127.0.0.1:{fakes.ports.triton_metrics}/metrics",
            "logs": {name: str(fakes.facts.log(name)) for name in ("triton", "gateway", "grpc_front")},
        }
    ]
    printed = capsys.readouterr().out
    assert f"curl -N http://127.0.0.1:{fakes.ports.gateway}/v1/chat/completions" in printed
    assert str(fakes.facts.log("triton")) in printed
    assert fakes.facts.log("gateway").read_text() == "gateway says hello\n"


def test_a_signal_during_the_start(fakes: Fakes, when) -> None:
    when(lambda: fakes.facts.log("triton").exists(), terminate)
    with Signals() as signals:
        fakes.run(signals, triton="import time; time.sleep(60)")
    assert not fakes.facts.log("gateway").exists()


def test_a_second_signal_stops_at_once(fakes: Fakes, when) -> None:
    when(fakes.is_ready, lambda: (terminate(), time.sleep(0.3), terminate()))
    started_s = time.monotonic()
    with Signals() as signals:
        fakes.run(signals, triton=IGNORES_SIGTERM, gateway=IGNORES_SIGTERM, drain_timeout_s=60)
    assert time.monotonic() - started_s < 10


def test_what_does_not_drain_in_time_is_killed(fakes: Fakes, when, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.triton.supervisor._EXIT_MARGIN_S", 0.0)
    when(fakes.is_ready, terminate)
    with Signals() as signals:
        fakes.run(signals, gateway=IGNORES_SIGTERM, drain_timeout_s=0.2)
    assert fakes.order.read_text().split() == ["grpc_front", "triton"]


def test_gateway_and_front_drain_at_the_same_time(fakes: Fakes, when, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.triton.supervisor._EXIT_MARGIN_S", 0.0)
    takes_a_second = "orderly = stop\ndef stop(*args):\n    import time; time.sleep(1); orderly()\n"
    takes_a_second += "signal.signal(signal.SIGTERM, stop)"
    stopping_s = []
    when(fakes.is_ready, lambda: (stopping_s.append(time.monotonic()), terminate()))
    with Signals() as signals:
        fakes.run(signals, gateway=takes_a_second, grpc_front=takes_a_second)
    assert sorted(fakes.order.read_text().split()[:2]) == ["gateway", "grpc_front"]
    assert time.monotonic() - stopping_s[0] < 1.9


# --- a dead child ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviours", "message", "others"),
    [
        ({"triton": DIES_AT_ONCE}, "triton (pid {}) ended with exit code 3\nlast lines of {}:\n", []),
        (
            {"gateway": DIES_AT_ONCE},
            "gateway (pid {}) ended with exit code 3\nlast lines of {}:\n",
            ["triton"],
        ),
        (
            {"triton": DIES_LATER},
            "triton (pid {}) ended with exit code 4\nlast lines of {}:\n",
            ["gateway", "grpc_front"],
        ),
        (
            {"gateway": DIES_LATER},
            "gateway (pid {}) ended with exit code 4\nlast lines of {}:\n",
            ["grpc_front", "triton"],
        ),
        ({"gateway": "os.kill(os.getpid(), 9)"}, "gateway (pid {}) was killed by SIGKILL\n", ["triton"]),
        (
            {"grpc_front": DIES_LATER},
            "grpc_front (pid {}) ended with exit code 4\nlast lines of {}:\n",
            ["gateway", "triton"],
        ),
    ],
)
def test_a_dead_child(fakes: Fakes, behaviours: dict[str, str], message: str, others: list[str]) -> None:
    (name,) = behaviours
    with Signals() as signals, pytest.raises(ChildDied) as caught:
        fakes.run(signals, **behaviours)
    text = str(caught.value)
    pid = text.split("pid ")[1].split(")")[0]
    assert text.startswith(message.format(pid, fakes.facts.log(name)))
    assert f"  | {name} says hello" in text
    assert ("  | boom" in text) == ("boom" in behaviours[name])
    assert sorted(fakes.order.read_text().split() if fakes.order.exists() else []) == others
    assert not fakes.ready_file.exists()


def test_a_large_log_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.triton.process.MAX_LOG_BYTES", 100)
    log = tmp_path / "triton.log"
    script = "for i in $(seq 40); do echo line $i; done; read -r < PIPE; echo after"
    os.mkfifo(tmp_path / "PIPE")
    child = Child("triton", ("bash", "-c", script), log, folder=tmp_path)
    try:
        for _ in range(200):
            if "line 40" in log.read_text():
                break
            time.sleep(0.02)
        child.rotate_log()
        (tmp_path / "PIPE").write_text("go\n")
        for _ in range(200):
            if not child.is_running():
                break
            time.sleep(0.02)
    finally:
        child.stop(0)
    assert (tmp_path / "triton.log.1").read_text().splitlines()[-1] == "line 40"
    assert log.read_text() == "after\n"


def test_the_log_tail_is_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child("triton", (sys.executable, "-c", "[print(i) for i in range(100)]"), log)
    wait_for(lambda: not child.is_running())
    assert (child.fate() or "").splitlines()[2:] == [f"  | {i}" for i in range(70, 100)]


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """Neither a child, nor what the child started, nor its shared memory."""
    script = f"""
        import pathlib, time
        from orchestrator.triton.process import Child, Cleaner, StartError
        with Cleaner() as cleaner:
            log = pathlib.Path({str(tmp_path / "log")!r})
            cleaner.watch(Child("child", ("bash", "-c", "sleep 60 & echo $! $$; wait"), log))
            pathlib.Path("/dev/shm", cleaner.shm_prefix + "region").touch()
            print(cleaner.shm_prefix, flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        region = Path("/dev/shm", supervisor.stdout.readline().strip() + "region")
        wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"))
        assert region.exists()
        supervisor.kill()
    for pid in map(int, (tmp_path / "log").read_text().split()):
        wait_for(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
    wait_for(lambda: not region.exists())


def test_a_hard_stop_reaches_what_a_child_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child("parent", ("bash", "-c", "trap '' TERM; sleep 60 & echo $!; wait"), log)
    wait_for(lambda: log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    child.stop(timeout_s=0.1)
    wait_for(lambda: not is_alive(grandchild))


def test_the_gateway_is_told_whom_to_answer(tmp_path: Path) -> None:
    artifact = Artifact(tmp_path, Manifest(schema=1, target="scripted", files={}))
    options = ServeOptions(
        tmp_path, tmp_path, gateway_workers=3, allowed_hosts=("a", "b"), allowed_origins=("http://c",)
    )
    command = " ".join(gateway_command(artifact, options, Ports(), tmp_path / "run" / "replicas.json"))
    assert "--workers 3" in command and f"--metrics-dir {tmp_path}/run/gateway-metrics" in command
    assert f"--replicas {tmp_path}/run/replicas.json" in command
    assert "--allow-host=a --allow-host=b --allow-origin=http://c" in command


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0"),
        ({"host": "::"}, "--host ::"),
        ({"host": "192.0.2.1"}, "--host 192.0.2.1"),
        ({"front": FrontOptions("0.0.0.0")}, "--grpc-front-host 0.0.0.0"),
    ],
)
def test_beyond_loopback_it_takes_keys(tmp_path: Path, options: dict[str, Any], flag: str) -> None:
    with pytest.raises(StartError, match=f"{flag}: without keys everybody .*\nfix: .* keys add") as caught:
        ServeOptions(tmp_path, tmp_path, **options).check_keys()
    assert f"serve {flag} --keys keys.json" in str(caught.value)
    path = tmp_path / "keys.json"
    with pytest.raises(StartError, match="cannot be read"):
        ServeOptions(tmp_path, tmp_path, keys=path, **options).check_keys()
    path.write_text('{"keys": []}')
    with_keys = ServeOptions(tmp_path, tmp_path, keys=path, **options)
    with_keys.check_keys()
    artifact = Artifact(tmp_path, Manifest(schema=1, target="scripted", files={}))
    assert "--with-keys" in gateway_command(artifact, with_keys, Ports(), tmp_path)
    ServeOptions(tmp_path, tmp_path, host="localhost", front=FrontOptions("::1")).check_keys()


def test_several_tritons_share_quotas_or_are_refused(tmp_path: Path) -> None:
    options = ServeOptions(tmp_path, tmp_path, keys=tmp_path / "keys.json", num_replicas=2)
    with pytest.raises(StartError, match="--replicas 2 with --keys: .*\nfix: set REDIS_URL"):
        options.check_replicas({"REDIS_URL": ""})
    options.check_replicas({"REDIS_URL": "redis://127.0.0.1"})
    ServeOptions(tmp_path, tmp_path, num_replicas=2).check_replicas({})


def test_no_reload_may_give_quotas_back(tmp_path: Path) -> None:
    options = ServeOptions(tmp_path, tmp_path, keys=tmp_path / "keys.json")
    assert main(["keys", "add", f"--keys={options.keys}", "--tenant=free"]) == 0
    options.check_reload({})
    assert main(["keys", "add", f"--keys={options.keys}", "--tenant=acme", "--requests-per-minute=10"]) == 0
    with pytest.raises(StartError, match=r"acme-1 has some.*\nfix: serve with REDIS_URL set"):
        options.check_reload({"REDIS_URL": ""})
    options.check_reload({"REDIS_URL": "redis://127.0.0.1"})


# --- the command line --------------------------------------------------------------------------------------


def test_an_error_is_one_clear_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--run-dir", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: no finished artifact here (manifest.json is missing)\nfix: python -m build --target cpu\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "65536"], "'65536' is not a port; allowed: 1 to 65535, or 0 for a free one"),
        (["--triton-http-port", "-1"], "'-1' is not a port"),
        (["--drain-timeout-s", "soon"], "'soon' is not allowed; seconds from 0 to 3600"),
        (["--drain-timeout-s", "nan"], "'nan' is not allowed"),
        (["--gateway-workers", "0"], "'0' is not allowed; 1 to 64 workers"),
        (["--replicas", "17"], "'17' is not allowed; 1 to 16 replicas"),
        (["--allow-host", "a.example:80"], "'a.example:80' is not a name or address without a port"),
        (["--allow-host", "*"], "'*' is not a name or address"),
        (["--allow-origin", "chat.example.com"], "'chat.example.com' is not an origin as browsers send it"),
        (["--allow-origin", "https://chat.example.com/"], "is not an origin as browsers send it"),
        (["--allow-origin", "*"], "'*' is not an origin"),
        (["--prot", "1"], "unrecognized arguments: --prot 1"),
    ],
)
def test_wrong_usage(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "artifacts/cpu", *flags])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
