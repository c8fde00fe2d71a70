"""The two Triton models over a stand-in for Triton's Python API: tensors out and in, and one end for each request."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_pb_utils as pb_utils
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import contracts
from orchestrator.config import Generation, Tier
from orchestrator.engines import Chunk, Deliver, EngineRefusal, EngineRequest
from orchestrator.engines.parsing import parse_engine_request
from orchestrator.errors import ApiError, CancelledError, InvalidRequestError, OverloadedError
from orchestrator.generation import build_engine_request
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.latencies import Latencies
from orchestrator.local_socket import SOCKETS_VARIABLE, socket_of
from orchestrator.money import Spending
from orchestrator.request import ChatRequest
from orchestrator.routing.counts import RoutingCounts
from orchestrator.triton import adapter, engine_client, engine_model
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of, to_triton_error
from orchestrator.wire import add_string, find_output, new_request, read_strings

TIMEOUT_S = 5.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.001)


# --- sender, errors, parameters ------------------------------------------------------------------------------


def test_after_the_end_nobody_is_asked_for_cancellation() -> None:
    request = pb_utils.Request([])
    sender = Sender(request)
    request.sender.cancelled = True
    assert sender.is_cancelled()
    sender.send(pb_utils.InferenceResponse(), final=False)
    assert sender.is_cancelled()
    sender.send(None, final=True)
    assert not sender.is_cancelled()
    assert [final for _, final in request.sender.sent] == [False, True]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("m", param="stop"), pb_utils.TritonError.INVALID_ARG),
        (OverloadedError("m"), pb_utils.TritonError.UNAVAILABLE),
    ],
)
def test_our_errors_as_tritons(error: Any, code: int) -> None:
    triton_error = to_triton_error(error)
    assert triton_error.code() == code
    assert json.loads(triton_error.message()) == error.body()


def test_parameters_are_text() -> None:
    assert parameters_of(pb_utils.Request([], parameters={"a": 1, "b": "x"})) == {"a": "1", "b": "x"}
    assert parameters_of(pb_utils.Request([])) == {}


# --- the engine's request, over the tensors and back ---------------------------------------------------------

TIER = Tier(
    name="simple",
    model="llm_small",
    tokenizer="t",
    context_window=100,
    end_id=2,
    pad_id=2,
    input_price_per_million_tokens=0.0,
    output_price_per_million_tokens=0.0,
    generation=Generation(max_output_tokens=40, temperature=0.2, top_p=0.9),
)
# Every value that a caller may send, at the borders of what is allowed too.
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 90),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(1e-6, 1),
        "top_k": st.integers(0, 2**31 - 1),
        "seed": st.integers(0, 2**63 - 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 2),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
    },
)


NUMPY_TYPES = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}
DECLARED = {spec.name: spec.dtype for spec in contracts.ENGINE_INPUTS}


@given(fields=FIELDS)
def test_what_a_caller_may_ask_for_an_engine_accepts(fields: dict[str, Any]) -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})
    sent = build_engine_request(chat, TIER, [5, 6, 7], chat.guide)
    message = engine_client.build_request("llm_small", sent)
    tensors = {
        tensor.name: np.frombuffer(raw, NUMPY_TYPES[tensor.datatype]).reshape(tensor.shape)
        for tensor, raw in zip(message.inputs, message.raw_input_contents)
    }
    assert {tensor.name: f"TYPE_{tensor.datatype}" for tensor in message.inputs}.items() <= DECLARED.items()
    parsed = parse_engine_request(sent.request_id, tensors, exclude_input=True)
    assert parsed.streaming
    got = parsed.request
    greedy = not sent.sample or sent.top_k == 1
    exact = ("request_id", "input_ids", "max_new_tokens", "end_id", "min_tokens", "seed")
    near = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert {name: getattr(got, name) for name in exact} == {name: getattr(sent, name) for name in exact}
    assert got.sample is not greedy
    for name in (*near, *(() if greedy else ("temperature", "top_p", "top_k"))):
        assert getattr(got, name) == pytest.approx(getattr(sent, name), rel=1e-6, abs=1e-30)


# --- engine model --------------------------------------------------------------------------------------------


class FakeEngine:
    """Accepts everything; the test delivers."""

    def __init__(self, parameters: object, model_dir: object, after_step: Callable[[], None]) -> None:
        self.after_step = after_step
        self.live: dict[str, tuple[EngineRequest, Deliver]] = {}
        self.stopped: list[str] = []
        self.refusal: str | None = None
        self.usage = 0.0

    def kv_cache_usage(self) -> float:
        return self.usage

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        if self.refusal is not None:
            raise EngineRefusal(self.refusal)
        self.live[request.request_id] = (request, deliver)

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)

    def close(self) -> None:
        pass

    def deliver(self, request_id: str, *chunks: Chunk) -> None:
        for chunk in chunks:
            self.live[request_id][1](chunk)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[engine_model.EngineModel]:
    monkeypatch.setenv(SOCKETS_VARIABLE, f"{tmp_path}/s-")
    monkeypatch.setattr(engine_model, "ProcessEngine", FakeEngine)
    monkeypatch.setattr(engine_model, "CANCELLATION_CHECK_PERIOD_S", 0.001)
    config = {
        "max_batch_size": 8,
        "parameters": {"engine": {"string_value": "x"}, "exclude_input_in_output": {"string_value": "true"}},
    }
    model = engine_model.EngineModel(
        {
            "model_config": json.dumps(config),
            "model_repository": "r",
            "model_version": "1",
            "model_name": "llm_small",
            "model_instance_name": "llm_small_0_0",
        }
    )
    yield model
    model.finalize()


@pytest.fixture
def engine(model: engine_model.EngineModel) -> FakeEngine:
    assert isinstance(model._engine, FakeEngine)
    return model._engine


def request(request_id: str = "id", parameters: dict[str, str] | None = None, **values: Any) -> pb_utils.Request:
    given = {"input_ids": [[5, 6]], "input_lengths": [2], "request_output_len": [9], **values}
    tensors = [pb_utils.Tensor(name, np.array(value)) for name, value in given.items()]
    return pb_utils.Request(tensors, request_id, parameters)


def sent(request: pb_utils.Request) -> list[list[int] | str]:
    """The responses until the final one: token ids, or the text of an error."""
    until(lambda: bool(request.sender.sent) and request.sender.sent[-1][1])
    out: list[list[int] | str] = []
    for response, _ in request.sender.sent:
        if response is None:
            continue
        if response.has_error():
            out.append(response.error().message())
        for tensor in response.output_tensors():
            if tensor.name() == "output_ids":
                out.append(tensor.as_numpy()[0, 0].tolist())
            if tensor.name() == "context_phase_params":
                out.append(tensor.as_numpy().tobytes().decode())
    return out


def test_streaming_sends_as_it_comes(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked = request(streaming=[True])
    model.execute([asked])
    engine.deliver("id", Chunk([7]))
    until(lambda: len(asked.sender.sent) == 1)
    engine.deliver("id", Chunk([8, 9], finished=True))
    assert sent(asked) == [[7], [8, 9]]


def test_whole_sends_once(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked = request()
    model.execute([asked])
    engine.deliver("id", Chunk([7]), Chunk([8]), Chunk([], finished=True))
    assert sent(asked) == [[7, 8]]
    assert len(asked.sender.sent) == 1


def test_whole_may_begin_with_the_prompt(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked = request(exclude_input_in_output=[False])
    model.execute([asked])
    engine.deliver("id", Chunk([7], finished=True))
    assert sent(asked) == [[5, 6, 7]]


def test_an_empty_end_is_only_the_final_flag(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked = request(streaming=[True])
    model.execute([asked])
    engine.deliver("id", Chunk([], finished=True))
    assert sent(asked) == []


def test_an_error_comes_after_the_tokens(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked = request(streaming=[True])
    model.execute([asked])
    engine.deliver("id", Chunk([7]), Chunk([], finished=True, error="out of méh"))
    assert sent(asked) == [[7], "out of méh"]


def log_probs_sent(asked: pb_utils.Request) -> list[tuple[Any, Any]]:
    """(output_log_probs, cum_log_probs) of each response; None where there are none."""
    until(lambda: bool(asked.sender.sent) and asked.sender.sent[-1][1])
    out = []
    for response, _ in asked.sender.sent:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        out.append(tuple(arrays.get(name) for name in ("output_log_probs", "cum_log_probs")))
        for array in filter(lambda array: array is not None, out[-1]):
            assert array.dtype == np.float32
    return [tuple(None if array is None else array.tolist() for array in pair) for pair in out]


def test_log_probs_of_each_response_and_their_sum_so_far(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked, other = request(streaming=[True], return_log_probs=[True]), request("other", streaming=[True])
    model.execute([asked, other])
    assert engine.live["id"][0].log_probs
    engine.deliver("id", Chunk([7], log_probs=[-0.5]), Chunk([8, 9], finished=True, log_probs=[-0.25, -1.0]))
    engine.deliver("other", Chunk([7], finished=True))
    assert log_probs_sent(asked) == [([[[-0.5]]], [[-0.5]]), ([[[-0.25, -1.0]]], [[-1.75]])]
    assert log_probs_sent(other) == [(None, None)]


def test_log_probs_of_a_whole_answer_are_of_what_was_generated(
    model: engine_model.EngineModel, engine: FakeEngine
) -> None:
    asked = request(return_log_probs=[True], exclude_input_in_output=[False])
    model.execute([asked])
    engine.deliver("id", Chunk([7], log_probs=[-0.5]), Chunk([8], log_probs=[-0.25]), Chunk([], True, log_probs=[]))
    assert sent(asked) == [[5, 6, 7, 8]]
    assert log_probs_sent(asked) == [([[[-0.5, -0.25]]], [[-0.75]])]


def test_a_stop_without_a_value_stops_nothing(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked = request("mine", stop=np.zeros([1, 0], bool))
    model.execute([asked])
    assert engine.stopped == []
    assert sent(asked) == ["stop: shape [1, 0]; must hold one value"]


def test_a_refusal_ends_the_request(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    wrong, refused, good = request(beam_width=[2]), request("refused"), request("good")
    model.execute([wrong])
    engine.refusal = "full"
    model.execute([refused])
    engine.refusal = None
    model.execute([good])
    engine.deliver("good", Chunk([7], finished=True))
    assert sent(wrong) == ["beam_width: this engine supports only 1 (got [2])"]
    assert sent(refused) == ["full"]
    assert sent(good) == [[7]]


def test_stop_by_id(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    asked, nameless = request("mine", stop=[True]), request("", stop=[True])
    model.execute([asked, nameless])
    assert engine.stopped == ["mine"]
    assert sent(asked) == []
    assert sent(nameless) == ["stop: needs the request id of the request to stop"]


def test_a_client_that_leaves_stops_its_request_alone(model: engine_model.EngineModel, engine: FakeEngine) -> None:
    stays, leaves = request("stays", streaming=[True]), request("leaves", streaming=[True])
    model.execute([stays, leaves])
    leaves.sender.cancelled = True
    until(lambda: "leaves" in engine.stopped)
    engine.deliver("leaves", Chunk([], finished=True))
    engine.deliver("stays", Chunk([7], finished=True))
    assert sent(leaves) == []
    assert sent(stays) == [[7]]
    assert set(engine.stopped) == {"leaves"}


class Lines:
    """Who has joined the token lines of `llm_small`."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(socket_of(f"{folder}/s-", contracts.DEFAULT_GRPC_URL, "llm_small", "llm_small_0_0"))
        self._socket.sendall(b"me\n")
        self._lines = self._socket.makefile("rb")
        assert self.read() == {}

    def read(self) -> Any:
        return json.loads(self._lines.readline())

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def lines(model: engine_model.EngineModel, tmp_path: Path) -> Iterator[Lines]:
    lines = Lines(tmp_path)
    yield lines
    lines.close()


