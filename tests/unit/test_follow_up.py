"""What a conversation asks for: whoever goes on stays with the task, and what says nothing is read by nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.routing.complexity import TIERS
from orchestrator.routing.conversation import Turn
from orchestrator.routing.follow_up import find_ask, goes_on, is_thanks
from perf.router import ArtifactRouter

TASK = Turn(
    "user",
    "Prove that every finite integral domain is a field, and then classify all fields of order 16 up to isomorphism.",
)
BEGUN = Turn("assistant", "Let D be a finite integral domain. Step 1: …")
ASKS = Turn("assistant", "Before I start: do you want it formal?")
CALLS = [TASK, Turn("tool", '{"status": "ok", "rows": 42}')]

GO_ON = """
continue; Continue.; go on; go on then; keep going; carry on; next; next step, please; ok, next part please; yes; yes!
yes please; yes, do it; sure, go ahead; please continue; ok do the whole thing; please write out the full solution
try again; that's wrong, fix it; Now solve it.; Now answer my first question properly.; thanks, go on; what comes next?
and then?; perfect, do it; you stopped, please finish
weiter; mach weiter; ja, mach das; bitte fortfahren; nächster Teil bitte; und dann weiter?
continúa; sigue; sí, por favor; sí, hazlo; siguiente parte; vale, adelante; ¿y después?
continue; poursuis; oui, s'il te plaît; oui, fais-le; partie suivante; vas-y; d'accord, étape suivante; et ensuite ?
继续; 好的,请继续; 是的,就这么做; 下一部分; 往下写; 可以,开始吧; 接下来呢
"""
THANKS = """
thanks; thanks!; thx; ok thanks; ok, great; great; lovely; will do, cheers!; perfect, thank you very much indeed; bye
danke!; Danke, klar!; vielen Dank; gracias; vale gracias!!; merci; ok merci; 谢谢; 好的谢谢; 好的，收到
"""
OWN = """
What is the capital of Portugal?; what does 'al dente' mean again?; Wofür steht IBAN?; ¿cuánto era el total?
c'est quoi INR; 法语呢?; why?; write a poem about the sea in autumn, with rhymes; Go的吉祥物是什么动物?
"""


def read(texts: str) -> list[str]:
    return [text.strip() for text in texts.replace("\n", ";").split(";") if text.strip()]


@pytest.mark.parametrize("text", read(GO_ON))
def test_what_says_nothing_of_its_own_is_left_out(text: str) -> None:
    assert goes_on(text) and not is_thanks(text)
    assert find_ask([TASK, BEGUN, Turn("user", text)]) == [TASK]


@pytest.mark.parametrize("text", read(THANKS))
def test_thanks_stand_for_themselves(text: str) -> None:
    turns = [TASK, BEGUN, Turn("user", text)]
    assert is_thanks(text) and not goes_on(text) and find_ask(turns) == turns


@pytest.mark.parametrize("text", read(OWN))
def test_so_does_what_asks_for_something(text: str) -> None:
    turns = [TASK, ASKS, Turn("user", text)]
    assert find_ask(turns) == turns


@pytest.mark.parametrize(
    ("turns", "ask"),
    [
        ([TASK], TASK.text),
        ([TASK, ASKS, Turn("user", "formal is fine")], f"{TASK.text}\nformal is fine"),
        (
            [TASK, ASKS, Turn("user", "formal is fine"), Turn("assistant", "Ok."), Turn("user", "do the whole thing")],
            f"{TASK.text}\nformal is fine",
        ),
        ([TASK, BEGUN, Turn("user", "be more rigorous")], f"{TASK.text}\nbe more rigorous"),
        ([TASK, BEGUN, Turn("user", "thanks!"), BEGUN, Turn("user", "go on")], TASK.text),
        (
            [TASK, BEGUN, Turn("user", "what is a field?"), BEGUN, Turn("user", "ok, continue")],
            f"{TASK.text}\nwhat is a field?",
        ),
        ([TASK, BEGUN, *[Turn("user", "go on"), BEGUN] * 200, Turn("user", "go on")], TASK.text),
        ([Turn("user", "hi"), Turn("assistant", "How can I help?"), Turn("user", "prove it: √2")], "hi\nprove it: √2"),
        ([Turn("user", "continue")], "continue"),
        (CALLS, TASK.text),
        ([*CALLS, *CALLS[1:], Turn("assistant", "Then I")], TASK.text),
        ([TASK, BEGUN, Turn("user", "yes"), *CALLS[1:]], TASK.text),
    ],
)
def test_the_ask(turns: list[Turn], ask: str) -> None:
    system = Turn("system", "Be brief.")
    assert find_ask([system, *turns])[-1] == Turn("user", ask)
    assert find_ask([system, *turns])[0] == system


def test_where_the_user_says_nothing_all_is_read() -> None:
    turns = [Turn("system", "Say something."), BEGUN]
    assert find_ask(turns) == turns and find_ask([]) == []


@pytest.mark.parametrize("last", [*read(GO_ON)[:24:4], "formal is fine", "继续", "oui, vas-y"])
@pytest.mark.parametrize("said", [BEGUN, ASKS])
def test_whoever_goes_on_stays_where_the_task_is(artifact: Callable[[str], Path], last: str, said: Turn) -> None:
    router = ArtifactRouter(artifact("scripted"))
    assert router.judge(router.read([TASK, said, Turn("user", last)])).tier in TIERS[2:]
    assert router.judge(router.read(CALLS)).tier in TIERS[2:]
    assert router.judge(router.read([TASK, said, Turn("user", "thanks!")])).tier in TIERS[:2]


turns = st.lists(
    st.builds(Turn, st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=40)), max_size=9
)


@given(turns)
def test_nothing_is_invented(turns: list[Turn]) -> None:
    found = find_ask(turns)
    assert len(found) <= len(turns) and bool(found) == bool(turns)
    said = [turn.text for turn in turns if turn.role == "user"]
    if said:
        assert found[-1].role == "user" and all(part in "\n".join(said) for part in found[-1].text.split("\n"))


def test_a_very_long_past_costs_little() -> None:
    past = [TASK, *[Turn("user", "go on"), BEGUN] * 50_000, Turn("user", "x" * 1_000_000), Turn("user", "go on")]
    started_s = time.process_time()
    find_ask(past)
    assert time.process_time() - started_s < 1
