"""The engine model called directly, as a client of TensorRT-LLM's backend calls it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import Stack, script
from tokenizers import Tokenizer

from orchestrator.contracts import ENGINE_INPUTS

SPECS = {spec.name: spec for spec in ENGINE_INPUTS}
DTYPES = {"TYPE_INT32": np.int32, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_}
END_ID = 2
TIMEOUT_S = 20


class Client:
    """One gRPC stream to `llm_small`."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        self._client = triton.InferenceServerClient(url)
        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))
        self._tokenizer = tokenizer

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def send(self, prompt: str = "", request_id: str = "", *, batch: int = 1, **values: Any) -> None:
        """Send a request; `values` are one-element tensors of the contract, None leaves one out."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        given = {"input_lengths": len(ids), "request_output_len": 50, "end_id": END_ID, **values}
        arrays = {
            name: np.full((batch, 1), value, DTYPES[SPECS[name].dtype])
            for name, value in given.items()
            if value is not None
        }
        if ids:
            arrays["input_ids"] = np.array([ids] * batch, np.int32)
        self.send_arrays(arrays, request_id)

    def send_arrays(self, arrays: dict[str, np.ndarray], request_id: str = "") -> None:
        inputs = []
        for name, array in arrays.items():
            inputs.append(
                triton.InferInput(name, array.shape, SPECS[name].dtype.removeprefix("TYPE_").replace("STRING", "BYTES"))
            )
            inputs[-1].set_data_from_numpy(array)
        self._client.async_stream_infer("llm_small", inputs, request_id=request_id, enable_empty_final_response=True)

    def responses(self) -> Iterator[np.ndarray]:
        """The token ids of each response, until the final one; raises Triton's error."""
        while True:
            result, error = self._responses.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            ids = result.as_numpy("output_ids")
            if ids is not None and ids.size:
                assert ids.dtype == np.int32
                assert ids.shape[:2] == (1, 1)
                assert result.as_numpy("sequence_length").tolist() == [[ids.shape[2]]]
                yield ids[0, 0]
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def text(self) -> str:
        return self._tokenizer.decode([int(token_id) for ids in self.responses() for token_id in ids])


@pytest.fixture
def client(scripted_stack: Stack, tokenizer: Tokenizer) -> Iterator[Client]:
    client = Client(scripted_stack.grpc_url, tokenizer)
    yield client
    client.close()
    scripted_stack.wait_until_idle()


@pytest.fixture(scope="module")
def tokenizer(scripted_stack: Stack, artifact: Any) -> Tokenizer:
    folder = artifact("scripted") / "model_repository" / "llm_small" / "1" / "tokenizer"
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt(**fields: Any) -> str:
    return script(**fields)[0]["content"]


def refusal(client: Client) -> str:
    with pytest.raises(triton.InferenceServerException) as got:
        list(client.responses())
    return str(got.value.message())


def test_streaming(client: Client) -> None:
    client.send(prompt(text="One two three.", itl_ms=20), streaming=True)
    sizes = [len(ids) for ids in client.responses()]
    assert sum(sizes) == 5  # the end id too
    assert len(sizes) > 1


def test_whole(client: Client) -> None:
    client.send(prompt(text="One two three."))
    responses = list(client.responses())
    assert len(responses) == 1
    assert responses[0][-1] == END_ID


def test_whole_with_its_prompt(client: Client) -> None:
    client.send(prompt(text="One two three."), exclude_input_in_output=False)
    assert client.text() == prompt(text="One two three.") + "One two three."


def test_stop_by_id(client: Client, scripted_stack: Stack) -> None:
    client.send(prompt(text="x " * 500, itl_ms=20), "mine", streaming=True, request_output_len=500)
    responses = client.responses()
    next(responses)
    other = Client(scripted_stack.grpc_url, client._tokenizer)
    other.send(request_id="mine", stop=True, input_lengths=0, request_output_len=0)
    assert list(other.responses()) == []
    other.close()
    assert sum(len(ids) for ids in responses) < 200


def test_stopping_what_does_not_run_is_nothing(client: Client) -> None:
    client.send(request_id="nobody", stop=True, input_lengths=0, request_output_len=0)
    assert list(client.responses()) == []


def test_a_client_that_closes_its_stream_stops_the_engine(scripted_stack: Stack, tokenizer: Tokenizer) -> None:
    since = scripted_stack.log_length()
    client = Client(scripted_stack.grpc_url, tokenizer)
    client.send(prompt(text="x " * 500, itl_ms=20), streaming=True, request_output_len=500)
    next(client.responses())
    client.close()
    left_s = time.monotonic()
    assert scripted_stack.wait_for_log("engine_stopped", since)["monotonic_s"] - left_s < 0.5
    scripted_stack.wait_until_idle()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": True}, "stop: needs the request id of the request to stop"),
        ({"beam_width": 2}, "beam_width: this engine supports only 1 (got [2])"),
        ({"return_log_probs": True}, "return_log_probs: this engine supports only False"),
        ({"temperature": -1.0}, "temperature: -1.0 is out of range"),
        ({"request_output_len": 0}, "request_output_len: 0 is out of range; allowed is at least 1"),
        ({"len_penalty": 1.0}, "len_penalty: this engine does not support it; leave it out"),
        ({"runtime_top_p_decay": 0.5}, "runtime_top_p_decay: this engine does not support it"),
    ],
)
def test_a_refusal_names_the_tensor(client: Client, values: dict[str, Any], message: str) -> None:
    client.send("Hi", **values)
    assert message in refusal(client)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("stop_words_list", np.array([[[5], [1]]], np.int32)),
        ("bad_words_list", np.array([[[5], [1]]], np.int32)),
        ("draft_input_ids", np.array([[5, 6]], np.int32)),
        ("guided_decoding_guide", np.array([["{}"]], np.object_)),
    ],
)
def test_a_tensor_of_the_contract_that_is_not_honoured(client: Client, name: str, array: np.ndarray) -> None:
    base = {key: np.array([[1]], np.int32) for key in ("input_ids", "input_lengths", "request_output_len")}
    client.send_arrays({**base, name: array})
    assert f"{name}: this engine does not support it; leave it out" in refusal(client)


def test_a_batch_of_two_is_refused(client: Client) -> None:
    client.send("Hi", batch=2)
    assert "input_ids: shape [2, 1]; must be [1, tokens] with at least one token" in refusal(client)


def test_without_a_prompt(client: Client) -> None:
    client.send(input_lengths=1)
    assert "input_ids: required unless stop is true" in refusal(client)


def test_an_id_that_runs_already(client: Client) -> None:
    client.send(prompt(text="x " * 50, itl_ms=20), "twice", streaming=True)
    next(client.responses())
    client.send(prompt(text="y"), "twice")
    assert "request id: 'twice' is already running; use a fresh one" in refusal(client)


def test_an_engine_error_is_a_triton_error(client: Client) -> None:
    client.send(prompt(text="a b c d", fail_after=2, itl_ms=10), streaming=True)
    responses = client.responses()
    next(responses)
    with pytest.raises(triton.InferenceServerException, match="the script says fail"):
        list(responses)


def test_many_requests_on_one_stream(client: Client) -> None:
    """Triton's batcher hands over one request at a time; the engine runs them all at once."""
    count = 20
    for _ in range(count):
        client.send(prompt(text="x y z", itl_ms=50))
    started_s = time.monotonic()
    texts = [client.text() for _ in range(count)]
    assert texts == ["x y z"] * count
    assert time.monotonic() - started_s < 2.0
