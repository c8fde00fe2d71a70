"""The engine model called directly, as a client of TensorRT-LLM's backend calls it."""

from __future__ import annotations

import itertools
import json
import queue
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import NO_GUIDES, Stack, one_instance, script
from tokenizers import Tokenizer
from tritonclient.utils import np_to_triton_dtype

from orchestrator.contracts import ENGINE_INPUTS

SPECS = {spec.name: spec for spec in ENGINE_INPUTS}
DTYPES = {
    "TYPE_BOOL": np.bool_,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_STRING": np.object_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT64": np.uint64,
}
# Held by tests/server/test_gpu_targets.py, as callers see it.
REPEATED = "NVIDIA's backend tells log probabilities of earlier tokens again in every response"
END_ID = 2
TIMEOUT_S = 20


class Client:
    """One gRPC stream to `llm_small`."""

    def __init__(self, stack: Stack, tokenizer: Tokenizer) -> None:
        self.stack = stack
        self._client = stack.triton_client()
        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))
        self._tokenizer = tokenizer

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def send(self, prompt: str = "", request_id: str = "", *, batch: int = 1, **values: Any) -> None:
        """Send a request; `values` are one-element tensors of the contract or arrays, None leaves one out."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        given = {"input_lengths": len(ids), "request_output_len": 50, "end_id": END_ID, **values}
        arrays = {
            name: value if isinstance(value, np.ndarray) else np.full((batch, 1), value, DTYPES[SPECS[name].dtype])
            for name, value in given.items()
            if value is not None
        }
        if ids:
            arrays["input_ids"] = np.array([ids] * batch, np.int32)
        self.send_arrays(arrays, request_id)

    def send_arrays(self, arrays: dict[str, np.ndarray], request_id: str = "") -> None:
        inputs = []
        for name, array in arrays.items():
            inputs.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        self._client.async_stream_infer("llm_small", inputs, request_id=request_id, enable_empty_final_response=True)

    def results(self) -> Iterator[Any]:
        """Each response with tensors, until the final one; raises Triton's error."""
        while True:
            result, error = self._responses.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            ids = result.as_numpy("output_ids")
            if ids is not None and ids.size:
                assert ids.dtype == np.int32
                assert ids.shape[:2] == (1, 1)
                assert result.as_numpy("sequence_length").tolist() == [[ids.shape[2]]]
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def responses(self) -> Iterator[np.ndarray]:
        """The token ids of each response."""
        return (result.as_numpy("output_ids")[0, 0] for result in self.results())

    def text(self) -> str:
        return self._tokenizer.decode([int(token_id) for ids in self.responses() for token_id in ids])


@pytest.fixture
def client(scripted_stack: Stack, tokenizer: Tokenizer) -> Iterator[Client]:
    client = Client(scripted_stack, tokenizer)
    yield client
    client.close()
    scripted_stack.wait_until_idle()


@pytest.fixture
def real(cpu_stack: Stack, tokenizer: Tokenizer) -> Iterator[Client]:
    """A client of the real engine."""
    client = Client(cpu_stack, tokenizer)
    yield client
    client.close()
    cpu_stack.wait_until_idle()


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


@one_instance
def test_stop_by_id(client: Client, scripted_stack: Stack) -> None:
    client.send(prompt(text="x " * 500, itl_ms=20), "mine", streaming=True, request_output_len=500)
    responses = client.responses()
    next(responses)
    other = Client(scripted_stack, client._tokenizer)
    other.send(request_id="mine", stop=True, input_lengths=0, request_output_len=0)
    assert list(other.responses()) == []
    other.close()
    assert sum(len(ids) for ids in responses) < 200


def test_stopping_what_does_not_run_is_nothing(client: Client) -> None:
    client.send(request_id="nobody", stop=True, input_lengths=0, request_output_len=0)
    assert list(client.responses()) == []


def test_a_client_that_closes_its_stream_stops_the_engine(scripted_stack: Stack, tokenizer: Tokenizer) -> None:
    since = scripted_stack.log_length()
    client = Client(scripted_stack, tokenizer)
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
        ({"return_perf_metrics": True}, "return_perf_metrics: this engine supports only False"),
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
        ("draft_input_ids", np.array([[5, 6]], np.int32)),
        pytest.param(
            *("lora_config", np.array([[[1, 2, 3]]], np.int32)),
            marks=pytest.mark.own_target("engines of GPU targets may have adapters"),
        ),
    ],
)
def test_a_tensor_of_the_contract_that_is_not_honoured(client: Client, name: str, array: np.ndarray) -> None:
    base = {key: np.array([[1]], np.int32) for key in ("input_ids", "input_lengths", "request_output_len")}
    client.send_arrays({**base, name: array})
    assert f"{name}: this engine does not support it; leave it out" in refusal(client)