def test_what_a_step_brings_is_one_line(model: engine_model.EngineModel, engine: FakeEngine, lines: Lines) -> None:
    by_lines = {contracts.TOKEN_LINES_PARAMETER: "me"}
    a, b = (request(name, by_lines, streaming=[True]) for name in "ab")
    other = request("other", streaming=[True])
    model.execute([a, b, other])
    engine.deliver("a", Chunk([7], log_probs=[-0.5]))
    engine.deliver("b", Chunk([8], finished=True))
    engine.deliver("other", Chunk([9], finished=True))
    engine.after_step()
    assert lines.read() == {"a": [[7], False, None, [-0.5]], "b": [[8], True, None, None]}
    assert (sent(b), sent(other)) == ([], [[9]])
    assert a.sender.sent == []
    engine.deliver("a", Chunk([], finished=True, error="out of memory"))
    engine.after_step()
    assert lines.read() == {"a": [[], True, "out of memory", None]}
    assert sent(a) == []


def test_lines_that_nobody_has_joined(model: engine_model.EngineModel, engine: FakeEngine, lines: Lines) -> None:
    asked = request("a", {contracts.TOKEN_LINES_PARAMETER: "you"}, streaming=[True])
    model.execute([asked])
    assert sent(asked) == ["token_lines: nobody is connected as 'you'; leave it out, or connect"]
    assert not engine.live


