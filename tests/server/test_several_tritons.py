"""Several Tritons behind the gateway, and what is served replaced while it is asked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from serving import CHAT_PATH, Answer, Stack, ask, running, script, wait_for
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.inference_key import INFERENCE_KEY_VARIABLE, unlock
from orchestrator.wire import add_string, is_end, stop_request

pytestmark = pytest.mark.own_target("two servers of target scripted, beside one another")

CHOSEN_KEY = "chosen-key_0123456789-0123456789-0123456789"


@pytest.fixture(scope="module")
def pair(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--replicas=2", "--drain-timeout-s=30")
    chosen = {INFERENCE_KEY_VARIABLE: CHOSEN_KEY}
    with running(artifact("scripted"), tmp_path_factory.mktemp("pair"), *flags, **chosen) as pair:
        yield pair


def facts_of(stack: Stack) -> dict[str, Any]:
    """As `serve.json` has them now."""
    return json.loads((Path(stack.facts["logs"]["gateway"]).parent / "serve.json").read_text())


def numbers(stack: Stack, name: str) -> dict[str, float]:
    """A sample of the gateway's page, by replica."""
    found = re.findall(rf'^{name}{{replica="([^"]+)"}} (\S+)$', stack.get("/metrics").text, re.MULTILINE)
    return {replica: float(number) for replica, number in found}


def where(stack: Stack, request_id: str) -> list[str]:
    """The replicas whose log has the request."""
    return [each["name"] for each in facts_of(stack)["replicas"] if request_id in stack.log(each["name"])]


def converse(stack: Stack, subject: str) -> list[str]:
    """Where the turns of a conversation went."""
    messages, places = [*ask(f"Tell me of {subject}.")], []
    for turn in range(3):
        answer = stack.post(messages=messages)
        request_id = answer.headers["x-request-id"]
        wait_for(lambda request_id=request_id: where(stack, request_id))  # type: ignore[misc]
        places += where(stack, request_id)
        messages += [answer.json()["choices"][0]["message"], *ask(f"And then, for the {turn}th time?")]
    return places


def say(text: str, number: int, **times: Any) -> list[dict[str, str]]:
    """A conversation of its own."""
    return [{"role": "system", "content": f"number {number}"}, *script(text=text, **times)]


