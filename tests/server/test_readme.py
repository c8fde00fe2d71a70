"""Every command and snippet of README.md runs, as it stands there but for ports and sizes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Stack

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.replace("\\\n", "").splitlines() if line]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
FREE_PORTS = "--port 0 --triton-http-port 0 --triton-grpc-port 0 --triton-metrics-port 0 --grpc-front-port 0"
# The same commands with less work: what they measure is not what is tested here.
SMALLER = {
    "perf overhead": "--requests 3 --scripted-requests 3",
    "perf token-path": "--streams 1,4 --tokens 20",
    "perf streams": "--streams 1,2 --rounds 1 --tokens 8",
    "perf stagger": "--rounds 1",
    "perf cancel": "--times 2 --others 2",
}
PERF = [command for command in COMMANDS if " -m perf " in command]

pytestmark = [pytest.mark.timeout(300), pytest.mark.own_target("README's commands name their targets")]


def run(command: str, stdin: str = "") -> str:
    """Run a command in the checkout; returns its stdout."""
    words = shlex.split(command.replace(".venv/bin/python", sys.executable))
    result = subprocess.run(words, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, (command, result.stdout[-2000:], result.stderr[-2000:])
    return result.stdout


def find(part: str) -> str:
    """The one command of README with `part` in it."""
    found = [command for command in COMMANDS if part in command]
    assert len(found) == 1, (part, found)
    return found[0]


@pytest.fixture
def at_stack(cpu_stack: Stack) -> Callable[[str], str]:
    """Puts the running server's addresses in the place of README's."""
    front_url = cpu_stack.front_url
    return lambda text: text.replace("http://127.0.0.1:8080", cpu_stack.url).replace("127.0.0.1:9001", front_url)


def test_no_command_is_left_out() -> None:
    # scripts/test is what runs this file.
    tested = [
        "scripts/demo",
        "scripts/test",
        "scripts/serve",
        "curl -N",
        "curl http",
        "grpc_stream",
        "orchestrator chat",
        "keys add",
        "keys list",
    ]
    tested += [
        "scripts/stop",
        "-m build --target cpu",
        "perf overhead",
        "perf streams",
        "perf token-path",
        "perf stagger",
        "perf cancel",
    ]
    assert sorted(COMMANDS) == sorted(map(find, tested))
    assert len(PYTHON) == 1


def test_demo(artifact: Callable[[str], Path]) -> None:
    artifact("cpu")
    *answer, facts_line, last = run(find("scripts/demo")).splitlines()
    assert "Paris" in "\n".join(answer)
    assert facts_line.startswith("[tier simple | model llm_small | first token ")
    facts = json.loads(last)
    assert list(facts) == ["ttft_ms", "total_ms", "tokens", "tps", "input_tokens", "model", "tier", "cache"]
    assert 0 < facts["ttft_ms"] < facts["total_ms"] and facts["tokens"] > 1 and facts["cache"] == "miss"


@pytest.fixture
def served() -> Iterator[str]:
    yield run(f"{find('scripts/serve')} --target scripted {FREE_PORTS}")
    run(find("scripts/stop"))


@pytest.mark.skipif((ROOT / ".run").exists() and any((ROOT / ".run").glob("*/pid")), reason="a server of the user runs")
def test_serve_and_stop(artifact: Callable[[str], Path], served: str) -> None:
    """What `scripts/serve` prints can be pasted."""
    curl = served[served.index("curl -N") :].replace("\\\n", "")
    events = run(curl).split("\n\n")
    assert events[0].startswith('data: {"id":"chatcmpl-') and events[-2] == "data: [DONE]"


def test_curl(at_stack: Callable[[str], str]) -> None:
    events = run(at_stack(find("curl -N"))).split("\n\n")
    assert events[-2] == "data: [DONE]" and len(events) > 5


def test_curl_for_embeddings(at_stack: Callable[[str], str]) -> None:
    answer = json.loads(run(at_stack(find("curl http"))))
    assert [len(each["embedding"]) for each in answer["data"]] == [384, 384]


def test_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    secret = run(find("keys add").replace("keys.json", path)).strip()
    assert secret.startswith("rt-")
    listed = run(find("keys list").replace("keys.json", path))
    assert "acme-1  acme    simple,embedding  60            20000       5" in listed and secret not in listed


def test_openai(at_stack: Callable[[str], str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", at_stack(PYTHON[0])], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert result.returncode == 0 and len(result.stdout) > 20, result


def test_grpc_example(at_stack: Callable[[str], str], cpu_stack: Stack) -> None:
    command = at_stack(find("grpc_stream") + " --url 127.0.0.1:9001")
    *_, last = run(command).splitlines()
    facts = json.loads(last)
    assert facts["model"] == "llm_small" and (facts["cache"] != "miss" or facts["reason"])


def test_chat(at_stack: Callable[[str], str]) -> None:
    command = at_stack(find("orchestrator chat") + " --url http://127.0.0.1:8080")
    answers = run(command, stdin="What is the capital of France?\nAnd of Germany?\n")
    assert "Paris" in answers and answers.count("[tier simple") == 2


def test_build(artifact: Callable[[str], Path]) -> None:
    artifact("cpu")
    assert "up to date" in run(find("-m build --target cpu"))


@pytest.mark.parametrize("command", PERF)
def test_perf(command: str, artifact: Callable[[str], Path]) -> None:
    artifact("cpu"), artifact("scripted")
    name = next(name for name in SMALLER if name in command)
    *_, last = run(f"{command} {SMALLER[name]}").splitlines()
    assert json.loads(last)["command"] == name.split()[1]


def test_the_tree_is_true() -> None:
    """Every file and folder that README's tree names exists."""
    tree = next(text for kind, text in BLOCKS if kind == "text" and text.startswith("scripts/ "))
    parents: list[Path] = []  # by depth, two spaces each
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [parents[depth - 1] / line.split()[0] if depth else ROOT / line.split()[0]]
        assert parents[depth].exists(), line
