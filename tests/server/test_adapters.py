"""LoRA adapters on the real Triton, behind a stand-in of NVIDIA's backend whose cache holds one adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_targets import ADAPTERS, render, vary
from serving import Stack, ask, running_dressed, script


@pytest.fixture(scope="module")
def stack(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("lora")
    target, models = vary("l4", "llm_small", **ADAPTERS)
    with running_dressed(render(target, models, folder), artifact("scripted"), folder) as stack:
        yield stack


def test_the_tensors_go_along_when_the_engine_lacks_them(stack: Stack) -> None:
    since = stack.log_length()
    for model in ("simple:legal", "llm_small:legal", "medium:medical", "llm_small", "simple:medical", "simple:legal"):
        answer = stack.stream(messages=script(text="One two."), model=model)
        assert (answer.text, answer.rt["model"]) == ("One two.", "llm_small"), model
    assert [line["task_id"] for line in stack.logged("adapter_taken_in", since)] == [1, 2, 1]


def test_models_are_listed_with_their_adapters(stack: Stack) -> None:
    names = {each["id"] for each in stack.get("/v1/models").json()["data"]}
    assert {"llm_small:legal", "simple:medical"} <= names
    assert not any(name.startswith("llm_large:") for name in names)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llm_small:other", "has no adapter 'other'; one of llm_small:legal, llm_small:medical"),
        ("llm_large:legal", "has no adapter 'legal'; its engine takes none"),
        ("nothing:legal", "does not exist"),
    ],
)
def test_what_is_not_there(stack: Stack, model: str, message: str) -> None:
    response = stack.post(messages=ask("Hi"), model=model)
    assert response.status_code == 404
    assert message in response.json()["error"]["message"].replace('"', "'")
