"""What OpenAI's own client can ask for: choices, log probabilities, formats, tools, completions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import NO_GUIDES, Stack, ask, script

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = {
    "medium": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "complex": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_student": {"type": "boolean"},
    },
    "required": ["name", "age", "is_student"],
    "additionalProperties": False,
}


@pytest.fixture
def scripted(scripted_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def real(cpu_stack: Stack) -> Iterator[openai.OpenAI]:
    headers = {"cache-control": "no-store"}
    with openai.OpenAI(
        base_url=f"{cpu_stack.url}/v1", api_key="none", max_retries=0, default_headers=headers
    ) as client:
        yield client


def chat(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "auto", "messages": messages, **fields})


def refusal(client: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as got:
        chat(client, ask("Hi"), **fields)
    return got.value


# --- several choices -----------------------------------------------------------------------------------------


def test_two_choices_side_by_side(scripted: openai.OpenAI) -> None:
    """Case S16."""
    texts, reasons = {}, {}
    for chunk in chat(scripted, script(text="One two three.", itl_ms=2), n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "One two three.", 1: "One two three."}
    assert reasons == {0: "stop", 1: "stop"}


def test_choices_of_the_real_model_differ(real: openai.OpenAI) -> None:
    answer = chat(real, ask("Invent a name for a dragon."), n=3, temperature=1.5, max_tokens=10, seed=1)
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == answer.rt["tokens"] > 10


# --- log probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_the_real_model(real: openai.OpenAI, stream: bool) -> None:
    answer = chat(real, ask("What is the sun?"), temperature=0, max_tokens=8, logprobs=True, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    else:
        text, entries = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == text
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    # Greedy: every token was the likeliest, so none is less likely than 1 in the vocabulary's 49,152.
    assert all(math.log(1 / 49152) < entry.logprob <= 0 for entry in entries)


def test_a_whole_answer_of_many_mebibytes(scripted: openai.OpenAI) -> None:
    """More than the messages of gRPC may have by default, and than those between our own processes had."""
    text = "#" * 160_000  # 64 to a token, each of which is some 300 bytes of JSON
    answer = chat(scripted, script(text=text), model="expert", n=8, logprobs=True, max_tokens=4000)
    assert [choice.message.content for choice in answer.choices] == [text] * 8
    assert len(answer.model_dump_json()) > 5 << 20


def test_log_probs_of_a_completion(scripted: openai.OpenAI) -> None:
    prompt = script(text="One two", log_probs=[-0.5, -1.5])[0]["content"]
    answer = scripted.completions.create(model="auto", prompt=prompt, logprobs=0)
    assert answer.choices[0].logprobs.model_dump() == {
        "tokens": ["One", " two"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": None,
        "text_offset": [0, 3],
    }


# --- guided decoding -----------------------------------------------------------------------------------------


@pytest.mark.own_target(NO_GUIDES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_shapes_the_real_models_answer(real: openai.OpenAI, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = chat(real, ask("Invent a person."), response_format=form, max_tokens=80, temperature=0, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    person = json.loads(text)
    assert set(person) == set(PERSON["properties"])
    assert isinstance(person["is_student"], bool)
    assert 0 <= person["age"] <= 99


@pytest.mark.own_target(NO_GUIDES)
def test_a_json_object(real: openai.OpenAI) -> None:
    question = ask("Give me a JSON object with one key, city, and the value Rome.")
    answer = chat(real, question, response_format={"type": "json_object"}, max_tokens=100, temperature=0)
    choice = answer.choices[0]
    # The model may go on longer than it was given; what is there is the beginning of an object.
    assert choice.message.content.lstrip().startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.own_target(NO_GUIDES)
def test_a_regex(real: openai.OpenAI) -> None:
    answer = chat(real, ask("A phone number, please."), max_tokens=20, extra_body={"guided_regex": "[0-9]{3}-[0-9]{4}"})
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}},
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"guided_regex": "(unclosed"}}, "guided_regex"),
    ],
)
def test_what_cannot_be_followed_is_the_callers_fault(real: openai.OpenAI, fields: Any, param: str) -> None:
    assert refusal(real, **fields).param == param


# --- tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CALLS)
def test_a_tool_call(scripted: openai.OpenAI, model: str) -> None:
    answer = chat(scripted, script(text=CALLS[model]), model=model, tools=[WEATHER])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)


@pytest.mark.parametrize("model", CALLS)
def test_a_tool_call_streams_as_openais_do(scripted: openai.OpenAI, model: str) -> None:
    stream = chat(scripted, script(text=CALLS[model], per_char=True), model=model, tools=[WEATHER], stream=True)
    deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
    first, *others = deltas
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id
    assert all(delta.id is None and delta.function.name is None for delta in others)
    assert json.loads("".join(delta.function.arguments for delta in deltas)) == {"city": "Oslo"}
    assert len(others) > 10  # as they are written, not at the end


def test_a_tools_result_goes_back_to_the_model(scripted: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *ask("How is the weather in Oslo?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        *script(text="It rains."),
    ]
    answer = chat(scripted, messages, model="medium", tools=[WEATHER])
    assert answer.choices[0].message.content == "It rains."


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_as_openais_client_leads_it(scripted: openai.OpenAI, stream: bool) -> None:
    """The message of each answer is appended as it came."""

    def turn(messages: list[Any], **fields: Any) -> Any:
        if not stream:
            return chat(scripted, messages, model="medium", **fields).choices[0].message
        with scripted.chat.completions.stream(model="medium", messages=messages, **fields) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    messages: list[Any] = script(text="Hello.")
    messages.append(turn(messages))
    assert messages[-1].content == "Hello."
    messages += script(text=CALLS["medium"])
    message = turn(messages, tools=[WEATHER])
    messages.append(message)
    (call,) = message.tool_calls
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    messages += script(text="It rains.")
    assert turn(messages, tools=[WEATHER]).content == "It rains."


def test_a_model_without_a_tool_parser_says_so(real: openai.OpenAI) -> None:
    error = refusal(real, tools=[WEATHER])
    assert error.param == "tools"
    assert "the model 'llm_small' has no tool parser" in error.message


# --- completions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(real: openai.OpenAI, stream: bool) -> None:
    prompt = "The capital of France is"
    answer = real.completions.create(model="auto", prompt=prompt, max_tokens=4, temperature=0, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "Paris" in "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_completion_of_token_ids_is_that_of_their_text(real: openai.OpenAI, cpu_tokenizer: Any) -> None:
    prompt = "The capital of France is"
    ids = cpu_tokenizer.encode(prompt, add_special_tokens=False).ids
    texts = {
        real.completions.create(model="auto", prompt=asked, max_tokens=4, temperature=0).choices[0].text
        for asked in (prompt, ids)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"]])
def test_a_completion_without_one_prompt(scripted: openai.OpenAI, prompt: Any) -> None:
    """Case V04."""
    with pytest.raises(openai.BadRequestError) as got:
        scripted.completions.create(model="auto", prompt=prompt)
    assert got.value.param == "prompt"
