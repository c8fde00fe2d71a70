"""The gRPC front: what strangers get of Triton's service, and what they do not, on its port and on Triton's own."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Stack, Start, script, wait_for
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from orchestrator import contracts
from orchestrator.inference_key import unlock
from orchestrator.wire import add_string, find_output, new_request, stop_request

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_stream.py"
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
LONG: dict[str, Any] = {"messages": script(text="x " * 2000, itl_ms=20), "max_tokens": 2000, "stream": True}


@pytest.fixture(scope="module")
def stack(scripted_stack: Stack) -> Stack:
    return scripted_stack


@pytest.fixture
def stub(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.front_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(request_id: str = "", **fields: Any) -> Any:
    """A request to the orchestrator, as gRPC wants it."""
    message = new_request(contracts.ORCHESTRATOR_MODEL, request_id)
    add_string(message, contracts.REQUEST, json.dumps(fields).encode())
    return message


def event(infer_response: Any) -> dict[str, Any] | None:
    raw = find_output(pb.ModelStreamInferResponse(infer_response=infer_response), contracts.EVENT)
    return json.loads(raw[4:]) if raw else None


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for got in events for choice in got["choices"])


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def assert_lives(stack: Stack) -> None:
    with triton.InferenceServerClient(stack.front_url) as client:
        assert client.is_server_ready()


# --- inference ---------------------------------------------------------------------------------------------


def test_a_whole_answer_by_model_infer(stack: Stack) -> None:
    """Triton itself refuses this call for a decoupled model."""
    body = triton.InferInput("request", [1], "BYTES")
    body.set_data_from_numpy(np.array([json.dumps({"messages": script(text="One two.")})], dtype=np.object_))
    with triton.InferenceServerClient(stack.front_url) as client:
        result = client.infer("orchestrator", [body], request_id="mine")
    assert result.get_response().id == "mine"
    assert json.loads(result.as_numpy("event")[0])["choices"][0]["message"]["content"] == "One two."


def test_typed_contents_are_answered_as_by_triton_itself(stack: Stack, stub: Any) -> None:
    """KServe's other form of a tensor's bytes."""

    def typed(**fields: Any) -> Any:
        message = request("mine", **fields)
        del message.raw_input_contents[:]
        message.inputs[0].contents.bytes_contents.append(json.dumps(fields).encode())
        return message

    def text(answer: Any) -> str:
        found = event(answer)
        assert found is not None
        return str(found["choices"][0]["message"]["content"])

    asked = typed(messages=script(text="One two."))
    with grpc.insecure_channel(stack.grpc_url) as channel:
        direct = unlock(service_pb2_grpc.GRPCInferenceServiceStub(channel), stack.inference_key)
        (by_triton,) = direct.ModelStreamInfer(iter((asked,)))
    (streamed,) = stub.ModelStreamInfer(iter((asked,)))
    answers = (by_triton.infer_response, streamed.infer_response, stub.ModelInfer(asked))
    assert [(answer.id, text(answer)) for answer in answers] == [("mine", "One two.")] * 3
    asked.inputs[0].contents.int_contents.append(1)
    code, details = refusal(lambda: stub.ModelInfer(asked))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs[0].contents: must hold 1 of bytes_contents and nothing else" in details


def test_a_stream_does_not_fit_into_model_infer(stack: Stack, stub: Any) -> None:
    since = stack.log_length()
    code, details = refusal(lambda: stub.ModelInfer(request(**LONG)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "ModelStreamInfer, or ask for a whole answer" in details
    wait_for(lambda: "cancelled" in {each["outcome"] for each in stack.logged("request", since)})


def test_an_error_of_the_orchestrator_by_model_infer(stub: Any) -> None:
    code, details = refusal(lambda: stub.ModelInfer(request(messages=[])))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert json.loads(details)["error"]["param"] == "messages"


def test_requests_of_one_stream_run_side_by_side(stack: Stack) -> None:
    texts = {f"r{index}": f"{index} " * 20 for index in range(8)}
    responses: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(stack.front_url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        for request_id, text in texts.items():
            body = triton.InferInput("request", [1], "BYTES")
            asked = {"messages": script(text=text, itl_ms=10), "stream": True}
            body.set_data_from_numpy(np.array([json.dumps(asked)], dtype=np.object_))
            client.async_stream_infer("orchestrator", [body], request_id=request_id, enable_empty_final_response=True)
        order, got, ended = [], {request_id: [] for request_id in texts}, set()
        while len(ended) < len(texts):
            result, error = responses.get(timeout=30)
            assert error is None
            answer = result.get_response()
            order.append(answer.id)
            if found := event(answer):
                got[answer.id].append(found)
            if answer.parameters["triton_final_response"].bool_param:
                assert answer.id not in ended
                ended.add(answer.id)
        client.stop_stream()
    assert {request_id: text_of(events) for request_id, events in got.items()} == texts
    assert len(set(order[: len(order) // 2])) == len(texts), "one after the other"


def test_through_the_front_as_from_triton_itself(stack: Stack) -> None:
    """Message by message, but for what is of one call."""
    heard = []
    for url, key in ((stack.grpc_url, stack.inference_key), (stack.front_url, None)):
        with grpc.insecure_channel(url) as channel:
            stub = unlock(service_pb2_grpc.GRPCInferenceServiceStub(channel), key)
            message = request("mine", messages=script(text="One two.", itl_ms=20), stream=True)
            responses = list(stub.ModelStreamInfer(iter((message,))))
        for response in responses:
            if found := event(response.infer_response):
                text = json.dumps({key: found[key] for key in found if key not in ("id", "created", "rt")}).encode()
                response.infer_response.raw_output_contents[0] = text
        heard.append(responses)
    assert heard[0] == heard[1]


def test_models_of_both_kinds_side_by_side(cpu_stack: Stack) -> None:
    """Triton 2.51 crashes in a second or two when requests to a model that is not decoupled come by streams as well."""
    until_s = time.monotonic() + 6

    def embed(stub: Any) -> set[str]:
        """Several on one stream."""
        message = new_request(contracts.EMBEDDING_MODEL)
        add_string(message, contracts.TEXT, b"good morning", (1, 1))
        return {response.error_message for response in stub.ModelStreamInfer(iter([message] * 4))}

    def generate(stub: Any) -> set[str]:
        message = request(messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True)
        return {response.error_message for response in stub.ModelStreamInfer(iter([message]))}

    def call(ask: Callable[[Any], set[str]]) -> set[str]:
        errors = set()
        with grpc.insecure_channel(cpu_stack.front_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while time.monotonic() < until_s:
                errors |= ask(stub)
        return errors

    with ThreadPoolExecutor(8) as pool:
        assert set().union(*pool.map(call, [embed, generate] * 4)) == {""}


# --- leaving -----------------------------------------------------------------------------------------------


async def _first_events(stub: Any, count: int) -> Any:
    """A stream of which `count` events were read."""
    call = stub.ModelStreamInfer(iter((request(**LONG),)))
    for _ in range(count):
        await call.read()
    return call


@pytest.mark.alone
@pytest.mark.parametrize("how", ["cancel", "close", "deadline"])
def test_leaving_ends_the_generation(stack: Stack, how: str) -> None:
    since = stack.log_length()

    async def leave() -> float:
        async with aio.insecure_channel(stack.front_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            if how == "deadline":
                started_s = time.monotonic()
                with pytest.raises(aio.AioRpcError):
                    await stub.ModelInfer(request(**{**LONG, "stream": False}), timeout=0.3)
                return started_s + 0.3
            call = await _first_events(stub, 3)
            if how == "cancel":
                call.cancel()
                left_s = time.monotonic()
                await asyncio.sleep(0.3)  # the connection lives on
                return left_s
        return time.monotonic()

    left_s = asyncio.run(leave())
    assert stack.wait_for_log("engine_stopped", since)["monotonic_s"] - left_s < 0.150
    settled = stack.wait_for_log("request", since)
    assert settled["outcome"] == "cancelled"
    assert settled["tokens"] <= (300 if how == "deadline" else 60) / 20 + 150 / 20 + 1
    stack.wait_until_idle()


def test_a_connection_that_breaks_ends_all_of_its_requests(stack: Stack) -> None:
    """One client with 40 requests on one stream dies without a word to gRPC."""
    since = stack.log_length()
    address = urlsplit(f"//{stack.front_url}")
    with Tunnel(str(address.hostname), int(address.port or 0)) as tunnel, grpc.insecure_channel(tunnel.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        responses = stub.ModelStreamInfer(iter(requests.get, None))
        for index in range(40):
            requests.put(request(f"r{index}", **LONG))
        begun: set[str] = set()
        while len(begun) < 40:  # the fastest of them may be far by then
            begun.add(next(responses).infer_response.id)
        assert begun == {f"r{index}" for index in range(40)}
        left_s = time.monotonic()
        tunnel.cut()
        wait_for(lambda: len(stack.logged("caller_left", since)) == 40, 5)
        requests.put(None)
    seen_s = [line["monotonic_s"] - left_s for line in stack.logged("caller_left", since)]
    assert max(seen_s) < 1.0  # the orchestrator takes one after the other, some 5 ms each
    stack.wait_until_idle()


def test_a_half_closed_stream_is_answered(stub: Any) -> None:
    message = request(messages=script(text="One two.", itl_ms=50), stream=True)
    events = [found for got in stub.ModelStreamInfer(iter((message,))) if (found := event(got.infer_response))]
    assert text_of(events) == "One two."


def test_a_stranger_cannot_end_anothers_request(stack: Stack, stub: Any) -> None:
    victim = request("known", messages=script(text="y " * 30, itl_ms=20), stream=True)
    responses = stub.ModelStreamInfer(iter((victim,)))
    next(responses)
    attack = request("known", messages=[])
    attack.parameters[contracts.CANCEL_PARAMETER].bool_param = True
    with grpc.insecure_channel(stack.front_url) as channel:
        stranger = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (response,) = stranger.ModelStreamInfer(iter((attack,)))
        assert json.loads(response.error_message)["error"]["param"] == "parameters.cancel"
        assert refusal(lambda: stranger.ModelInfer(attack))[0] == grpc.StatusCode.INVALID_ARGUMENT
        # Neither may he say it as a header, nor does a request of the same id come between.
        twin = request("known", messages=script(text="twin"))
        (answer,) = stranger.ModelStreamInfer(iter((twin,)), metadata=((contracts.CANCEL_PARAMETER, "1"),))
        assert event(answer.infer_response)["choices"][0]["message"]["content"] == "twin"
    rest = [found for response in responses if (found := event(response.infer_response))]
    assert rest[-1]["choices"][0]["finish_reason"] == "stop" or rest[-1].get("rt")
    assert sum("y" in text_of([found]) for found in rest) >= 28


class Tunnel:
    """Bytes to and from a server over connections that can be cut as a network does it: a reset."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Tunnel:
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._sockets = [near, far]
        for source, sink in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._copy, args=(source, sink)))
            self._threads[-1].start()
        self._listener.close()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        for end in self._sockets:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(5)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [method.name for method in SERVICE.methods])
