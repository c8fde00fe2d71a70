"""The Triton model `complexity`, with the real classifier: conversations of five languages, through NVIDIA's client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import Stack

from orchestrator.inference_key import INFERENCE_KEY_VARIABLE
from orchestrator.routing.complexity import TIERS
from orchestrator.routing.conversation import ConversationReader, Turn
from orchestrator.triton.complexity_client import GrpcComplexity

EASY = [
    "hi",
    "What is the capital of Portugal?",
    "danke dir!",
    "Wie viele Tage hat der Februar?",
    "¿Cuál es la capital de Italia?",
    "Merci beaucoup !",
    "你好",
    "法国的首都是哪里？",
]
HARD = [
    "Prove that every finite integral domain is a field, and then classify all fields of order 16 up to isomorphism.",
    "Entwirf ein verteiltes Zahlungssystem mit Exactly-once-Semantik über drei Regionen, beweise die Invarianten bei "
    "Netzpartitionen und analysiere die Kosten.",
    "Demuestra rigurosamente el teorema de Sylow y úsalo para clasificar todos los grupos de orden 30.",
    "Démontrez rigoureusement la convergence de la méthode du gradient stochastique pour une fonction non convexe, "
    "puis donnez une borne optimale avec sa preuve.",
    "请严格证明随机梯度下降在非凸情形下的收敛速度，并构造一个例子说明该界是紧的。",
]
# R01: words that keyword rules take for code or for something hard.
TRAPS = ["The country is dealing with terrorism", "classical music"]
PASTE = "The committee met on Tuesday to discuss the annual budget and the repair of the old town hall roof. " * 45


@pytest.fixture(scope="module")
def reader(artifact: Callable[[str], Path]) -> ConversationReader:
    return ConversationReader(artifact("scripted") / "model_repository" / "complexity" / "1" / "tokenizer.json")


def judge(client: triton.InferenceServerClient, reader: ConversationReader, *turns: Turn) -> np.ndarray:
    """The probabilities [4]."""
    ids = reader.read(turns)[None]
    tensors = [triton.InferInput(name, ids.shape, "INT32") for name in ("input_ids", "attention_mask")]
    tensors[0].set_data_from_numpy(ids)
    tensors[1].set_data_from_numpy(np.ones_like(ids))
    with client as connection:
        found = connection.infer("complexity", tensors).as_numpy("probabilities")
    assert found.shape == (1, 4) and found.dtype == np.float32
    assert found.min() >= 0 and abs(found.sum() - 1) < 1e-4
    return np.asarray(found[0])


def tier(client: triton.InferenceServerClient, reader: ConversationReader, *turns: Turn) -> str:
    return TIERS[int(judge(client, reader, *turns).argmax())]


@pytest.mark.parametrize("text", EASY)
def test_what_is_easy_is_simple(scripted_stack: Stack, reader: ConversationReader, text: str) -> None:
    assert tier(scripted_stack.triton_client(), reader, Turn("user", text)) == "simple"


@pytest.mark.parametrize("text", HARD)
def test_what_is_hard_is_not(scripted_stack: Stack, reader: ConversationReader, text: str) -> None:
    assert tier(scripted_stack.triton_client(), reader, Turn("user", text)) in ("complex", "expert")


@pytest.mark.parametrize("text", TRAPS)
def test_words_that_sound_hard_are_not_enough(scripted_stack: Stack, reader: ConversationReader, text: str) -> None:
    assert tier(scripted_stack.triton_client(), reader, Turn("user", text)) in ("simple", "medium")


def test_length_is_no_measure(scripted_stack: Stack, reader: ConversationReader) -> None:  # R03
    short = judge(scripted_stack.triton_client(), reader, Turn("user", "Prove that √2 is irrational."))
    long = judge(scripted_stack.triton_client(), reader, Turn("user", f"{PASTE}\n\nWhat is the title?"))
    assert len(PASTE.split()) >= 800
    assert TIERS[int(long.argmax())] == "simple"
    assert short[:1].sum() < 0.5 and short @ range(4) > long @ range(4)


@pytest.mark.parametrize("last", ["continue", "yes, do it"])
def test_whoever_goes_on_stays_where_the_task_is(scripted_stack: Stack, reader: ConversationReader, last: str) -> None:
    task = [
        Turn("user", HARD[0]),
        Turn("assistant", "Let D be a finite integral domain. Step 1: …"),
        Turn("user", last),
    ]
    assert tier(scripted_stack.triton_client(), reader, *task) in ("complex", "expert")
    assert tier(scripted_stack.triton_client(), reader, *task[:-1], Turn("user", "thanks!")) in ("simple", "medium")


def test_the_orchestrators_way_gives_the_same(
    scripted_stack: Stack,
    reader: ConversationReader,
    artifact: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(INFERENCE_KEY_VARIABLE, scripted_stack.inference_key)

    async def ask() -> list[float]:
        complexity = GrpcComplexity(artifact("scripted"), scripted_stack.grpc_url)
        found = await asyncio.gather(*(complexity([Turn("user", text)]) for text in EASY))
        await complexity.close()
        assert all(each is not None for each in found)
        return [value for each in found if each is not None for value in each.probabilities]

    expected = [judge(scripted_stack.triton_client(), reader, Turn("user", text)) for text in EASY]
    np.testing.assert_allclose(asyncio.run(ask()), np.concatenate(expected), atol=1e-5)


def test_clients_of_different_lengths_share_batches(scripted_stack: Stack, reader: ConversationReader) -> None:
    texts = [*EASY, *HARD]
    alone = [judge(scripted_stack.triton_client(), reader, Turn("user", text)) for text in texts]
    found: dict[int, np.ndarray] = {}

    def ask(number: int) -> None:
        found[number] = judge(scripted_stack.triton_client(), reader, Turn("user", texts[number]))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(texts))]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    np.testing.assert_allclose([found[number] for number in range(len(texts))], alone, atol=1e-5)


def test_it_is_not_public(scripted_stack: Stack, reader: ConversationReader) -> None:
    with pytest.raises(triton.InferenceServerException, match="one of orchestrator, embedding"):
        judge(triton.InferenceServerClient(scripted_stack.front_url), reader, Turn("user", "hi"))
