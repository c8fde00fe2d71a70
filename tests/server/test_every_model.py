"""Every model of target `cpu`, asked past gateway and front: random tensors are refused by name, and it goes on."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from serving import Stack, running
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

NUM_REQUESTS = 60
TIMEOUT_S = 30
DTYPES = ("BOOL", "INT32", "INT64", "UINT8", "FP16", "FP32", "BYTES")
# What a refusal may name instead of a tensor: Triton's own words for a request that lacks one, or is of no shape.
TRITONS_WORDS = ("inputs", "batch", "shape", "stream")

pytestmark = pytest.mark.own_target("the models of target cpu")


@pytest.fixture(scope="module")
def stack(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(artifact("cpu"), tmp_path_factory.mktemp("every-model")) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    client = stack.triton_client()
    yield client
    client.close()


class Spec(NamedTuple):
    name: str
    data_type: int
    dims: list[int]


def random_input(dice: random.Random, spec: Spec) -> Any:
    """A tensor of that name; of the right type mostly, and of a shape that need not be."""
    right = model_config_pb2.DataType.Name(spec.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
    dtype = right if dice.random() < 0.8 else dice.choice(DTYPES)
    dims = [dice.randint(0, 3) if dim < 0 else dim for dim in spec.dims]
    shape = dims if dice.random() < 0.6 else [dice.randint(0, 3) for _ in range(dice.randint(0, 4))]
    if dtype == "BYTES":
        array = np.full(shape, dice.choice([b"", b"{", b"\xff", b"text", b'{"model": 1}']), np.object_)
    else:
        value = dice.choice([0, 1, 2, 1e4] if dtype in ("FP16", "FP32") else [0, 1, 2])
        array = np.full(shape, value).astype(triton_to_np_dtype(dtype))
    tensor = triton.InferInput(spec.name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def ask(client: triton.InferenceServerClient, model: str, inputs: list[Any], decoupled: bool) -> str | None:
    """The refusal, or None for an answer."""
    try:
        if not decoupled:
            client.infer(model, inputs, client_timeout=TIMEOUT_S)
            return None
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
        try:
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            while True:
                result, error = answers.get(timeout=TIMEOUT_S)
                if error is not None:
                    return str(error)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return None
        finally:
            client.stop_stream(cancel_requests=True)
    except triton.InferenceServerException as error:
        return str(error)


def test_random_tensors_are_refused_by_name(
    stack: Stack, client: triton.InferenceServerClient, artifact: Callable[[str], Path]
) -> None:
    folder = artifact("cpu") / "model_repository"
    models = sorted(path.name for path in folder.iterdir())
    assert {"orchestrator", "embedding", "embedding_encoder", "complexity", "ocr"} <= set(models)
    dice = random.Random(11)
    pids = stack.process_ids("/1/")
    num_refused, unnamed = 0, []
    for model in models:
        config = text_format.Parse((folder / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        batch = [1] if config.max_batch_size else []
        specs = [Spec(each.name, each.data_type, [*batch, *each.dims]) for each in config.input]
        decoupled = config.model_transaction_policy.decoupled
        known = {spec.name for spec in specs}
        for _ in range(NUM_REQUESTS):
            chosen = dice.sample(specs, dice.randint(1, min(len(specs), 4)))
            if dice.random() < 0.1:
                chosen = [*chosen, Spec("nobodys", model_config_pb2.TYPE_INT32, [1])]
            refusal = ask(client, model, [random_input(dice, spec) for spec in chosen], decoupled)
            if refusal is not None:
                num_refused += 1
                named = known | {"nobodys"} | set(TRITONS_WORDS)
                if not any(name in refusal for name in named) or "site-packages" in refusal or "/1/model.py" in refusal:
                    unnamed.append(f"{model}: {[each.name for each in chosen]}: {refusal}")
        assert client.is_model_ready(model), model
    assert not unnamed, "\n".join(unnamed)
    assert num_refused > NUM_REQUESTS
    assert stack.process_ids("/1/") == pids  # none of them was started anew
    assert stack.post(messages=[{"role": "user", "content": "Hi"}], max_tokens=2).status_code == 200
