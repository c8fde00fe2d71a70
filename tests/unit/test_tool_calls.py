"""Tool calls out of text, cut at every place: what comes out does not depend on the cuts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import EngineError
from orchestrator.streaming.tool_calls import ToolFormat, create_tool_parser

NAMES = {"get_weather", "search"}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, {"a": "}"}]}}'
ARGUMENTS = '{"city": "Oslo", "days": [1, {"a": "}"}]}'


def parse(form: ToolFormat, pieces: list[str], **options: bool) -> tuple[str, list[tuple[str, str]]]:
    """All content, and name and arguments of each call; checks what every stream of deltas must hold."""
    parser = create_tool_parser(form, NAMES, **options)
    content, calls, ids = "", [], set()
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.id is not None:
                assert delta.name in NAMES
                assert delta.index == len(calls), "calls begin in order"
                ids.add(delta.id)
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1
                assert delta.name is None
                calls[-1][1] += delta.arguments
    assert len(ids) == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", "", "", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
    ("hermes", f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n", "Let me see.", [("get_weather", ARGUMENTS)]),
    (
        "hermes",
        f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name": "search", "arguments": {{}}}}</tool_call>',
        "",
        [("get_weather", ARGUMENTS), ("search", "{}")],
    ),
    ("hermes", f"<tool_call>{WEATHER}</tool_call> Done. ", " Done.", [("get_weather", ARGUMENTS)]),
    # The end mark inside a string is no end.
    (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"q": "</tool_call>"}}</tool_call>',
        "",
        [("search", '{"q": "</tool_call>"}')],
    ),
    # The other order, and arguments as a text.
    ("hermes", '<tool_call>{"arguments": {"q": 1}, "name": "search"}</tool_call>', "", [("search", '{"q": 1}')]),
    (
        "hermes",
        r'<tool_call>{"name": "search", "arguments": "{\"q\": 1}"}</tool_call>',
        "",
        [("search", '{"q": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "search"}</tool_call>', "", [("search", "{}")]),
    # What is no call of an offered function is the model's text.
    (
        "hermes",
        'a <tool_call>{"name": "rm", "arguments": {}}</tool_call> b',
        'a <tool_call>{"name": "rm", "arguments": {}}</tool_call> b',
        [],
    ),
    ("hermes", "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    ("hermes", "x < y, <tool", "x < y, <tool", []),
    ("hermes", '<tool_call>{"name": "sea', '<tool_call>{"name": "sea', []),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"q": "x', "", [("search", '{"q": "x')]),
    ("llama3", '{"name": "search", "parameters": {"q": "a;b"}}', "", [("search", '{"q": "a;b"}')]),
    ("llama3", f" {WEATHER}\n", "", [("get_weather", ARGUMENTS)]),
    (
        "llama3",
        '{"name": "search", "parameters": {}}; {"name": "search", "parameters": {"q": 2}}',
        "",
        [("search", "{}"), ("search", '{"q": 2}')],
    ),
    ("llama3", "Sure: {}", "Sure: {}", []),
    ("llama3", " \n Sure", " \n Sure", []),
    ("llama3", "  ", "  ", []),
    ("llama3", '{"name": "Bob", "age": 5} is it', '{"name": "Bob", "age": 5} is it', []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", '{"answer": 4', '{"answer": 4', []),
    ("llama3", '{"name": "search", "parameters": {"q": 1}} so', " so", [("search", '{"q": 1}')]),
    ("llama3", r'{"name": "search", "parameters": {"q": "\"}\\"}}', "", [("search", r'{"q": "\"}\\"}')]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_cut_everywhere(form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(form, [text]) == (content, calls)
    assert parse(form, list(text)) == (content, calls)
    for cut in range(len(text)):
        assert parse(form, [text[:cut], text[cut:]]) == (content, calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(
    form=st.sampled_from(["hermes", "llama3"]),
    arguments=st.lists(st.dictionaries(st.text(max_size=6), JSON, max_size=4), min_size=1, max_size=3),
    indent=st.sampled_from([None, 2]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_any_arguments_survive_any_cuts(
    form: ToolFormat, arguments: list[dict[str, Any]], indent: int | None, cuts: list[int]
) -> None:
    objects = [json.dumps({"name": "search", "arguments": each}, indent=indent) for each in arguments]
    if form == "hermes":
        text = "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in objects)
    else:
        text = "; ".join(objects)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    content, calls = parse(form, [text[start:end] for start, end in itertools.pairwise(edges)])
    assert content == ""
    assert [(name, json.loads(text)) for name, text in calls] == [("search", each) for each in arguments]


@pytest.mark.parametrize(
    "arguments",
    ["5", "null", "[1]", '"no JSON"', '"[1]"', '{"q": NaN}', "{'q': 1}", '{"q": 1,}', '{"q": 1} {}', '{"q": "a\nb"}'],
)
@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_whole_call_without_a_json_object_is_content(form: ToolFormat, arguments: str) -> None:
    text = f'{{"name": "search", "arguments": {arguments}}}'
    text = f"<tool_call>{text}</tool_call>" if form == "hermes" else text
    assert parse(form, [text], whole=True) == (text, [])
    assert parse(form, list(text), whole=True) == (text, [])
    if not arguments.startswith("{"):  # else some of it has come out
        assert parse(form, list(text)) == (text, [])


@pytest.mark.parametrize("arguments", ['{"q": NaN}', "{'q': 1}", '{"q": 1,}'])
@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_call_that_came_out_in_part_and_is_broken_is_an_error(form: ToolFormat, arguments: str) -> None:
    text = f'{{"name": "search", "arguments": {arguments}}}'
    text = f"<tool_call>{text}</tool_call>" if form == "hermes" else text
    with pytest.raises(
        EngineError, match="^the model called 'search' with arguments that are no JSON object; ask again"
    ):
        parse(form, list(text))


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_whole_calls(form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    if calls and not calls[-1][1].endswith("}"):  # cut: then it is the model's text
        content, calls = text, []
    assert parse(form, list(text), whole=True) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "hermes",
            f'a<tool_call>{WEATHER}</tool_call> b <tool_call>{{"name": "search", "arguments": {{}}}}</tool_call>',
        ),
        ("llama3", f'{WEATHER}; {{"name": "search", "parameters": {{}}}}'),
    ],
)
def test_only_one_call(form: ToolFormat, text: str) -> None:
    content = "a" if form == "hermes" else ""
    assert parse(form, [text], only_one=True) == (content, [("get_weather", ARGUMENTS)])
    assert parse(form, list(text), only_one=True) == (content, [("get_weather", ARGUMENTS)])
    parser = create_tool_parser(form, NAMES, only_one=True)
    for char in text:
        parser.push(char)
        if parser.is_over:
            break
    assert char == "}"


def test_a_cut_call_is_seen() -> None:
    parser = create_tool_parser("hermes", NAMES)
    parser.push('<tool_call>{"name": "search", "arguments": {"q"')
    parser.flush()
    assert parser.is_cut
    parser = create_tool_parser("hermes", NAMES)
    parser.push('<tool_call>{"name": "search", "arguments": {}}')
    parser.flush()
    assert not parser.is_cut


@given(text=st.text(alphabet='<tool_call>/{}":\\ nams,;', max_size=60), form=st.sampled_from(["hermes", "llama3"]))
def test_any_text_is_read_to_its_end_the_same_way_in_pieces(text: str, form: ToolFormat) -> None:
    assert parse(form, [text]) == parse(form, list(text))
