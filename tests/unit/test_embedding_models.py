"""The Triton models of the embedder, in process: batches taken apart and answered one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_pb_utils import InferenceResponse, Request, Tensor, TritonError
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from orchestrator.contracts import EMBEDDING
from orchestrator.triton.embedding_models import EmbeddingTokenizerModel, EncoderModel


def arguments(artifact: Path, name: str) -> dict[str, str]:
    folder = artifact / "model_repository" / name
    config = text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    return {
        "model_repository": str(folder),
        "model_version": "1",
        "model_config": json.dumps({"parameters": parameters}),
    }


@pytest.fixture(scope="module")
def tokenizer_model(artifact: Callable[[str], Path]) -> EmbeddingTokenizerModel:
    return EmbeddingTokenizerModel(arguments(artifact("scripted"), "embedding_tokenizer"))


@pytest.fixture(scope="module")
def encoder_model(artifact: Callable[[str], Path]) -> EncoderModel:
    return EncoderModel(arguments(artifact("scripted"), "embedding_encoder"), EMBEDDING)


def ask(*texts: bytes) -> Request:
    return Request([Tensor("text", np.array([[text] for text in texts], dtype=np.object_))])


def outputs(response: InferenceResponse) -> dict[str, np.ndarray]:
    assert not response.has_error(), response.error()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def refusal(response: InferenceResponse) -> dict[str, Any]:
    error = response.error()
    assert error is not None and error.code() == TritonError.INVALID_ARG
    return dict(json.loads(error.message())["error"])


def test_each_request_is_padded_by_itself(tokenizer_model: EmbeddingTokenizerModel) -> None:
    short, both, blank = map(
        outputs, tokenizer_model.execute([ask(b"Hello"), ask(b"Hello", b"hello " * 20), ask(b" ")])
    )
    assert short["input_ids"].tolist() == [[101, 7592, 102] + [0] * 13]
    assert short["attention_mask"].tolist() == [[1] * 3 + [0] * 13]
    assert short["num_tokens"].tolist() == [[3]]
    assert both["input_ids"].shape == both["attention_mask"].shape == (2, 32)
    assert both["num_tokens"].tolist() == [[3], [22]]
    assert blank["num_tokens"].tolist() == [[2]]
    assert {array.dtype for array in short.values()} == {np.dtype(np.int32)}


def test_one_refusal_leaves_the_others_alone(tokenizer_model: EmbeddingTokenizerModel) -> None:
    requests = [ask(b"word " * 254), ask(b"word " * 255), ask(b"\xff"), ask(b"a", b"\xff"), ask(b" " * 32769), ask(b"")]
    fits, too_long, no_text, second, too_large, empty = tokenizer_model.execute(requests)
    assert outputs(fits)["num_tokens"].tolist() == [[256]]
    assert refusal(too_long)["message"].startswith("text: has 257 tokens; the embedder takes at most 256")
    assert refusal(no_text)["message"].startswith("text: must be UTF-8")
    assert refusal(empty)["message"] == "text: must not be empty"
    assert refusal(second)["param"] == "text[1]"
    assert (
        "has 32769 bytes; the embedder takes at most 256 tokens, in at most 32768 bytes"
        in refusal(too_large)["message"]
    )


def tokens(length: int, count: int = 1) -> Request:
    """Random ones, the last two being padding."""
    ids = np.random.default_rng(length).integers(1000, 30000, (count, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[:, -2:] = 0
    return Request([Tensor("input_ids", ids), Tensor("attention_mask", mask)])


def only_response(request: Request) -> InferenceResponse:
    ((response, is_final),) = request.sender.sent
    assert is_final and response is not None
    return response


def test_a_batch_gives_what_each_would_get(encoder_model: EncoderModel) -> None:
    shapes = ((16, 1), (64, 1), (16, 3), (32, 2), (16, 2))
    together = [tokens(*shape) for shape in shapes]
    encoder_model.execute(together)
    for request, shape in zip(together, shapes):
        found = outputs(only_response(request))["embedding"]
        assert found.shape == (shape[1], 384) and found.dtype == np.float32
        alone = tokens(*shape)
        encoder_model.execute([alone])
        np.testing.assert_allclose(found, outputs(only_response(alone))["embedding"], atol=1e-6)


def test_the_shortest_have_their_answers_first(encoder_model: EncoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [tokens(64), tokens(16), tokens(32), tokens(16)]
    runs: list[tuple[int, list[int]]] = []

    def encode(input_ids: np.ndarray, _: np.ndarray) -> np.ndarray:
        runs.append((len(input_ids), [len(request.sender.sent) for request in requests]))
        return np.zeros((len(input_ids), 384), np.float32)

    monkeypatch.setattr(encoder_model._encoder, "encode", encode)
    encoder_model.execute(requests)
    assert runs == [(2, [0, 0, 0, 0]), (1, [0, 1, 0, 1]), (1, [0, 1, 1, 1])]


def test_beyond_the_window_is_refused(encoder_model: EncoderModel) -> None:
    too_long, fits = tokens(257), tokens(16)
    encoder_model.execute([too_long, fits])
    assert refusal(only_response(too_long))["param"] == "input_ids"
    assert not only_response(fits).has_error()


def test_a_wrong_request_is_refused_by_itself(encoder_model: EncoderModel) -> None:
    def request(ids: np.ndarray, mask: np.ndarray) -> Request:
        return Request([Tensor("input_ids", ids), Tensor("attention_mask", mask)])

    ones = np.ones((1, 16), np.int32)
    good, unknown = tokens(16), request(ones * 1_000_000, ones)
    empty, other = request(ones[:, :0], ones[:, :0]), request(ones, ones[:, :3])
    encoder_model.execute([empty, good, unknown, other])
    assert outputs(only_response(good))["embedding"].shape == (1, 384)
    named = "must be [texts, tokens] with at least one of each"
    assert refusal(only_response(empty))["message"] == f"input_ids: shape [1, 0]; {named}"
    assert refusal(only_response(other))["message"].startswith(
        "attention_mask: shape [1, 3]; must be that of input_ids"
    )
    error = only_response(unknown).error()
    assert error is not None and "input_ids: could not be computed" in error.message()