def test_all_calls_are_refused_but_these(stack: Stack, name: str) -> None:
    with grpc.insecure_channel(stack.front_url) as channel:
        call = channel.unary_unary(f"/{SERVICE.full_name}/{name}")
        served = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")
        if name == "ModelStreamInfer":
            return  # served, as the tests above show
        if name in served[:3]:
            call(b"")
        elif name in served:  # an empty model name
            assert refusal(lambda: call(b""))[0] == grpc.StatusCode.NOT_FOUND
        else:
            code, details = refusal(lambda: call(b""))
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert details.startswith(f"{name} is not served here; what is: ServerLive")


def test_metadata_of_public_models_alone(stub: Any) -> None:
    assert stub.ModelReady(pb.ModelReadyRequest(name="orchestrator")).ready
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="orchestrator")).inputs[0].name == "request"
    for call in (
        lambda: stub.ModelReady(pb.ModelReadyRequest(name="llm_small")),
        lambda: stub.ModelMetadata(pb.ModelMetadataRequest(name="llm_small")),
        lambda: stub.ModelInfer(stop_request("llm_small", "x")),
    ):
        code, details = refusal(call)
        assert code == grpc.StatusCode.NOT_FOUND
        assert "'llm_small' does not exist here; one of orchestrator" in details