# --- orchestrator model --------------------------------------------------------------------------------------


class BlockingPipeline:
    """Holds every call until the test lets go."""

    def __init__(self, *_: object, **__: object) -> None:
        self.go = threading.Event()
        self.dispatch = SimpleNamespace(num_waiting=dict, breaker_states=dict, counts=RoutingCounts())
        self.spending = Spending()
        self.latencies = Latencies()
        self.afterwards = SimpleNamespace(num_flagged={}, quality=None)
        self.outcomes: Counter[str] = Counter()
        self.bodies: list[bytes] = []

    async def finish(self) -> None:
        pass

    def refuse(self, call: Any, error: ApiError) -> None:
        self.outcomes[error.code] += 1
        call.sink.fail(error)

    async def run(self, call: Any) -> None:
        self.bodies.append(call.body)
        while not self.go.is_set():
            await asyncio.sleep(0.001)
            if call.is_cancelled:
                call.sink.fail(CancelledError("the caller left"))
                return
        call.sink.send('{"n":1}', final=False)
        call.sink.send('{"n":2}', final=True)


@pytest.fixture
def make_orchestrator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], adapter.OrchestratorModel]:
    """Of a blocking pipeline, for three live calls."""
    tier = TIER.model_dump_json(exclude={"generation"}, exclude_none=True)
    rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in json.loads(tier).items())
    limits = "[limits]\nmax_live_requests = 3\n"
    (tmp_path / "tiers.toml").write_text(f"[[tier]]\n{rows}generation = {{ max_output_tokens = 4 }}\n{limits}")
    numbers = "".join(f"{name} = 3\n" for name in ("max_input_tokens", "vocab_size", "cls_id", "sep_id", "pad_id"))
    (tmp_path / "embedder.toml").write_text(f'name = "e"\n{numbers}')
    monkeypatch.setattr(adapter, "Pipeline", BlockingPipeline)
    args = {
        "model_repository": str(tmp_path / "model_repository" / "orchestrator"),
        "model_instance_name": "orchestrator_0_0",
    }
    return lambda: adapter.OrchestratorModel(args)


