"""Prompt compression: what goes, and what never does."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import MakeWorld, make_tier, make_world
from tokenizers import Tokenizer

from orchestrator.compression import MAX_PASSAGES, compress, split
from orchestrator.config import Compression
from orchestrator.errors import InvalidRequestError
from orchestrator.request import Message

__all__ = ["make_world"]  # a fixture

RULES = Compression(keep=0.5, min_tokens=0, timeout_s=1.0)
FILLER = "The weather was nice. We had lunch at noon. The bus was late again. My cat sleeps all day. "
CODE = "```python\nx = 1\n\nprint(x)\n```"


async def embed(text: str) -> npt.NDArray[np.float32] | None:
    """A bag of words, hashed: texts with common words are near each other."""
    vector = np.full(256, 1e-6, np.float32)
    for word in text.lower().replace(".", " ").replace("?", " ").split():
        vector[int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % 256] += 1
    return vector / np.linalg.norm(vector)


def count(text: str) -> int:
    return len(text.split())


def talk(*texts: str, system: str | None = None) -> list[Message]:
    turns = [Message(role="assistant" if number % 2 else "user", content=text) for number, text in enumerate(texts)]
    return turns if system is None else [Message(role="system", content=system), *turns]


def run(messages: list[Message], rules: Compression = RULES, embed: Any = embed) -> list[Message] | None:
    return asyncio.run(compress(messages, rules, embed, count))


def test_what_the_question_is_about_stays() -> None:
    fact = "The password of the printer is banana. "
    messages = talk(
        FILLER + fact + FILLER, "Noted. Anything else?", "What is the password of the printer?", system="Be brief."
    )
    shorter = run(messages)
    assert shorter is not None
    assert fact in shorter[1].text()
    assert count(shorter[1].text()) < 0.6 * count(messages[1].text())
    assert (shorter[0], shorter[3]) == (messages[0], messages[3])
    assert [message.role for message in shorter] == [message.role for message in messages]


def test_what_was_said_twice_goes_first() -> None:
    messages = talk("Cats purr. Cats purr. Dogs bark loudly.", "Yes.", "Do cats purr?")
    shorter = run(messages, Compression(keep=0.75, min_tokens=0))
    assert shorter is not None
    assert shorter[0].text() == "Cats purr. Dogs bark loudly."


def test_no_message_goes_empty() -> None:
    messages = talk("Hello there my friend. How are you today?", "I am fine. Thank you very much.", "Sing a song.")
    shorter = run(messages, Compression(keep=0.01, min_tokens=0))
    assert shorter is not None
    assert all(message.text() for message in shorter)


def test_code_and_tools_stay() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *talk(f"{FILLER}\n{CODE}\n{FILLER}"),
        Message.model_validate({"role": "assistant", "content": FILLER, "tool_calls": [call]}),
        Message(role="tool", content=FILLER, tool_call_id="1"),
        *talk("What does it print?"),
    ]
    shorter = run(messages)
    assert shorter is not None
    assert CODE in shorter[0].text()
    assert shorter[1:] == messages[1:]


@pytest.mark.parametrize(
    "whole",
    [
        "~~~python\nprint(1). It is.\n\nx = 2\n~~~\n",
        "~~~\nprint(1). It never ends.\n",
        "    first = 1. It is.\n    second = 2\n\n    third = 3\n",
        "\tfirst = 1. It is.\n\tsecond = 2\n",
        "| a | b |\n|---|---|\n| One. Two. | 2 |\n| Three. | 4 |\n",
    ],
)
def test_other_code_and_tables_stay(whole: str) -> None:
    messages = talk(f"{FILLER}\n\n{whole}" + ("" if "never" in whole else f"\n{FILLER}"), "Yes.", "What is it?")
    shorter = run(messages)
    assert shorter is not None
    assert whole.rstrip() in shorter[0].text() and len(shorter[0].text()) < len(messages[0].text())


@pytest.mark.parametrize(
    "messages",
    [
        talk("What is this? " + FILLER),  # the last turn is the only one
        talk("Hello.", "Hi.", "What now?")[:0],
        talk("Hello.", system=FILLER),
        [Message(role="assistant", content=FILLER)],
    ],
)
def test_nothing_to_leave_out(messages: list[Message]) -> None:
    assert run(messages) is None


def test_what_cannot_be_embedded_stays() -> None:
    async def fail(text: str) -> None:
        return None

    async def only_the_question(text: str) -> npt.NDArray[np.float32] | None:
        return await embed(text) if text.endswith("?") else None

    messages = talk(FILLER, "Yes.", "What is it?")
    assert run(messages, embed=fail) is None
    assert run(messages, embed=only_the_question) is None


def test_a_slow_embedder_is_not_waited_for() -> None:
    async def sleep(text: str) -> None:
        await asyncio.sleep(30)

    started_s = time.monotonic()
    assert run(talk(FILLER, "Yes.", "What is it?"), Compression(keep=0.5, timeout_s=0.1), embed=sleep) is None
    assert time.monotonic() - started_s < 5


FACT = "The password of the printer is banana. "
TALK: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": FILLER + FACT + FILLER},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the password of the printer?"},
    ]
}


def test_a_tier_gets_the_shorter_prompt(make_world: MakeWorld, tokenizer: Tokenizer) -> None:
    rules = Compression(keep=0.5, min_tokens=20)
    world = make_world([make_tier("simple", "small", compression=rules), make_tier("expert", "large")], embed=embed)
    full = world.run(**TALK, model="expert")
    short = world.run(**TALK, model="simple")
    assert "prompt_tokens_saved" not in full
    assert short["prompt_tokens_saved"] == full["input_tokens"] - short["input_tokens"] > 10
    assert world.dispatch.counts.saved == {"simple": short["prompt_tokens_saved"]}
    long_prompt, prompt = (tokenizer.decode(request.input_ids) for request in world.engines.requests)
    assert FILLER + FACT + FILLER.strip() in long_prompt
    assert FACT.strip() in prompt and FILLER not in prompt
    # What the engine has cached of the system prompt stays good.
    assert prompt.startswith(long_prompt[: long_prompt.index("The weather")])


def test_a_short_prompt_is_left_alone(make_world: MakeWorld) -> None:
    world = make_world([make_tier("simple", "small", compression=Compression(keep=0.5))], embed=embed)
    assert "prompt_tokens_saved" not in world.run(**TALK)


@pytest.mark.parametrize("model", ["simple", "auto"])
def test_a_prompt_that_fits_only_when_compressed_is(make_world: MakeWorld, model: str) -> None:
    rules = Compression(keep=0.5, min_tokens=20)
    tier = make_tier("simple", "small", compression=rules, context_window=75)
    facts = make_world([tier], embed=embed).run(**TALK, model=model, max_tokens=2)
    assert facts["input_tokens"] <= 73 < facts["input_tokens"] + facts["prompt_tokens_saved"]
    told = facts["input_tokens"] + facts["prompt_tokens_saved"]  # as it was sent
    for changed in ({"context_window": 30}, {"compression": None}):
        error = make_world([tier.model_copy(update=changed)], embed=embed).failure(**TALK, model=model, max_tokens=2)
        assert isinstance(error, InvalidRequestError)
        assert f"messages: the prompt's {told} tokens" in error.to_message()


TEXTS = st.lists(
    st.sampled_from(
        ["Cats purr. ", "Do dogs bark? ", "It is 3.5 m. ", "```\ncode\n``` ", "\n", "word " * 30, "。好。"]
    ),
    max_size=80,
).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=6), st.floats(0.05, 0.95))
def test_what_is_left_is_in_order_and_within_the_budget(texts: list[str], keep: float) -> None:
    messages = talk(*texts)
    passages = split(messages, count)
    assert sum(not passage.is_fixed for passage in passages) <= 2 * MAX_PASSAGES
    last = max(place for place in range(len(messages)) if messages[place].role == "user")
    for place, message in enumerate(messages[:last]):
        assert "".join(each.text for each in passages if each.message == place) == message.text()
    shorter = run(messages, Compression(keep=keep, min_tokens=0))
    if shorter is None:
        return
    assert shorter[last:] == messages[last:]
    for old, new in zip(messages, shorter):
        rest = iter(old.text())
        assert all(character in rest for character in new.text())  # a subsequence
        assert bool(new.text()) == bool(old.text())