def test_a_batch_of_two_is_refused(client: Client) -> None:
    client.send("Hi", batch=2)
    assert "input_ids: shape [2, 1]; must be [1, tokens] with at least one token" in refusal(client)


@pytest.mark.own_target("its words are those of engines of ours; a stand-in has NVIDIA's")
def test_without_a_prompt(client: Client) -> None:
    client.send(input_lengths=1)
    assert "input_ids: required unless stop is true" in refusal(client)


@one_instance
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


# --- stop words, log probabilities, guides -------------------------------------------------------------------


def words(*ids: list[int]) -> np.ndarray:
    """[1, 2, n]: all ids, and where each word ends."""
    flat = list(itertools.chain(*ids))
    ends = list(itertools.accumulate(map(len, ids)))
    return np.array([[flat, ends + [-1] * (len(flat) - len(ends))]], np.int32)


def guided(guide_type: str, guide: str | None = None) -> dict[str, np.ndarray]:
    texts = {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}
    return {name: np.array([[text]], np.object_) for name, text in texts.items() if text is not None}


def test_stop_words(client: Client) -> None:
    client.send(prompt(token_ids=[[5], [6], [7], [8]]), stop_words_list=words([9, 9], [6, 7]))
    assert [ids.tolist() for ids in client.responses()] == [[5, 6, 7]]


@pytest.mark.own_target(REPEATED)
def test_log_probs(client: Client) -> None:
    script = prompt(token_ids=[[5], [6, 7]], log_probs=[-1.0, -2.0, -0.5], itl_ms=20)
    client.send(script, streaming=True, return_log_probs=True)
    got = [
        (result.as_numpy("output_log_probs").tolist(), result.as_numpy("cum_log_probs").tolist())
        for result in client.results()
    ]
    assert got == [([[[-1.0]]], [[-1.0]]), ([[[-2.0, -0.5]]], [[-3.5]])]


def test_without_asking_there_are_no_log_probs(client: Client) -> None:
    client.send(prompt(text="x"))
    (result,) = client.results()
    assert result.as_numpy("output_log_probs") is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_words_list": np.array([[[5], [2]]], np.int32)}, "stop_words_list: ends [2]; must ascend"),
        ({"stop_words_list": words([49152])}, "stop_words_list: ids must be 0 to 49151"),
        ({"bad_words_list": words([5])}, "bad_words_list: the scripted engine cannot avoid words; leave it out"),
        pytest.param(
            guided("xml", "<a/>"),
            "guided_decoding_guide_type: 'xml'; must be one of json, json_schema, regex, ebnf_gr",
            marks=pytest.mark.own_target(NO_GUIDES),
        ),
        pytest.param(
            *(guided("regex", "a" * 1025), "guided_decoding_guide: 1025 bytes; regex may have 1024"),
            marks=pytest.mark.own_target(NO_GUIDES),
        ),
    ],
)
def test_a_malformed_one_is_refused_by_name(client: Client, values: dict[str, Any], message: str) -> None:
    client.send("Hi", **values)
    assert refusal(client).startswith(message)


def test_random_tensors_leave_the_server_alive(client: Client) -> None:
    """Names of the contract with shapes and types that need not be: each request ends, and the next one is served."""
    dice = random.Random(7)
    for _ in range(100):
        arrays = {key: np.array([[1]], np.int32) for key in ("input_ids", "input_lengths", "request_output_len")}
        for spec in dice.sample(ENGINE_INPUTS, dice.randint(1, 3)):
            dtype = DTYPES[spec.dtype if dice.random() < 0.8 else dice.choice(list(DTYPES))]
            dims = [dice.randint(0, 3) if dim == -1 else dim for dim in spec.dims]
            shape = [1, *dims] if dice.random() < 0.7 else [dice.randint(0, 3) for _ in range(dice.randint(0, 4))]
            arrays[spec.name] = np.full(
                shape, dice.choice(["json", "{"]) if dtype is np.object_ else dice.randint(0, 2)
            )
            arrays[spec.name] = arrays[spec.name].astype(dtype)
        client.send_arrays(arrays, "random")
        try:
            list(client.results())
        except triton.InferenceServerException as error:
            assert error.message()
    client.send(prompt(text="still here"))
    assert client.text() == "still here"


