"""Who has the word: frames and what was understood in, acts out. No clock but the frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.voice.backchannels import hangs, is_backchannel
from orchestrator.voice.client_events import SemanticVad
from orchestrator.voice.turn_taking import FRAME_MS, Act, Answering, TurnPolicy, TurnTaking

POLICY = TurnPolicy()


class Scene:
    """Feeds frames, and remembers each act with the time in ms at which it came."""

    def __init__(self, policy: TurnPolicy = POLICY) -> None:
        self.taking = TurnTaking(policy)
        self.acts: list[tuple[int, Act]] = []

    def hear(self, ms: int, *, speech: bool, answering: Answering = "no") -> Scene:
        for _ in range(ms // FRAME_MS):
            for act in self.taking.hear(0.95 if speech else 0.02, answering):
                self.acts.append((self.taking.now_ms, act))
        return self

    def understand(self, text: str, done: float = 0.9, number: int | None = None) -> Scene:
        number = self.taking.number if number is None else number
        self.acts += [(self.taking.now_ms, act) for act in self.taking.understand(number, text, done)]
        return self

    @property
    def names(self) -> list[Act]:
        """But for PREPARE, which comes in every longer silence."""
        return [act for _, act in self.acts if act is not Act.PREPARE]

    def at_ms(self, act: Act) -> int:
        return next(at_ms for at_ms, found in self.acts if found is act)


def said(text: str, done: float) -> Scene:
    """A second of speech, understood 96 ms after it."""
    return Scene().hear(320, speech=False).hear(992, speech=True).hear(96, speech=False).understand(text, done)


def silence_until_end(scene: Scene) -> int:
    """ms of silence after which the turn ends."""
    scene.hear(5_000, speech=False)
    return scene.at_ms(Act.END) - (320 + 992)


def test_who_is_done_has_his_answer_soon() -> None:
    scene = said("What is the capital of France?", 0.9)
    assert 700 <= silence_until_end(scene) <= 770
    assert scene.names == [Act.START, Act.LISTEN, Act.END]


@pytest.mark.parametrize(
    ("text", "done", "least_ms", "most_ms"),
    [
        ("What is the capital of France?", 0.01, 700, 770),
        ("What is the capital", 0.9, 850, 950),
        ("What is the capital", 0.01, 1300, 1400),
        ("What is the capital of", 0.9, 1300, 1400),
        ("I would like to go to the.", 0.9, 1300, 1400),
    ],
)
def test_who_is_not_done_has_time(text: str, done: float, least_ms: int, most_ms: int) -> None:
    assert least_ms <= silence_until_end(said(text, done)) <= most_ms


def test_a_pause_of_700_ms_in_a_sentence_is_no_end() -> None:
    # However complete it looks.
    scene = said("What is the capital?", 0.99).hear(576, speech=False).hear(640, speech=True).hear(96, speech=False)
    scene.understand("What is the capital of France?", 0.95)
    assert silence_until_end(scene)
    assert scene.names == [Act.START, Act.LISTEN, Act.GO_ON, Act.LISTEN, Act.END]


def test_what_was_understood_before_the_person_went_on_ends_nothing() -> None:
    scene = Scene().hear(960, speech=True).hear(96, speech=False)
    stale = scene.taking.number
    scene.hear(320, speech=True).understand("What is the capital?", 0.99, stale).hear(320, speech=False)
    assert Act.END not in scene.names


def test_the_eager_do_not_wait_if_the_person_is_done() -> None:
    scene = Scene(SemanticVad(type="semantic_vad", eagerness="high").policy())
    scene.hear(320, speech=False).hear(992, speech=True).hear(96, speech=False).understand("Thank you.", 0.9)
    assert silence_until_end(scene) <= 256
    assert not TurnPolicy().needs_judge("Thank you.") and scene.taking.policy.needs_judge("Thank you.")


def test_after_half_a_second_an_answer_is_prepared_whatever_was_said() -> None:
    scene = said("I would like to", 0.01)
    silence_until_end(scene)
    assert 500 <= scene.at_ms(Act.PREPARE) - (320 + 992) <= 550


def test_server_vad_ends_after_its_silence_whatever_was_said() -> None:
    scene = Scene(TurnPolicy(fixed_silence_ms=500)).hear(960, speech=True).hear(1_000, speech=False)
    assert 480 <= scene.at_ms(Act.END) - 960 <= 544


def test_a_click_is_no_speech() -> None:
    assert Scene().hear(320, speech=False).hear(FRAME_MS, speech=True).hear(320, speech=False).acts == []


# --- during an answer --------------------------------------------------------------------------------------


def test_an_answer_is_silent_within_100_ms() -> None:
    scene = Scene().hear(640, speech=False, answering="yes").hear(320, speech=True, answering="yes")
    assert scene.names[:2] == [Act.START, Act.HUSH]
    assert scene.at_ms(Act.HUSH) - 640 <= 100


@pytest.mark.parametrize("text", ["Yeah.", "Okay, okay.", "Mm-hmm.", "Uh-huh", "I see.", "Oh, right.", ""])
def test_little_words_do_not_interrupt(text: str) -> None:
    scene = Scene().hear(320, speech=True, answering="yes").hear(96, speech=False, answering="yes").understand(text)
    scene.hear(640, speech=False, answering="yes")
    assert scene.names == [Act.START, Act.HUSH, Act.LISTEN, Act.RESUME]
    assert not scene.taking.in_turn


def test_what_begins_like_little_words_may_be_an_interruption() -> None:
    scene = Scene().hear(416, speech=True, answering="yes").understand("Yeah")
    assert Act.INTERRUPT not in scene.names
    scene.hear(416, speech=True, answering="yes").understand("Yeah, but I wanted")
    assert scene.names[-1] is Act.INTERRUPT and scene.taking.in_turn
    scene.hear(512, speech=True).hear(96, speech=False).understand("Yeah, but I wanted the other one.")
    scene.hear(768, speech=False)
    assert scene.names[-1] is Act.END


def test_one_word_that_is_no_little_one_interrupts() -> None:
    scene = Scene().hear(320, speech=True, answering="yes").hear(96, speech=False, answering="yes").understand("Stop.")
    assert scene.names[-1] is Act.INTERRUPT
    assert scene.hear(768, speech=False).names[-1] is Act.END


def test_who_goes_on_speaking_interrupts_even_if_nobody_understands_him() -> None:
    scene = Scene().hear(2_000, speech=True, answering="yes")
    assert scene.at_ms(Act.INTERRUPT) <= 1_600


def test_an_answer_goes_on_even_if_no_transcript_comes() -> None:
    scene = Scene().hear(320, speech=True, answering="yes").hear(3_000, speech=False, answering="yes")
    assert scene.at_ms(Act.RESUME) <= 2_400


def test_at_the_end_of_an_answer_a_little_word_is_a_turn() -> None:
    scene = Scene().hear(320, speech=True, answering="ending").hear(96, speech=False).understand("Yes.")
    assert scene.hear(768, speech=False).names == [Act.START, Act.INTERRUPT, Act.LISTEN, Act.END]


def test_without_interruptions_the_answer_is_left_alone() -> None:
    scene = Scene(TurnPolicy(interrupts=False)).hear(960, speech=True, answering="yes").hear(96, speech=False)
    scene.understand("Stop it.").hear(768, speech=False)
    assert scene.names == [Act.START, Act.LISTEN, Act.END]


Step = tuple[float, Answering, tuple[str, float] | None]
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.4, 0.9]),
        st.sampled_from(["no", "yes", "ending"]),
        st.none() | st.tuples(st.sampled_from(["", "Yeah.", "Stop.", "to the"]), st.floats(0, 1)),
    ),
    max_size=400,
)


@given(steps)
def test_turns_begin_and_end_in_turn(feed: list[Step]) -> None:
    """Whatever is heard: a START, then one END or RESUME; HUSH only at a START, INTERRUPT only in a turn."""
    taking = TurnTaking(POLICY)
    in_turn = is_hushed = False
    for probability, answering, understood in feed:
        acts = taking.hear(probability, answering)
        if understood is not None:
            acts += taking.understand(taking.number, *understood)
        for act in acts:
            if act is Act.START:
                assert not in_turn
                in_turn = True
            else:
                assert in_turn, act
            if act is Act.HUSH:
                is_hushed = True
            if act is Act.INTERRUPT and is_hushed:
                is_hushed = False
            if act is Act.RESUME:
                assert is_hushed
                in_turn = is_hushed = False
            if act is Act.END:
                assert not is_hushed
                in_turn = False
        assert taking.in_turn == in_turn
        if Act.END in acts or Act.RESUME in acts:
            taking.end()


# --- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("Yeah.", True),
        ("ok", True),
        ("Mm-hmm, yeah.", True),
        ("Got it.", True),
        ("", True),
        ("No.", False),
        ("Yeah but", False),
        ("I want", False),
        ("Yeah? Yeah? Yeah? Yeah? Yeah?", True),
        ("yeah right sure okay cool", False),
        ("Wait.", False),
        ("What?", False),
    ],
)
def test_backchannels(text: str, is_one: bool) -> None:
    assert is_backchannel(text) is is_one


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("I want to", True),
        ("and the.", True),
        ("I saw...", True),
        ("the end.", False),
        ("", False),
        ("What is it for?", False),
        ("It is for.", True),
        ("What is the?", True),
        ("What does a dentist do?", False),
    ],
)
def test_hanging(text: str, does: bool) -> None:
    assert hangs(text) is does


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    is_backchannel(text), hangs(text)