def test_half_a_million_empty_parts_hold_nobody_up(stack: Stack, stub: Any) -> None:
    """Sent as bytes: it took the front 3 s each, and 1.7 GB."""
    crowded = request(messages=script(text="x")).SerializeToString() + b"\x2a\x00" * 500_000
    front = Path(f"/proc/{stack.process_id('orchestrator.grpc_front')}/status")

    def resident_kib() -> int:
        return next(int(line.split()[1]) for line in front.read_text().splitlines() if line.startswith("VmRSS"))

    before_kib = resident_kib()
    with grpc.insecure_channel(stack.front_url) as channel, ThreadPoolExecutor(8) as pool:
        call = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer")
        refused = [pool.submit(refusal, lambda: call(crowded, timeout=20)) for _ in range(16)]
        started_s = time.monotonic()
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert time.monotonic() - started_s < 2
        for each in refused:
            code, details = each.result()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "inputs: at most 16 are allowed" in details
    assert resident_kib() - before_kib < 100 << 10


def test_the_example_without_a_server_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"127.0.0.1:{free.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "Hi", "--url", url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "failed to connect" in done.stderr.lower()
    assert f"its gRPC front at {url}?" in done.stderr


def test_the_example_at_tritons_own_port_says_so(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "Hi", "--url", stack.grpc_url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "restricted" in done.stderr and "is Triton's own port, which is locked" in done.stderr


def test_an_engine_cannot_be_called_on_a_stream_which_goes_on(stub: Any) -> None:
    messages = (stop_request("llm_small", "one"), request("two", messages=script(text="two")))
    refused, *answered = stub.ModelStreamInfer(iter(messages))
    assert json.loads(refused.error_message)["error"]["code"] == "model_not_found"
    assert (refused.infer_response.id, answered[0].infer_response.id) == ("one", "two")


# Loading a model with files of the caller's is running code of the caller's.
OVERRIDE = {
    "config": json.dumps({"backend": "python", "max_batch_size": 0}),
    "file:1/model.py": b"import os; open('/tmp/owned', 'w')",
}


def _control_calls(stub: Any) -> dict[str, Callable[[], Any]]:
    load = pb.RepositoryModelLoadRequest(model_name="orchestrator")
    load.parameters["config"].string_param = str(OVERRIDE["config"])
    load.parameters["file:1/model.py"].bytes_param = OVERRIDE["file:1/model.py"]
    logs = pb.LogSettingsRequest()
    logs.settings["log_verbose_level"].uint32_param = 9
    trace = pb.TraceSettingRequest()
    trace.settings["trace_level"].value.append("TENSORS")
    register = pb.SystemSharedMemoryRegisterRequest(name="mine", key="/mine", byte_size=64)
    return {
        "load": lambda: stub.RepositoryModelLoad(load),
        "unload": lambda: stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="orchestrator")),
        "index": lambda: stub.RepositoryIndex(pb.RepositoryIndexRequest()),
        "config": lambda: stub.ModelConfig(pb.ModelConfigRequest(name="orchestrator")),
        "register": lambda: stub.SystemSharedMemoryRegister(register),
        "cuda": lambda: stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest()),
        "log": lambda: stub.LogSettings(logs),
        "trace": lambda: stub.TraceSetting(trace),
        "statistics": lambda: stub.ModelStatistics(pb.ModelStatisticsRequest()),
    }


