"""The scripted engine does what the prompt says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from orchestrator.engines import Chunk, EngineRefusal, EngineRequest, create_stepper
from orchestrator.engines.scripted import DEFAULT_LOG_PROB, DEFAULT_TEXT, ScriptedStepper, Settings

END_ID = 2
PARAMETERS = {"engine": "scripted", "max_batch_size": "8", "context_window": "8192", "vocab_size": "49152"}


@pytest.fixture
def stepper(tokenizer: Tokenizer) -> ScriptedStepper:
    return ScriptedStepper(tokenizer, Settings.model_validate(PARAMETERS))


@pytest.fixture
def add(stepper: ScriptedStepper, tokenizer: Tokenizer) -> Any:
    def add(
        prompt: str, request_id: str = "id", max_new_tokens: int = 100, end_id: int | None = END_ID, **fields: Any
    ) -> None:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        stepper.add(EngineRequest(request_id, ids, max_new_tokens, end_id, **fields))

    return add


def script(**fields: Any) -> str:
    return f"Please #script {json.dumps(fields)} thanks"


def run(stepper: ScriptedStepper, request_id: str = "id") -> list[Chunk]:
    chunks = []
    while stepper.has_requests():
        chunks += [chunk for key, chunk in stepper.step().items() if key == request_id]
    return chunks


def text_of(tokenizer: Tokenizer, chunks: list[Chunk]) -> str:
    return tokenizer.decode([token_id for chunk in chunks for token_id in chunk.token_ids])


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Hi", DEFAULT_TEXT),
        (script(text="Well, 深度."), "Well, 深度."),
        (script(text="first") + script(text="last"), "last"),
        (script(text='a "quoted" {brace}\n'), 'a "quoted" {brace}\n'),
        (script(text=""), ""),
    ],
)
def test_the_text(stepper: ScriptedStepper, tokenizer: Tokenizer, add: Any, prompt: str, text: str) -> None:
    add(prompt)
    chunks = run(stepper)
    assert text_of(tokenizer, chunks) == text
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * len(chunks)
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].token_ids == [END_ID]


def test_one_character_a_step(stepper: ScriptedStepper, tokenizer: Tokenizer, add: Any) -> None:
    add(script(text="abc", per_char=True))
    assert [tokenizer.decode(chunk.token_ids) for chunk in run(stepper)] == ["a", "b", "c", ""]


def test_token_ids_as_they_are(stepper: ScriptedStepper, add: Any) -> None:
    add(script(token_ids=[[5], [6, 7], []]))
    assert run(stepper) == [Chunk([5]), Chunk([6, 7]), Chunk([], finished=True)]


def test_the_limit_cuts(stepper: ScriptedStepper, add: Any) -> None:
    add(script(token_ids=[[5], [6, 7], [8]]), max_new_tokens=2)
    assert run(stepper) == [Chunk([5]), Chunk([6], finished=True)]


def test_stop_words_cut(stepper: ScriptedStepper, add: Any) -> None:
    add(script(token_ids=[[5], [6, 7], [8]]), stop_words=[[9], [5, 6]])
    assert run(stepper) == [Chunk([5]), Chunk([6], finished=True)]


def test_log_probs(stepper: ScriptedStepper, add: Any) -> None:
    add(script(token_ids=[[5], [6, 7], [8], []], log_probs=[-1.5, -2.5]), log_probs=True)
    assert run(stepper) == [
        Chunk([5], log_probs=[-1.5]),
        Chunk([6, 7], log_probs=[-2.5, DEFAULT_LOG_PROB]),
        Chunk([8], log_probs=[DEFAULT_LOG_PROB]),
        Chunk([], finished=True, log_probs=[]),
    ]
    add(script(token_ids=[[5]], log_probs=[-1.5]))
    assert run(stepper) == [Chunk([5], finished=True)]


def test_a_guide_is_not_followed(stepper: ScriptedStepper, tokenizer: Tokenizer, add: Any) -> None:
    add(script(text="abc"), guide_type="regex", guide="[0-9]+")
    assert text_of(tokenizer, run(stepper)) == "abc"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": [[5]]}, "bad_words_list: the scripted engine cannot avoid words; leave it out"),
        ({"stop_words": [[49152]]}, "stop_words_list: ids must be 0 to 49151"),
    ],
)
def test_what_it_cannot_do_is_refused(stepper: ScriptedStepper, add: Any, fields: Any, message: str) -> None:
    with pytest.raises(EngineRefusal, match=f"^{message}$"):
        add("Hi", **fields)
    assert not stepper.has_requests()


def test_without_an_end_id(stepper: ScriptedStepper, tokenizer: Tokenizer, add: Any) -> None:
    add(script(text="a b"), end_id=None)
    chunks = run(stepper)
    assert text_of(tokenizer, chunks) == "a b"
    assert chunks[-1].finished


@pytest.mark.parametrize("fail_after", [0, 1, 2])
def test_failing(stepper: ScriptedStepper, add: Any, fail_after: int) -> None:
    add(script(text="a b c d", fail_after=fail_after))
    chunks = run(stepper)
    assert len(chunks) == fail_after + 1
    assert chunks[-1] == Chunk([], finished=True, error="the script says fail")


def test_dying(stepper: ScriptedStepper, add: Any) -> None:
    add(script(text="a b c", die_after=1))
    with pytest.raises(RuntimeError, match="the script says die"):
        run(stepper)


def test_hanging(stepper: ScriptedStepper, add: Any) -> None:
    started_s = time.monotonic()
    add(script(text="a", hang_ms=50))
    assert time.monotonic() - started_s >= 0.05  # whoever else runs waits too
    assert run(stepper)[-1].finished


def test_times(stepper: ScriptedStepper, add: Any) -> None:
    started_s = time.monotonic()
    add(script(token_ids=[[5], [6], [7]], first_token_ms=60, itl_ms=20))
    came_s = []
    while stepper.has_requests():
        came_s += [time.monotonic() - started_s for _ in stepper.step()]
    assert came_s[0] >= 0.060
    assert came_s[-1] >= 0.100


def test_others_go_on_and_a_stopped_one_is_silent(stepper: ScriptedStepper, add: Any) -> None:
    add(script(token_ids=[[5]] * 50, itl_ms=2), request_id="slow")
    add(script(token_ids=[[6], [7]]), request_id="quick")
    seen: list[str] = []
    while "quick" not in seen:
        seen += [key for key, chunk in stepper.step().items() if chunk.finished]
    stepper.stop("slow")
    assert not stepper.has_requests()
    add(script(token_ids=[[8]]), request_id="next")
    assert run(stepper, "next") == [Chunk([8], finished=True)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ('#script {"text": ', "input_ids: the prompt's script is not JSON: "),
        ("#script nothing", "input_ids: the prompt's script is not JSON: "),
        (script(txt="x"), "input_ids: the prompt's script is wrong: "),
        (script(text="x", itl_ms=-1), "input_ids: the prompt's script is wrong: "),
    ],
)
def test_a_wrong_script_is_refused(stepper: ScriptedStepper, add: Any, prompt: str, message: str) -> None:
    with pytest.raises(EngineRefusal, match=f"^{message}"):
        add(prompt)
    assert not stepper.has_requests()


# --- settings of the target's row ----------------------------------------------------------------------------


def test_it_is_created_by_name(tokenizer_dir: Path) -> None:
    assert isinstance(create_stepper(PARAMETERS, tokenizer_dir.parent), ScriptedStepper)


def test_an_engine_that_does_not_exist(tmp_path: Path) -> None:
    message = "parameters.engine: 'llama' is not an engine; one of 'openvino', 'scripted', 'vllm'"
    with pytest.raises(ValueError, match=message):
        create_stepper({**PARAMETERS, "engine": "llama"}, tmp_path)


@pytest.mark.parametrize(("key", "value"), [("itl", "5"), ("itl_ms", "-5"), ("vocab_size", "many")])
def test_a_wrong_parameter_is_named(tokenizer_dir: Path, key: str, value: str) -> None:
    with pytest.raises(ValidationError, match=key):
        create_stepper({**PARAMETERS, key: value}, tokenizer_dir.parent)