def change(artifact: Path, folder: Path, edit: Callable[[str], str]) -> Path:
    """A copy of an artifact whose tiers are others, and whose manifest says so."""
    shutil.copytree(artifact, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = edit((folder / "tiers.toml").read_text()).encode()
    (folder / "tiers.toml").write_bytes(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["tiers.toml"] = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def reload(stack: Stack, artifact: Path) -> subprocess.CompletedProcess[str]:
    run_dir = Path(stack.facts["logs"]["gateway"]).parent
    command = [sys.executable, "-m", "orchestrator", "reload", f"--run-dir={run_dir}", f"--artifact={artifact}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@contextmanager
def asking(stack: Stack) -> Iterator[list[int]]:
    """The statuses of short requests, asked one after the other while the block runs."""
    statuses: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=stack.url, timeout=30) as http:
            while not is_over.wait(0.05):
                number = len(statuses)
                statuses.append(http.post(CHAT_PATH, json={"messages": say(f"{number}", number)}).status_code)
                body = {"model": "embedding", "input": f"text {number}"}
                statuses.append(http.post("/v1/embeddings", json=body).status_code)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        thread.join()


def test_a_conversation_stays_where_it_began(pair: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        places = list(pool.map(lambda number: converse(pair, f"subject {number}"), range(12)))
    assert all(len(each) == 3 and len(set(each)) == 1 for each in places)
    assert {each[0] for each in places} == {"triton-0", "triton-1"}


def test_the_front_sends_a_conversation_where_the_gateway_does(pair: Stack) -> None:
    """Both make the same key, each of its own way to see the request; embeddings are answered by either."""
    with grpc.insecure_channel(pair.front_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number in range(6):
            messages = ask(f"What of theme {number}?")
            request_id = pair.post(messages=messages).headers["x-request-id"]
            request = service_pb2.ModelInferRequest(model_name=contracts.ORCHESTRATOR_MODEL)
            add_string(request, contracts.REQUEST, json.dumps({"messages": messages}).encode())
            request.parameters["x-request-id"].string_param = f"front-{number}"
            assert stub.ModelInfer(request, timeout=20).outputs
            wait_for(lambda ids=(request_id, f"front-{number}"): all(where(pair, each) for each in ids))  # type: ignore[misc]
            assert where(pair, request_id) == where(pair, f"front-{number}")
        for _ in range(4):
            request = service_pb2.ModelInferRequest(model_name=contracts.EMBEDDING_MODEL)
            add_string(request, contracts.TEXT, b"Hello", (1, 1))
            assert len(stub.ModelInfer(request, timeout=20).outputs) == 2
        assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20).ready


def test_a_key_that_was_chosen_opens_each_of_them(pair: Stack) -> None:
    for replica in facts_of(pair)["replicas"]:
        with grpc.insecure_channel(replica["grpc_url"]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError, match="restricted"):
                list(stub.ModelStreamInfer(iter([stop_request("llm_small", "nobody")])))
            (stopped,) = unlock(stub, CHOSEN_KEY).ModelStreamInfer(iter([stop_request("llm_small", "nobody")]))
            assert is_end(stopped) and not stopped.error_message


def test_all_of_them_are_on_one_page(pair: Stack) -> None:
    assert pair.post(messages=ask("Hello")).status_code == 200
    assert numbers(pair, "rt_gateway_replica_up") == {"triton-0": 1, "triton-1": 1}
    page = pair.get("/metrics").text
    assert page.count("# TYPE nv_inference_request_success counter\n") == 1
    for name in ("triton-0", "triton-1"):
        assert f'nv_inference_request_success{{replica="{name}",model="orchestrator",version="1"}}' in page
    assert pair.metric("rt_gateway_triton_up") == 1


def test_the_death_of_one_costs_its_own_streams_alone(pair: Stack) -> None:
    victim, _ = facts_of(pair)["replicas"]
    with ThreadPoolExecutor(16) as pool:
        text = "x " * 40
        waiting = [pool.submit(pair.stream, messages=say(text, number, itl_ms=100)) for number in range(12)]
        wait_for(lambda: sum(numbers(pair, "rt_gateway_replica_live_requests").values()) == 12)
        live = numbers(pair, "rt_gateway_replica_live_requests")
        wait_for(lambda: pair.metric("rt_gateway_live_streams") == 12)  # each has its first token
        os.kill(victim["pid"], signal.SIGKILL)
        after = [pool.submit(pair.stream, messages=say("after", number)) for number in range(20, 30)]
        assert [(each.result(20).text, each.result().is_done) for each in after] == [("after", True)] * 10
        answers: list[Answer] = [each.result(30) for each in waiting]
    lost = [answer for answer in answers if answer.error is not None]
    assert len(lost) == live["triton-0"] and 0 < len(lost) < 12
    assert {answer.error["code"] for answer in lost if answer.error} == {"engine_error"}
    whole = [answer for answer in answers if answer.error is None]
    assert all(answer.text == text and answer.is_done for answer in whole)

    wait_for(lambda: numbers(pair, "rt_gateway_replica_up") == {"triton-0": 1, "triton-1": 1}, 40)
    assert numbers(pair, "rt_gateway_replica_restarts") == {"triton-0": 1, "triton-1": 0}
    assert facts_of(pair)["replicas"][0]["pid"] != victim["pid"]
    assert pair.get("/ready").json() == {"status": "ready"}
    assert {place for number in range(6) for place in converse(pair, f"matter {number}")} == {"triton-0", "triton-1"}


@pytest.fixture(scope="module")
def new(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "scripted"
    return change(artifact("scripted"), folder, lambda text: text.replace('name = "medium"', 'name = "middle"'))


@pytest.fixture(scope="module")
def broken(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken") / "scripted"
    return change(artifact("scripted"), folder, lambda text: text + '\n[[tier]]\nname = "more"\n')


@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_reload_drops_no_stream(
    num_replicas: int, pair: Stack, new: Path, broken: Path, artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(51) as pool, alone_or(pair, num_replicas, artifact, tmp_path) as stack:
        before = [each["pid"] for each in facts_of(stack)["replicas"]]
        refused = reload(stack, broken)
        assert refused.returncode == 1
        assert "tiers.toml" in refused.stderr and "what was served is served on" in refused.stderr
        assert [each["pid"] for each in facts_of(stack)["replicas"]] == before

        texts = [f"{number} " + "x " * 40 for number in range(50)]  # for 8 s: longer than the new Triton takes to start
        waiting = [pool.submit(stack.stream, messages=say(text, 0, itl_ms=200)) for text in texts]
        wait_for(lambda: stack.metric("rt_gateway_live_streams") == 50, 30)
        with asking(stack) as statuses:
            done = pool.submit(reload, stack, new).result(100)
        answers = [each.result(60) for each in waiting]
        assert (done.returncode, done.stdout) == (0, "reloading: what runs goes on\nreloaded\n"), done.stderr
        found = [(answer.error, answer.text, answer.is_done) for answer in answers]
        assert found == [(None, text, True) for text in texts]
        assert set(statuses) == {200} and len(statuses) > 10
        names = [each["id"] for each in wait_for(lambda: models_of(stack, "middle"))]
        assert "middle" in names and "medium" not in names
        assert stack.post(model="middle", messages=ask("Hello")).json()["rt"]["tier"] == "middle"
        assert stack.post(model="medium", messages=ask("Hello")).status_code == 404
        assert not set(before) & {each["pid"] for each in facts_of(stack)["replicas"]}
        assert not any(Path("/proc", str(pid)).exists() for pid in before)


def models_of(stack: Stack, name: str) -> list[dict[str, Any]]:
    """All, once `name` is one of them."""
    models: list[dict[str, Any]] = stack.get("/v1/models").json()["data"]
    return models if any(each["id"] == name for each in models) else []


@contextmanager
def alone_or(pair: Stack, num_replicas: int, artifact: Callable[[str], Path], folder: Path) -> Iterator[Stack]:
    if num_replicas == 2:
        yield pair
    else:
        with running(artifact("scripted"), folder / "run", "--drain-timeout-s=30") as stack:
            yield stack