def test_control_is_refused_on_every_port(stack: Stack) -> None:
    with grpc.insecure_channel(stack.front_url) as channel:
        for name, call in _control_calls(service_pb2_grpc.GRPCInferenceServiceStub(channel)).items():
            assert refusal(call)[0] == grpc.StatusCode.PERMISSION_DENIED, name
    with grpc.insecure_channel(stack.grpc_url) as channel:
        for name, call in _control_calls(service_pb2_grpc.GRPCInferenceServiceStub(channel)).items():
            assert "restricted" in refusal(call)[1], name
    parameters = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in OVERRIDE.items()
    }
    address = urlsplit(stack.facts["triton_http_url"])
    for path, body in {
        "/v2/repository/models/orchestrator/load": {"parameters": parameters},
        "/v2/repository/models/orchestrator/unload": {},
        "/v2/systemsharedmemory/region/mine/register": {"key": "/mine", "offset": 0, "byte_size": 64},
        "/v2/cudasharedmemory/region/mine/register": {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 64},
        "/v2/logging": {"log_verbose_level": 9},
        "/v2/trace/setting": {"trace_level": ["TENSORS"]},
    }.items():
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert (response.status, b"restricted" in response.read()) == (403, True), path
        connection.close()


def test_the_keys_are_written_nowhere(stack: Stack) -> None:
    """Not even its own processes have the one of control; the other one is in their environment."""
    command = Path(f"/proc/{stack.process_id('bin/tritonserver')}/cmdline").read_text()
    keys = {name: command.split(f"x-triton-realtime-{name}=")[1].split("\0")[0] for name in ("key", "inference-key")}
    assert min(map(len, keys.values())) >= 32 and len(set(keys.values())) == 2
    run_dir = Path(stack.facts["logs"]["triton"]).parent
    for file in (path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink()):
        assert not [name for name, key in keys.items() if key.encode() in file.read_bytes()], file
    for pid in [
        pid for mark in ("orchestrator", "python_backend_stub", "engines.worker") for pid in stack.process_ids(mark)
    ]:
        process = Path(f"/proc/{pid}")
        if "tritonserver" not in (words := (process / "cmdline").read_text()).split("\0")[0]:
            assert not [name for name, key in keys.items() if key in words]
        assert keys["key"].encode() not in (process / "environ").read_bytes()
    for mark in ("orchestrator.gateway", "orchestrator.grpc_front"):
        assert keys["inference-key"].encode() in Path(f"/proc/{stack.process_id(mark)}/environ").read_bytes()


