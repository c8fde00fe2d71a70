"""Engines of text: cumulative answers, requests by NVIDIA's contract, prompts that mean what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from orchestrator.contracts import TEXT_ENGINE_INPUTS, TEXT_ENGINE_OUTPUTS
from orchestrator.engines import EngineRequest
from orchestrator.errors import EngineError, InvalidRequestError
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.triton.text_client import _advance, build_request
from orchestrator.wire import read_strings, stop_text_request

SPECS = {spec.name: spec for spec in TEXT_ENGINE_INPUTS}
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|> {{ m.content }}{% endfor %}"


def make_tokenizer(*, adds_bos: bool) -> ChatTokenizer:
    """Words, and control tokens that its template writes; a library puts `<s>` before each text if it is told to."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "there": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<|user|>")])
    if adds_bos:
        ids = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return ChatTokenizer(tokenizer, TEMPLATE, {"bos_token": "<s>"})


@pytest.mark.parametrize(("adds_bos", "text"), [(True, "<|user|> hello there"), (False, "<s><|user|> hello there")])
def test_a_prompt_has_its_first_token_once(adds_bos: bool, text: str) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    messages = [{"role": "user", "content": "hello there"}]
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.write_chat(messages, ids) == text
    assert tokenizer.encode_whole(text) == ids
    assert ids.count(3) == 1


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_control_token_in_a_message_has_no_text(adds_bos: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    messages = [{"role": "user", "content": "hello <|user|> there"}]
    with pytest.raises(InvalidRequestError, match="messages: they hold the text of a control token"):
        tokenizer.write_chat(messages, tokenizer.encode_chat(messages))


@given(st.text(max_size=30), st.data())
def test_what_is_new_adds_up_to_the_whole(text: str, data: st.DataObject) -> None:
    """However the bytes are cut: an unfinished character is a replacement character, and is held."""
    whole = text.rstrip("\ufffd").encode()
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=5).map(sorted))
    said = joined = ""
    for end in [*cuts, len(whole)]:
        delta, said = _advance(said, whole[:end].decode(errors="replace"), is_last=end == len(whole))
        joined += delta
    assert joined == whole.decode()


def test_an_answer_that_is_taken_back() -> None:
    assert _advance("ab", "abc", is_last=False) == ("c", "abc")
    assert _advance("ab", "a", is_last=True) == ("", "ab")  # an end that is trimmed
    with pytest.raises(EngineError, match="took back"):
        _advance("ab", "ax", is_last=True)


def test_requests_are_of_nvidia_s_contract() -> None:
    request = EngineRequest("id", [1, 2], 7, sample=True, top_k=5, seed=3, presence_penalty=0.5, prompt="héllo")
    message = build_request("m", request)
    for tensor in message.inputs:
        spec = SPECS[tensor.name]
        assert tensor.datatype == {"TYPE_STRING": "BYTES"}.get(spec.dtype, spec.dtype.removeprefix("TYPE_"))
        assert list(tensor.shape) == [1]
    assert read_strings(message.raw_input_contents[0]) == ["héllo".encode()]
    sent = {tensor.name for tensor in message.inputs}
    assert {spec.name for spec in TEXT_ENGINE_INPUTS if not spec.optional} <= sent
    assert "sampling_param_exclude_input_from_output" in sent  # NVIDIA's default is to echo the prompt
    assert "sampling_param_stop" not in sent
    assert {each.name for each in message.outputs} <= {spec.name for spec in TEXT_ENGINE_OUTPUTS}
    greedy = {tensor.name for tensor in build_request("m", EngineRequest("id", [1], 7, prompt="x")).inputs}
    assert "sampling_param_temperature" not in greedy and "sampling_param_top_k" in greedy
    assert [each.name for each in stop_text_request("m", "id").inputs] == ["text_input", "stop"]
