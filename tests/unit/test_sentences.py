"""Sentences out of a text that is still coming."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.streaming.sentences import MAX_CHARACTERS, SentenceCutter


def cut(*parts: str) -> list[str]:
    cutter = SentenceCutter()
    return [piece for part in parts for piece in cutter.push(part)] + cutter.flush()


@pytest.mark.parametrize(
    "sentences",
    [
        ["My birthday is Jan 1, 1980. ", "Another sentence."],
        ["It costs $3.14. ", "Next."],
        ["It costs $3.14."],
        ["It costs $3.14 and 1,234.56 € in all. ", "Cheap."],
        ["I was born on Jan. 1, 1980, at 5.30 a.m. ", "It was cold."],
        ['Set ratio="1.05" there. ', "Done."],
        ["(It is done.) ", "Then we left."],
        ["(See above… done.)"],
        ["(We are done.) ", "Next."],
        ['Ratio="1.05". ', "Next."],
        ["At 98.6°F. ", "Then 37.0 °C."],
        ["It is 98.6°F today. ", "Hot!"],
        ["It weighs 3.5 kg. ", "The box weighs 1.2 lbs. ", "It is light."],
        ["Dr. Smith met J. R. R. Tolkien at 5 p.m. ", "They talked."],
        ["The U.S. Army came. ", "It left."],
        ["She lives in Washington, D.C. ", "It rains."],
        ["Take fruit, e.g. apples. ", "Or pears."],
        ["Take fruit, e.g. Granny Smith. ", "Or pears."],
        ["Wait... what? ", "No! ", "Yes."],
        ["1. First item\n", "2. Second item\n"],
        ['He said "Stop." ', "Then he left."],
        ["**Note.** ", "It is bold."],
        ["Visit example.com or https://a.example/b.html?c=d. ", "It runs v1.2.3 now."],
        ["In 1999. ", "Then 2000 came."],
        ["Plan B. ", "Then we rest."],
        ["我喜欢你。", "你呢？", "好"],
        ["¿Qué hora es? ", "¡Son las tres! ", "La Sra. García llega a las 3.30 h. ", "Bien."],
        ["Das kostet z.B. Geld. ", "Er weiß es."],
        ["Title\n\n", "First line. ", "Second."],
        ["Really?! ", "Yes."],
        ["The answer is no. ", "Peter came in. ", "He took No. 5 of vol. 2."],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    text = "".join(sentences)
    assert cut(text) == cut(*text) == sentences


def test_a_sentence_comes_as_soon_as_the_next_begins() -> None:
    cutter = SentenceCutter()
    assert cutter.push("It costs $3.") == []
    assert cutter.push("14.") == []
    assert cutter.push(" ") == []
    assert cutter.push("N") == ["It costs $3.14. "]
    assert cutter.flush() == ["N"]


def test_a_bracket_that_closes_later_belongs_to_the_sentence() -> None:
    cutter = SentenceCutter()
    assert cutter.push("(It is done.") == []
    assert cutter.push(")") == []
    assert cutter.push(" Next") == ["(It is done.) "]


@pytest.mark.parametrize(("text", "first"), [("word " * 200, 400), ("word, " * 200, 396), ("x" * 1000, 400)])
def test_what_has_no_end_is_cut_all_the_same(text: str, first: int) -> None:
    pieces = cut(*text)
    assert len(pieces[0]) == first
    assert max(map(len, pieces)) <= MAX_CHARACTERS
    assert "".join(pieces) == text


# Marks, spaces and abbreviations far more often than in language.
TEXT = st.lists(
    st.sampled_from(
        [*"abAB19.!?…。,;: \n\"')(“”*", "  ", "Dr.", "e.g.", "U.S.", "p.m.", "The ", "...", "3.14", "word " * 90]
    ),
    max_size=60,
).map("".join) | st.text(max_size=900)


@given(TEXT, st.data())
def test_cuts_do_not_depend_on_how_the_text_comes(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]
    pieces = cut(*parts)
    assert pieces == cut(text) == cut(*text)
    assert "".join(pieces) == text
    assert all(pieces)


@given(st.lists(TEXT, max_size=5))
def test_no_more_is_held_than_said(texts: list[str]) -> None:
    cutter = SentenceCutter()
    for text in texts:
        cutter.push(text)
        assert len(cutter._held) < 2 * MAX_CHARACTERS