def test_shared_memory_is_not_reached_by_parameters(stub: Any) -> None:
    for part in ("inputs", "outputs"):
        message = request(messages=script(text="x"))
        tensor = message.inputs[0] if part == "inputs" else message.outputs.add(name="event")
        tensor.parameters["shared_memory_region"].string_param = "mine"
        tensor.parameters["shared_memory_byte_size"].int64_param = 64
        code, details = refusal(lambda message=message: stub.ModelInfer(message))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert f"{part}[0].parameters.shared_memory_" in details
        (response,) = stub.ModelStreamInfer(iter((message,)))
        assert "shared memory is not served" in response.error_message


# --- rough handling ----------------------------------------------------------------------------------------


def test_a_message_that_is_too_large(stack: Stack, stub: Any) -> None:
    code, details = refusal(lambda: stub.ModelInfer(request(messages=["x" * (1 << 20)])))
    assert (code, "at most 1048576 are allowed" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    huge = request(messages=["x" * (2 << 20)])
    for call in (lambda: stub.ModelInfer(huge), lambda: list(stub.ModelStreamInfer(iter((huge,))))):
        assert refusal(call)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(stack.front_url) as channel:
        bomb = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer")
        code, _ = refusal(lambda: bomb(bytes(64 << 20), compression=grpc.Compression.Gzip))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_lives(stack)


def test_one_too_large_message_ends_what_runs_on_its_stream(stack: Stack, stub: Any) -> None:
    since = stack.log_length()
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    responses = stub.ModelStreamInfer(iter(requests.get, None))
    requests.put(request(**LONG))
    next(responses)
    requests.put(request(messages=["x" * (2 << 20)]))
    assert refusal(lambda: list(responses))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    requests.put(None)
    assert stack.wait_for_log("request", since)["outcome"] == "cancelled"


def test_more_requests_on_a_stream_than_allowed(stack: Stack, stub: Any) -> None:
    requests = [request(f"r{index}", **LONG) for index in range(70)]
    responses = stub.ModelStreamInfer(iter(requests))
    refused = [response for response in (next(responses) for _ in range(300)) if response.error_message]
    responses.cancel()
    assert len(refused) == 6
    assert "64 requests run on this stream, which is the limit" in refused[0].error_message
    stack.wait_until_idle(20)


@pytest.mark.parametrize("name", ["ModelInfer", "ModelReady", "ServerLive"])
def test_garbage_instead_of_a_message(stack: Stack, name: str) -> None:
    with grpc.insecure_channel(stack.front_url) as channel:
        code, details = refusal(lambda: channel.unary_unary(f"/{SERVICE.full_name}/{name}")(b"\xff\xff"))
    assert (code, f"no {name}Request" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_garbage_on_a_stream_which_goes_on(stack: Stack) -> None:
    good = request("good", messages=script(text="One")).SerializeToString()
    with grpc.insecure_channel(stack.front_url) as channel:
        call = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")
        first, second, *_ = map(pb.ModelStreamInferResponse.FromString, call(iter((b"\xff\xff", good))))
    assert "no ModelInferRequest" in first.error_message
    assert second.infer_response.id == "good"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def test_paths_and_headers_that_are_not_text(stack: Stack) -> None:
    """grpc.aio's own server ends for everybody at the first such path."""
    address = urlsplit(f"//{stack.front_url}")
    for path, header in (
        (b"/\xff\xfe", b"x"),
        (b"/inference.GRPCInferenceService/\xff", b"x"),
        (b"/inference.GRPCInferenceService/ServerLive", b"\xff\xfe"),
        (b"", b""),
    ):
        fields = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": path,
            b":authority": b"test",
            b"content-type": b"application/grpc",
            b"te": b"trailers",
            b"authorization": header,
        }
        block = b"".join(b"\0" + bytes((len(k),)) + k + bytes((len(v),)) + v for k, v in fields.items())
        with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
            connection.sendall(_frame(1, 4, 1, block) + _frame(0, 1, 1, bytes(5)))
            received = b""
            while b"grpc-status" not in received and (data := connection.recv(4096)):
                received += data
        assert_lives(stack)
    assert "Traceback" not in stack.log("grpc_front")


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99]
)
def test_other_protocols(stack: Stack, junk: bytes) -> None:
    address = urlsplit(f"//{stack.front_url}")
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as connection:
        connection.sendall(junk)
        while True:
            try:
                if not connection.recv(4096):
                    break
            except ConnectionResetError:
                break
    assert_lives(stack)