# --- the real engine -----------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace", "Alan"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "<|im_start|>user\nInvent a person.<|im_end|>\n<|im_start|>assistant\n"


def test_the_real_engine_stops_at_a_word(real: Client) -> None:
    real.send(QUESTION, request_output_len=20)
    whole = [int(token_id) for ids in real.responses() for token_id in ids]
    word = whole[5:7]
    expected = next(whole[:end] for end in range(2, 8) if whole[end - 2 : end] == word)
    real.send(QUESTION, request_output_len=20, stop_words_list=words([49151], word), streaming=True)
    assert [int(token_id) for ids in real.responses() for token_id in ids] == expected


@pytest.mark.own_target(REPEATED)
def test_the_real_engines_log_probs(real: Client) -> None:
    real.send(QUESTION, request_output_len=8, streaming=True, return_log_probs=True)
    total = 0.0
    for result in real.results():
        log_probs = result.as_numpy("output_log_probs")
        assert log_probs.shape == result.as_numpy("output_ids").shape
        assert (log_probs < 0).all()
        total += log_probs.sum()
        assert result.as_numpy("cum_log_probs") == pytest.approx(total, rel=1e-5)


@pytest.mark.own_target(NO_GUIDES)
@pytest.mark.parametrize("sampled", [False, True])
def test_the_real_engine_follows_a_guide(real: Client, sampled: bool) -> None:
    values = {"temperature": 1.5, "runtime_top_p": 0.95, "seed": 5} if sampled else {}
    real.send(QUESTION, request_output_len=200, **values, **guided("json_schema", json.dumps(PERSON)))
    person = json.loads(real.text())
    assert {name: type(value) for name, value in person.items()} == {"name": str, "age": int}
    real.send(QUESTION, request_output_len=20, **values, **guided("json"))
    assert real.text().startswith("{")  # without a schema it need not end soon
    real.send(QUESTION, **values, return_log_probs=True, **guided("regex", r"[0-9]{3}-[0-9]{4}"))
    assert re.fullmatch(r"\d{3}-\d{4}", real.text())
    real.send(QUESTION, **values, **guided("ebnf_grammar", 'root ::= "yes" | "no"'))
    assert real.text() in ("yes", "no")


@pytest.mark.own_target(NO_GUIDES)
@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (("regex", "(a{1,1000}){1,1000}{9}{9}{9}"), "guided_decoding_guide: "),
        (("regex", "(((((a?){9}){9}){9}){9}){9}"), "guided_decoding_guide: counts up to 6561 characters"),
        (("regex", ".{0,3000}"), "guided_decoding_guide: takes more than "),
        (("regex", r"(\D*)*(\D*)*"), "guided_decoding_guide: takes more than "),  # soon compiled, and followed for ever
        # Costs 19 ms a token on a fast machine; a slow one does not even come to try it.
        (("regex", "(a|aa|aaa|[a-z]{1,9}){1,20}"), "guided_decoding_guide: "),
        (("json_schema", '{"type": "nonsense"}'), 'guided_decoding_guide.type: "nonsense"; must be one'),
        (("ebnf_grammar", "a ::= b"), "guided_decoding_guide: EBNF parser error"),
    ],
)
def test_a_hostile_guide_is_refused_and_delays_nobody(real: Client, guide: tuple[str, str], message: str) -> None:
    other = Client(real.stack, real._tokenizer)
    other.send(QUESTION, request_output_len=4000, end_id=None, streaming=True)  # longer than any of them takes
    responses = other.responses()
    next(responses)
    real.send("Hi", **guided(*guide))
    began_s = time.monotonic()
    num_tokens = 0
    while real._responses.empty():
        num_tokens += len(next(responses))
    waited_s = time.monotonic() - began_s
    other.close()
    assert refusal(real).startswith(message)
    assert num_tokens > 1.5 * waited_s  # compiled inside a step, there would be one or two tokens in all


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_words_list": words([5])}, "bad_words_list: OpenVINO GenAI cannot avoid words; leave it out"),
        pytest.param(
            *({"end_id": None, **guided("json")}, "guided_decoding_guide_type: needs end_id"),
            marks=pytest.mark.own_target(NO_GUIDES),
        ),
    ],
)
def test_what_the_real_engine_cannot_do(real: Client, values: dict[str, Any], message: str) -> None:
    real.send("Hi", **values)
    assert refusal(real).startswith(message)