@pytest.fixture
def orchestrator(make_orchestrator: Callable[[], adapter.OrchestratorModel]) -> adapter.OrchestratorModel:
    return make_orchestrator()


def question(request_id: str = "", **parameters: Any) -> pb_utils.Request:
    return pb_utils.Request([pb_utils.Tensor("request", np.array([b"{}"], dtype=np.object_))], request_id, parameters)


def test_an_order_to_cancel_may_be_right_behind_its_request(orchestrator: adapter.OrchestratorModel) -> None:
    """Both are there before the event loop turns; lost, the order would be found by the next poll only."""
    orchestrator._loop.call_soon_threadsafe(time.sleep, 0.05)
    asked = question("a")
    orchestrator.execute([asked, question("a", **{contracts.CANCEL_PARAMETER: True})])
    until(lambda: bool(asked.sender.sent))
    assert "cancelled" in asked.sender.sent[0][0].error().message()
    orchestrator.finalize()


def test_beyond_the_limits_a_call_is_refused_and_then_there_is_room_again(
    orchestrator: adapter.OrchestratorModel,
) -> None:
    model = orchestrator
    pipeline = model._pipeline
    assert isinstance(pipeline, BlockingPipeline)

    def call() -> pb_utils.Request:
        asked = question()
        model.execute([asked])
        return asked

    calls = [call() for _ in range(4)]
    until(lambda: bool(calls[3].sender.sent))
    ((response, is_final),) = calls[3].sender.sent
    assert is_final
    assert json.loads(response.error().message())["error"]["message"] == (
        "3 requests are running, which is the limit; try again later"
    )
    assert pipeline.outcomes == {"overloaded": 1}, "who is refused here is accounted for too"
    pipeline.go.set()
    for asked in calls[:3]:
        until(lambda: len(asked.sender.sent) == 2)  # noqa: B023 (it runs at once)
        events = [response.output_tensors()[0].as_numpy()[0] for response, _ in asked.sender.sent]
        assert events == [b'{"n":1}', b'{"n":2}']
        assert [is_final for _, is_final in asked.sender.sent] == [False, True]
    until(lambda: model._num_live == 0)
    again = call()
    until(lambda: len(again.sender.sent) == 2)
    model.finalize()


@pytest.mark.parametrize("form", ["raw", "typed"])
def test_by_the_socket_a_request_may_come_in_either_form_of_the_protocol(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make_orchestrator: Callable[[], adapter.OrchestratorModel],
    form: str,
) -> None:
    monkeypatch.setenv(SOCKETS_VARIABLE, f"{tmp_path}/s-")
    model = make_orchestrator()
    pipeline = model._pipeline
    assert isinstance(pipeline, BlockingPipeline)
    pipeline.go.set()
    message = new_request(contracts.ORCHESTRATOR_MODEL, "mine")
    add_string(message, contracts.REQUEST, b'{"n":0}')
    if form == "typed":
        del message.raw_input_contents[:]
        message.inputs[0].contents.bytes_contents.append(b'{"n":0}')

    async def ask() -> list[bytes]:
        streams = InferStreams(contracts.DEFAULT_GRPC_URL)
        got = [response async for response in Responses(streams, message).read()]
        await streams.close()
        return [text for response in got for text in read_strings(find_output(response, contracts.EVENT) or b"")]

    assert asyncio.run(ask()) == [b'{"n":1}', b'{"n":2}']
    assert pipeline.bodies == [b'{"n":0}']
    model.finalize()