_PARAMETERS = st.dictionaries(
    st.sampled_from(
        (*contracts.FORWARDED_HEADERS, "triton_enable_empty_final_response", "cancel", "priority", "timeout")
    )
    | st.text(max_size=20),
    st.one_of(
        st.booleans().map(lambda value: pb.InferParameter(bool_param=value)),
        st.integers(-(2**63), 2**63 - 1).map(lambda value: pb.InferParameter(int64_param=value)),
        st.floats().map(lambda value: pb.InferParameter(double_param=value)),
        st.text(max_size=50).map(lambda value: pb.InferParameter(string_param=value)),
    ),
    max_size=3,
)
_TENSORS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("request", "event", "")) | st.text(max_size=5),
        "datatype": st.sampled_from(("BYTES", "INT32", "FP32", "BOOL", "", "bytes")),
        "shape": st.lists(st.sampled_from((1, 0, -1, 2, 2**31, 2**62, -(2**63))), max_size=4),
        "parameters": _PARAMETERS,
        "contents": st.fixed_dictionaries(
            {},
            optional={
                "bytes_contents": st.lists(st.binary(max_size=9), max_size=2),
                "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
                "fp32_contents": st.lists(st.floats(width=32), max_size=2),
                "bool_contents": st.lists(st.booleans(), max_size=2),
            },
        ),
    }
)


def _typed(body: bytes) -> list[dict[str, Any]]:
    """The one input of the orchestrator, in the protocol's typed form."""
    contents = {"bytes_contents": [body]}
    return [{"name": "request", "datatype": "BYTES", "shape": [1], "parameters": {}, "contents": contents}]


