"""A regular expression becomes a grammar of the texts that it matches as a whole, or is refused with what it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import grammars, regexes
from orchestrator.errors import InvalidRequestError
from orchestrator.regexes import to_grammar

FOLLOWED = [
    ("ab", "([a] [b])"),
    ("^a$", "[a]"),
    (r"\A(?:a|b)\Z", "[a-b]"),
    ("^(ab|c$)", "(apart ([a] [b]) | apart [c])"),
    ("a*b+?c{2}d{,3}", "([a]*) ([b]+) ([c]{2,2}) ([d]{0,3})"),
    ("(a*)*", "(([a]*)*)"),
    ("(?P<x>a){2,}", "([a]{2,})"),
    ("()", '""'),
    ("a{0}", '""'),
    (r"[\]^-]", r"[\u002d\u005d-\u005e]"),
    (r"\d[\w]", "([0-9] [0-9A-Z_a-z])"),
]
REFUSED = [
    ("(unclosed", "is no regular expression: missing )"),
    ("*", "is no regular expression: nothing to repeat"),
    ("[[a]]", "is no regular expression: Possible nested set"),
    ("a{1,99999999999}", "is no regular expression: the repetition number is too large"),
    ("a^b", "has an anchor that is not at the start or the end"),
    ("a$b", "has an anchor"),
    (r"\bword\b", "has an anchor"),
    ("(a$)b", "has an anchor"),
    ("(?=a)b", "has lookaround"),
    ("(?<!a)b", "has lookaround"),
    (r"(a)\1", "has a reference back to a group"),
    ("(a)?(?(1)b|c)", "has a condition on a group"),
    ("(?i)a", "sets flags"),
    ("(?s:.)", "sets flags"),
    (r"[^\s\S]", "allows no character that a text can hold"),
    (r"\ud800", "allows no character that a text can hold"),
    (r"a\x00", "allows no character that a text can hold"),
    ("(a{1,900}){1,1000}", "counts up to 900000 characters or values; at most 4096 are allowed"),
    ("(((((a?){9}){9}){9}){9}){9}", "counts up to 6561 characters"),
    ("(" * 40 + "a" + ")" * 40, "nests too deep; at most 32"),
    ("(" * 500 + "a" + ")" * 500, "nests too deep; at most 32"),
]


@pytest.mark.parametrize(("regex", "grammar"), FOLLOWED)
def test_followed(regex: str, grammar: str) -> None:
    rest = 'apart ::= ""\n' if "apart" in grammar else ""
    assert to_grammar(regex, "r") in (f"root ::= {grammar}\n{rest}", f"root ::= ({grammar})\n{rest}")


@pytest.mark.parametrize(("regex", "message"), REFUSED)
def test_refused(regex: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as got:
        to_grammar(regex, "r")
    assert got.value.message.startswith(f"r: {message}")
    assert got.value.param == "r"


def test_a_class_beyond_ascii_is_a_rule_of_its_own_in_pieces_that_utf8_has() -> None:
    grammar = to_grammar("a[é-深]+[\U0001f600]é", "r")
    assert grammar.splitlines() == [
        "root ::= ([a] (class0) class1 class2)",
        r"class0 ::= [\u00e9-\u00ff\u0100-\u07ff\u0800-\u0fff\u1000-\u5fff\u6000-\u6df1]+",
        r"class1 ::= [\U0001f600]",
        r"class2 ::= [\u00e9]",
    ]


def characters(grammar: str) -> str:
    return grammar.removeprefix("root ::= ").strip()


def test_a_class_is_what_python_and_ecmascript_both_mean() -> None:
    assert characters(to_grammar(r"[^\d]", "r")) == characters(to_grammar(r"[^\d\u0080-\U0010ffff]", "r"))
    assert characters(to_grammar(r"[^\D]", "r")) == "[0-9]"
    assert r"\u2028" not in to_grammar(".", "r")
    assert r"\u3000" not in to_grammar(r"\S", "r")


@given(st.text(max_size=30) | st.text("ab()[]{}|*+?\\^$.0123,-:=!<>dwsSDWbBAZiP", max_size=30))
def test_any_text_is_taken_or_refused(regex: str) -> None:
    try:
        grammar = to_grammar(regex, "r")
    except InvalidRequestError as error:
        assert error.message.startswith("r: ")
    else:
        assert grammar.isascii()
        assert len(grammar) <= grammars.MAX_BYTES + len("root ::= \n")


def test_how_long_the_texts_are() -> None:
    assert regexes.parse("a{2,3}(?:bc|d)?")[1:] == (2, 5)
