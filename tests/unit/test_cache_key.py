"""What makes two requests the same, over random requests: every part that shapes an answer is part of the key."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache.key import Origin, identify
from orchestrator.request import ChatRequest, parse_request

TOOL = {"type": "function", "function": {"name": "look_up"}}
BASE: dict[str, Any] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
HOME = Origin("default", "auto")


def request(**fields: Any) -> ChatRequest:
    parsed = parse_request(json.dumps({**BASE, **fields}).encode())
    assert isinstance(parsed, ChatRequest)
    return parsed


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(len(contents))]
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5},
        {"seed": 1},
        {"max_tokens": 5},
        {"min_tokens": 1},
        {"stop": "."},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.1},
        {"ignore_eos": True},
        {"guided_regex": "a*"},
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"messages": talk("Why is the sky blue?", system="Answer like a pirate.")},
        {"messages": talk("Hello", "Hello!", "Why is the sky blue?")},
        {"messages": [{"role": "user", "content": "Why is the sky blue?", "name": "ann"}]},
    ],
)
def test_what_shapes_the_answer_shapes_the_partition(fields: dict[str, Any]) -> None:
    plain, other = identify(request(), HOME), identify(request(**fields), HOME)
    assert plain.partition != other.partition
    assert plain.exact_key != other.exact_key


@pytest.mark.parametrize("part", Origin._fields)
def test_origin_shapes_the_partition(part: str) -> None:
    assert identify(request(), HOME).partition != identify(request(), HOME._replace(**{part: "other"})).partition


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"user": "ann"},
        {"n": 1},
        {"messages": [{"role": "user", "content": "  Why is the sky blue?\n"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]}]},
    ],
)
def test_what_does_not_shape_the_answer_is_left_out(fields: dict[str, Any]) -> None:
    assert identify(request(**fields), HOME) == identify(request(), HOME)


def test_two_names_of_one_limit() -> None:
    assert identify(request(max_tokens=5), HOME) == identify(request(max_completion_tokens=5), HOME)
    assert identify(request(stop="."), HOME) == identify(request(stop=["."]), HOME)


def test_text_is_compared_after_nfc() -> None:
    composed, decomposed = (
        identify(request(messages=talk(unicodedata.normalize(form, "Où est le café ?"))), HOME)
        for form in ("NFC", "NFD")
    )
    assert composed == decomposed


def test_partition_is_all_but_the_last_user_turn() -> None:
    one = identify(request(), HOME)
    other = identify(request(messages=talk("Why is the sea blue?")), HOME)
    assert one.partition == other.partition
    assert one.exact_key != other.exact_key
    assert other.question == "Why is the sea blue?"


def test_what_does_not_end_in_a_question_has_none() -> None:
    turns = talk("Why?", "Because")
    assert identify(request(messages=turns), HOME).question is None
    assert (
        identify(request(messages=turns), HOME).exact_key
        != identify(request(messages=talk("Why?", "So")), HOME).exact_key
    )


TEXT = st.text(st.sampled_from('ab \n"\\,:{}[]é'), min_size=1, max_size=6).filter(str.strip)
SENT = st.fixed_dictionaries(
    {"messages": st.lists(TEXT, min_size=1, max_size=3).map(lambda texts: talk(*texts))},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "seed": st.integers(0, 3),
        "stop": st.lists(st.sampled_from(["a", "b", "ab"]), max_size=2),
        "max_tokens": st.integers(1, 3),
    },
)
ORIGIN = st.builds(Origin, TEXT, st.sampled_from(["auto", "simple"]), TEXT, TEXT)


def shape(fields: dict[str, Any]) -> Any:
    """The same by another way: what the request says, with text as it is compared."""
    messages = [(turn["role"], unicodedata.normalize("NFC", turn["content"]).strip()) for turn in fields["messages"]]
    return messages, fields.get("temperature"), fields.get("seed"), fields.get("stop") or [], fields.get("max_tokens")


@given(one=SENT, other=SENT, origin=ORIGIN, other_origin=ORIGIN)
def test_equal_keys_mean_equal_requests(
    one: dict[str, Any], other: dict[str, Any], origin: Origin, other_origin: Origin
) -> None:
    first, second = identify(request(**one), origin), identify(request(**other), other_origin)
    same = shape(one) == shape(other) and origin == other_origin
    assert (first.exact_key == second.exact_key) is same


@given(sent=SENT, tenants=st.lists(TEXT, min_size=2, max_size=2, unique=True))
def test_no_key_crosses_tenants(sent: dict[str, Any], tenants: list[str]) -> None:
    one, other = (identify(request(**sent), Origin(tenant, "auto")) for tenant in tenants)
    assert one.partition != other.partition
    assert one.exact_key != other.exact_key