_RAW = st.binary(max_size=40) | st.sampled_from((b"\2\0\0\0{}", b"\xff\xff\xff\xff", b"\2\0\0\0{}\0", b"\1\0\0\0[" * 3))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None, deadline=None)
@given(
    model=st.sampled_from(("orchestrator",) * 6 + ("llm_small", "", "../orchestrator")),
    version=st.sampled_from(("", "", "1", "2", "-1", "x")),
    parameters=st.just({}) | _PARAMETERS,
    inputs=st.just([{"name": "request", "datatype": "BYTES", "shape": [1], "parameters": {}, "contents": {}}])
    | st.binary(max_size=9).map(_typed)
    | st.lists(_TENSORS, max_size=3),
    outputs=st.just([]) | st.lists(_TENSORS, max_size=2),
    raw=st.lists(_RAW, max_size=3),
)
def test_any_message_is_answered(
    stub: Any, model: str, version: str, parameters: Any, inputs: Any, outputs: Any, raw: Any
) -> None:
    message = pb.ModelInferRequest(model_name=model, model_version=version, id="fuzz", raw_input_contents=raw)
    for name, value in parameters.items():
        message.parameters[name].CopyFrom(value)
    for tensors, kinds in ((inputs, message.inputs), (outputs, message.outputs)):
        for fields in tensors:
            tensor = kinds.add(name=fields["name"])
            if kinds is message.inputs:
                tensor.datatype = fields["datatype"]
                tensor.shape.extend(fields["shape"])
                for name, values in fields["contents"].items():
                    getattr(tensor.contents, name).extend(values)
            for name, value in fields["parameters"].items():
                tensor.parameters[name].CopyFrom(value)
    responses = list(stub.ModelStreamInfer(iter((message,)), timeout=10))
    assert responses[-1].error_message  # no random text is a valid request
    assert not any(word in responses[-1].error_message for word in ("broke", "failed"))  # the fault is the caller's
    assert responses[-1].infer_response.id in ("fuzz", "")
    assert stub.ServerReady(pb.ServerReadyRequest()).ready


# --- servers of their own ----------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return cert, key


def test_tls_and_draining(start: Start, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """With TLS: plain callers get nothing. At SIGTERM: what runs is finished, and an idle stream holds nothing up."""
    cert, key = certificate
    flags = (f"--grpc-front-cert={cert}", f"--grpc-front-key={key}")
    with start("scripted", tmp_path, *flags) as stack:
        with triton.InferenceServerClient(stack.front_url, ssl=True, root_certificates=str(cert)) as client:
            assert client.is_server_ready()
        with grpc.insecure_channel(stack.front_url) as channel:
            plain = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert refusal(lambda: plain.ServerLive(pb.ServerLiveRequest()))[0] == grpc.StatusCode.UNAVAILABLE
        example = [sys.executable, str(EXAMPLE), "Hello?", "--url", stack.front_url, "--ca", str(cert)]
        done = subprocess.run(example, capture_output=True, text=True, timeout=30)
        assert done.stdout.startswith("The scripted engine answers."), done
        assert key.read_bytes() not in b"".join(path.read_bytes() for path in (tmp_path / "run").glob("*.log"))

        with grpc.secure_channel(stack.front_url, grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            idle = stub.ModelStreamInfer(iter(requests.get, None))
            requests.put(request(messages=script(text="x")))
            assert event(next(idle).infer_response)
            busy = stub.ModelStreamInfer(iter((request(messages=script(text="x " * 20, itl_ms=50), stream=True),)))
            heard = [next(busy)]
            front = Path(f"/proc/{stack.process_id('orchestrator.grpc_front')}")
            stack.process.terminate()
            with pytest.raises(grpc.RpcError) as ended:
                heard.extend(busy)
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
            assert text_of([found for got in heard if (found := event(got.infer_response))]) == "x " * 20
            assert refusal(lambda: next(idle)) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            wait_for(lambda: not front.exists(), 3.0)  # of the 5 s that draining may take
            requests.put(None)
