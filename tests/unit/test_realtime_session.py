"""Sessions of `/v1/realtime` without sockets and models: what a client sends, and what it is told."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from fake_voice import TEXT_ONLY, Client, FakeEngines
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import EngineError, InvalidRequestError, NotAllowedError, RateLimitError
from orchestrator.voice.client_events import EVENTS
from orchestrator.voice.conversation import MAX_ITEMS, Conversation, Item

QUESTION: dict[str, Any] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi?"}]}
LONG = ["One two three four. "] + ["Five six seven eight nine ten. "] * 5


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 20))


async def ask(client: Client, **fields: Any) -> dict[str, Any]:
    """A text question; what came of it."""
    await client.send("conversation.item.create", item=QUESTION)
    await client.send("response.create", **({"response": fields} if fields else {}))
    done: dict[str, Any] = (await client.wait_for("response.done"))["response"]
    return done


# --- text --------------------------------------------------------------------------------------------------


def test_a_text_session() -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        assert client.events[0]["session"]["output_modalities"] == ["text"]
        done = await ask(client)
        assert done["status"] == "completed"
        assert done["output"][0]["content"] == [{"type": "output_text", "text": "It is Paris. It lies on the Seine."}]
        assert done["usage"] == {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
        text = "".join(event["delta"] for event in client.all("response.output_text.delta"))
        assert text == "It is Paris. It lies on the Seine."
        assert client.types == [
            "session.created",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * client.types.count("response.output_text.delta"),
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "rt.turn",
            "response.done",
        ]
        assert [each["role"] for each in client.engines.asked[0]["messages"]] == ["system", "user"]
        await client.session.close()

    run(scene())


def test_the_conversation_goes_on() -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        await client.configure(instructions="Be brief.", max_output_tokens=7)
        await ask(client)
        await ask(client)
        await client.wait_for("response.done", 2)
        asked = client.engines.asked[1]
        assert [each["role"] for each in asked["messages"]] == ["system", "user", "assistant", "user"]
        assert asked["messages"][0]["content"] == "Be brief." and asked["max_completion_tokens"] == 7
        await client.session.close()

    run(scene())


def test_an_answer_outside_of_the_conversation() -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        fields = {"conversation": "none", "input": [QUESTION], "instructions": "Classify.", "metadata": {"a": "b"}}
        await client.send("response.create", response=fields)
        done = (await client.wait_for("response.done"))["response"]
        assert done["metadata"] == {"a": "b"} and done["conversation_id"] is None
        await client.send("response.create")
        assert "nothing to answer" in client.events[-1]["error"]["message"]
        await client.session.close()

    run(scene())


def test_cancel_ends_the_model() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.token_s = 0.05
        engines.answer_deltas = ["word "] * 100
        client = Client(engines, TEXT_ONLY)
        await client.send("conversation.item.create", item=QUESTION)
        await client.send("response.create")
        await client.wait_for("response.output_text.delta", 2)
        await client.send("response.create", event_id="again")
        error = client.all("error")[-1]["error"]
        assert error["event_id"] == "again" and "under way" in error["message"]
        await client.send("response.cancel")
        done = (await client.wait_for("response.done"))["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        await asyncio.sleep(0.1)
        assert engines.num_cancelled == 1
        await client.send("response.cancel")
        assert client.types[-1] == "error"
        await client.session.close()

    run(scene())


def test_what_is_cancelled_at_once_was_created_all_the_same() -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        await client.send("conversation.item.create", item=QUESTION)
        num_before = len(client.types)
        await client.send("response.create")
        await client.send("response.cancel")
        await client.session.close()
        told = [name for name in client.types[num_before:] if name.startswith("response.")]
        assert told[0] == "response.created" and told[-1] == "response.done"
        assert told.count("response.created") == told.count("response.done") == 1
        assert client.all("response.created")[0]["response"]["status"] == "in_progress"
        assert client.all("response.done")[0]["response"]["status"] == "cancelled"

    run(scene())


def test_a_refusal_is_a_failed_answer() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.refuse = lambda body: RateLimitError("too many")
        client = Client(engines, TEXT_ONLY)
        done = await ask(client)
        assert done["status"] == "failed" and done["status_details"]["error"]["code"] == "rate_limit_exceeded"
        await client.session.close()

    run(scene())


def test_a_conversation_that_is_too_long_loses_its_beginning() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        client = Client(engines, TEXT_ONLY)
        for _ in range(4):
            await client.send("conversation.item.create", item=QUESTION)
            await client.send("conversation.item.create", item={**QUESTION, "role": "assistant"})
        engines.refuse = lambda body: (
            InvalidRequestError("too long", param="messages") if len(body["messages"]) > 4 else None
        )
        assert (await ask(client))["status"] == "completed"
        assert len(engines.asked[-1]["messages"]) <= 4
        await client.session.close()

    run(scene())


def test_cut_answers_say_so() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.finish_reason = "length"
        client = Client(engines, TEXT_ONLY)
        done = await ask(client)
        assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
        await client.session.close()

    run(scene())


def test_who_leaves_ends_the_model() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.token_s = 0.05
        engines.answer_deltas = ["word "] * 1000
        client = Client(engines, TEXT_ONLY)
        await client.send("conversation.item.create", item=QUESTION)
        await client.send("response.create")
        await client.wait_for("response.output_text.delta")
        await client.session.close()
        assert engines.num_cancelled == 1

    run(scene())


# --- items -------------------------------------------------------------------------------------------------


def test_items_are_put_found_and_deleted() -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        for name, previous in (("a", None), ("b", None), ("c", "root"), ("d", "a")):
            await client.send("conversation.item.create", item={**QUESTION, "id": name}, previous_item_id=previous)
        assert [event["previous_item_id"] for event in client.all("conversation.item.added")] == [None, "a", None, "a"]
        await client.send("conversation.item.retrieve", item_id="d")
        assert client.events[-1]["item"]["content"][0]["text"] == "Hi?"
        await client.send("conversation.item.delete", item_id="d")
        assert client.events[-1] == {"type": "conversation.item.deleted", "item_id": "d"}
        await client.send("conversation.item.retrieve", item_id="d")
        assert client.events[-1]["error"]["param"] == "item_id"
        await client.send("conversation.item.create", item={**QUESTION, "id": "a"})
        assert "exists already" in client.events[-1]["error"]["message"]
        await client.session.close()

    run(scene())


def test_a_conversation_is_bounded() -> None:
    conversation = Conversation()
    for number in range(3 * MAX_ITEMS):
        conversation.add(Item(f"item_{number}", "user", "input_text", "x" * 3000))
    assert sum(len(message["content"]) for message in conversation.messages("")) <= 140_000


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "param", "message"),
    [
        ("{", None, "not JSON"),
        ("[]", None, "must be a JSON object"),
        ({"type": "response.sing"}, "type", "no event of a client"),
        ({"type": "response.create", "foo": 1}, "foo", "not supported"),
        ({"type": "session.update", "session": {}}, "session.type", "required"),
        ({"type": "session.update", "session": {"type": "realtime", "temperature": 1}}, "session.temperature", "not"),
        ({"type": "session.update", "session": {"type": "transcription"}}, "session.type", "realtime"),
        ({"type": "session.update", "session": {"type": "realtime", "tools": [{}]}}, "session.tools", "at most 0"),
        ({"type": "session.update", "session": {"type": "realtime", "model": "gpt"}}, "session.model", "cannot change"),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "audio", "base64"),
        ({"type": "input_audio_buffer.append", "audio": "YWFh"}, "audio", "no whole samples"),
        ({"type": "input_audio_buffer.append"}, "audio", "required"),
        ({"type": "input_audio_buffer.commit"}, "type", "less than 100 ms"),
        ({"type": "conversation.item.create", "item": {"type": "function_call"}}, "item.type", "message"),
        (
            {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": 1},
            "item_id",
            "no",
        ),
    ],
)
def test_what_is_refused(event: Any, param: str | None, message: str) -> None:
    async def scene() -> None:
        client = Client()
        await client.session.receive(event if isinstance(event, str) else json.dumps({**event, "event_id": "mine"}))
        error = client.events[-1]["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error") and message in error["message"]
        assert error["event_id"] == (None if isinstance(event, str) else "mine")
        await client.session.close()

    run(scene())


@pytest.mark.parametrize(
    ("audio", "param"),
    [
        ({"input": {"format": {"type": "audio/pcm", "rate": 8000}}}, "session.audio.input.format.rate"),
        ({"input": {"format": {"type": "audio/pcmu"}}}, "session.audio.input.format.type"),
        ({"output": {"voice": "alloy"}}, "session.audio.output.voice"),
        ({"input": {"turn_detection": {"type": "magic"}}}, "session.audio.input.turn_detection"),
        ({"input": {"transcription": {"model": "whisper-1"}}}, "session.audio.input.transcription.model"),
        ({"input": {"transcription": {"language": "de"}}}, "session.audio.input.transcription.language"),
    ],
)
def test_sound_that_is_not_had_is_refused(audio: dict[str, Any], param: str) -> None:
    async def scene() -> None:
        client = Client()
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        assert client.events[-1]["error"]["param"] == param
        await client.session.close()

    run(scene())


def test_a_server_that_does_not_hear_says_so() -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        await client.send("input_audio_buffer.append", audio=base64.b64encode(bytes(640)).decode())
        assert "target cpu-voice has one" in client.events[-1]["error"]["message"]
        await client.send("session.update", session={"type": "realtime", "output_modalities": ["audio"]})
        assert client.events[-1]["error"]["param"] == "session.output_modalities"
        await client.session.close()

    run(scene())


texts = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
FIELDS = ["session", "audio", "item", "item_id", "response", "previous_item_id", "audio_end_ms", "content_index"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)) | texts, st.dictionaries(st.sampled_from(FIELDS), values))))
def test_whatever_is_sent_the_session_lives(events: list[tuple[str, dict[str, Any]]]) -> None:
    async def scene() -> None:
        client = Client()
        for name, fields in events:
            before = len(client.events)
            await client.session.receive(json.dumps({**fields, "type": name}))
            assert len(client.events) > before or name == "input_audio_buffer.append"
        await client.session.close()

    run(scene())


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
@settings(max_examples=50, deadline=None)
def test_any_text_is_answered(text: str) -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        await client.session.receive(text)
        assert client.types[-1] == "error"
        await client.session.close()

    run(scene())


@pytest.mark.parametrize(
    "event",
    [
        r'{"type": "x", "event_id": "\ud800"}',
        r'{"type": "conversation.item.create", "item": {"type": "message", "role": "user",'
        r' "content": [{"type": "input_text", "text": "a \ud83d"}]}}',
        r'{"type": "response.create", "response": {"metadata": {"key": "\udc00"}}}',
    ],
)
def test_half_a_surrogate_pair_is_refused_and_never_told_again(event: str) -> None:
    async def scene() -> None:
        client = Client(abilities=TEXT_ONLY)
        await client.send("conversation.item.create", item=QUESTION)
        await client.session.receive(event)
        assert "half of a surrogate pair" in client.events[-1]["error"]["message"]
        json.dumps(client.events, ensure_ascii=False).encode()
        await client.session.close()

    run(scene())


# --- voice -------------------------------------------------------------------------------------------------


def test_a_spoken_question_is_answered_aloud() -> None:
    async def scene() -> None:
        client = Client()
        await client.speak(320, loud=False)
        await client.speak(960)
        await client.speak(960, loud=False)
        done = (await client.wait_for("response.done"))["response"]
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["transcript"] == "It is Paris. It lies on the Seine."
        assert client.engines.spoken == ["It is Paris.", "It lies on the Seine."]
        assert abs(client.audio_ms - 8 * 50) < 30
        order = [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.input_audio_transcription.completed",
            "response.created",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "rt.turn",
            "response.done",
        ]
        places = [client.types.index(name) for name in order]
        assert places == sorted(places)
        started, stopped = (client.all(f"input_audio_buffer.speech_{each}")[0] for each in ("started", "stopped"))
        assert started["audio_start_ms"] <= 320 and abs(stopped["audio_end_ms"] - 1280) < 100
        assert client.engines.asked[0]["messages"][-1]["content"] == client.engines.says
        turn = client.all("rt.turn")[0]
        assert turn["transcript_ms"] <= turn["first_token_ms"] <= turn["first_audio_ms"]
        assert turn["rt"] == {"tier": "simple"} and client.engines.charged == ["stt", "tts"]
        await client.session.close()

    run(scene())


def test_all_sound_at_once_is_as_good() -> None:
    """A burst after a stall: the clock is the sound."""

    async def scene() -> None:
        client = Client()
        sound = np.concatenate([np.zeros(7680), np.full(24_000, 8000), np.zeros(48_000)]).astype("<i2")
        audio = base64.b64encode(sound.tobytes()).decode()
        await client.send("input_audio_buffer.append", audio=audio)
        assert (await client.wait_for("response.done"))["response"]["status"] == "completed"
        await client.session.close()

    run(scene())


def test_nothing_said_is_no_turn() -> None:
    async def scene() -> None:
        client = Client()
        client.engines.says = ""
        await client.speak(640)
        await client.speak(3_000, loud=False)
        await client.wait_for("input_audio_buffer.cleared")
        assert client.engines.asked == [] and client.decisions == ["nothing_said"]
        await client.session.close()

    run(scene())


def test_an_hour_of_silence_holds_nothing() -> None:
    async def scene() -> None:
        client = Client()
        second = base64.b64encode(bytes(48_000)).decode()
        for _ in range(3600):
            await client.send("input_audio_buffer.append", audio=second)
        assert client.types == ["session.created"]
        assert len(client.session._before) < 20
        await client.session.close()

    run(scene())


def test_a_turn_without_end_is_ended() -> None:
    async def scene() -> None:
        client = Client()
        client.engines.says = "word"
        await client.speak(56_000)
        await client.wait_for("input_audio_buffer.committed")
        await client.session.close()

    run(scene())


def test_what_is_certain_is_told_while_the_person_speaks() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.is_busy = False
        engines.says = "one two three"  # a word a second
        client = Client(engines)
        await client.speak(5_000)
        deltas = client.all("conversation.item.input_audio_transcription.delta")
        assert "".join(event["delta"] for event in deltas).split() == ["one", "two", "three"]
        assert len({event["item_id"] for event in deltas}) == 1
        # What is certain of a long turn is not heard again.
        await client.speak(8_000)
        assert engines.offsets_s[0] == 0 and engines.offsets_s[-1] == 3.0
        engines.says = ""
        await client.speak(1_600, loud=False)
        completed = await client.wait_for("conversation.item.input_audio_transcription.completed")
        assert completed["transcript"] == "one two three"
        await client.session.close()

    run(scene())


async def answering(engines: FakeEngines | None = None) -> Client:
    """A client who asked, and hears a long answer."""
    client = Client(engines)
    client.engines.answer_deltas = LONG
    client.engines.word_s = 0.1
    await client.speak(960)
    await client.speak(800, loud=False)
    await client.wait_for("response.output_audio.delta")
    await asyncio.sleep(0.3)
    return client


def test_who_speaks_into_an_answer_ends_it() -> None:
    async def scene() -> None:
        client = await answering()
        client.engines.says = "Stop it now."
        before_ms = client.audio_ms
        await client.speak(320)
        await client.speak(160, loud=False)
        done = (await client.wait_for("response.done"))["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        # Not more than what was under way.
        assert client.audio_ms - before_ms <= 200
        heard = client.all("conversation.item.truncated")[0]["audio_end_ms"]
        assert 0 < heard <= before_ms + 200
        kept = done["output"][0]["content"][0]["transcript"]
        assert "".join(LONG).startswith(kept) and len(kept) < 60
        # The next question is asked with what was heard alone.
        await client.speak(800, loud=False)
        await client.wait_for("response.created", 2)
        await asyncio.sleep(0.05)
        messages = client.engines.asked[-1]["messages"]
        assert [each["role"] for each in messages][-1] == "user" and messages[-1]["content"] == "Stop it now."
        assert kept in (messages[-2]["content"], "")
        assert client.decisions == ["interrupted"]
        await client.session.close()

    run(scene())


def test_little_words_only_hold_the_answer_up() -> None:
    async def scene() -> None:
        client = await answering()
        client.engines.says = "Yeah."
        await client.speak(256)
        assert client.types.count("input_audio_buffer.speech_started") == 2
        paused = client.audio_ms
        await asyncio.sleep(0.3)
        assert client.audio_ms == paused
        await client.speak(512, loud=False)
        resumed = await client.wait_for("rt.output_audio.resumed")
        assert paused - 250 <= resumed["audio_ms"] <= paused
        stopped = client.all("input_audio_buffer.speech_stopped")[-1]
        assert abs(stopped["audio_end_ms"] - (960 + 800 + 256)) < 100
        done = (await client.wait_for("response.done", timeout_s=10))["response"]
        assert done["status"] == "completed" and client.decisions == ["resumed"]
        assert client.types.count("input_audio_buffer.committed") == 1
        # All of it was sent, what had been thrown away twice.
        assert client.audio_ms - (paused - resumed["audio_ms"]) == pytest.approx(34 * 100, abs=40)
        await client.session.close()

    run(scene())


@pytest.mark.parametrize("event", ["input_audio_buffer.clear", "session.update"])
def test_an_answer_goes_on_when_who_spoke_into_it_is_not_heard(event: str) -> None:
    async def scene() -> None:
        client = await answering()
        client.engines.answer_deltas = []
        await client.speak(128)
        detection = {"type": "server_vad"}
        fields = {"session": {"type": "realtime", "audio": {"input": {"turn_detection": detection}}}}
        await client.send(event, **(fields if event == "session.update" else {}))
        assert "rt.output_audio.resumed" in client.types
        done = (await client.wait_for("response.done", timeout_s=10))["response"]
        assert done["status"] == "completed"
        await client.session.close()

    run(scene())


def test_the_clients_player_knows_best_what_was_heard() -> None:
    async def scene() -> None:
        client = await answering()
        item_id = client.all("response.output_item.added")[0]["item"]["id"]
        await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=210)
        done = (await client.wait_for("response.done"))["response"]
        assert done["output"][0]["content"][0]["transcript"] == "One two"
        assert client.all("conversation.item.truncated")[0]["audio_end_ms"] == 210
        await client.session.close()

    run(scene())


def test_who_goes_on_before_the_answer_was_heard_says_one_thing() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.token_s = 0.2
        client = Client(engines)
        engines.says = "What is the capital."
        await client.speak(640)
        await client.speak(800, loud=False)
        await client.wait_for("response.created")
        engines.says = "of France?"
        await client.speak(640)
        await client.speak(800, loud=False)
        await client.wait_for("response.created", 2)
        await asyncio.sleep(0.05)
        assert engines.asked[-1]["messages"][-1] == {"role": "user", "content": "What is the capital. of France?"}
        await client.session.close()

    run(scene())


def test_an_early_start_is_used_or_dropped() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        client = Client(engines)
        await client.speak(640)
        await client.speak(320, loud=False)
        await asyncio.sleep(0.05)
        assert len(engines.asked) == 1 and "response.created" not in client.types
        engines.says = "What is the capital of France and of Spain?"
        await client.speak(640)
        assert client.decisions == ["early_dropped"]
        await client.speak(320, loud=False)
        await asyncio.sleep(0.05)
        assert len(engines.asked) == 2
        await client.speak(960, loud=False)
        await client.wait_for("response.done")
        assert len(engines.asked) == 2 and engines.asked[1]["messages"][-1]["content"] == engines.says
        await client.session.close()

    run(scene())


def test_without_early_start_nothing_is_asked_before_the_end() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.done = 0.3
        client = Client(engines)
        await client.configure(rt={"early_start": False})
        await client.speak(640)
        await client.speak(640, loud=False)
        assert engines.asked == []
        await client.speak(960, loud=False)
        await client.wait_for("response.done")
        await client.session.close()

    run(scene())


def test_a_question_during_an_answer_that_is_cancelled_is_answered_once() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.answer_deltas = ["One two three four. "] * 50
        client = Client(engines)
        detection = {"type": "server_vad", "silence_duration_ms": 200, "interrupt_response": False}
        await client.configure(audio={"input": {"turn_detection": detection}})
        heard = "conversation.item.input_audio_transcription.completed"
        for number in (1, 2):
            await client.speak(640)
            await client.speak(320, loud=False)
            await client.wait_for(heard, number)
            await client.wait_for("response.output_audio.delta")
        assert client.types.count("response.created") == 1
        engines.answer_deltas = ["Yes."]
        await client.send("response.cancel")  # the second question is still to be answered
        assert (await client.wait_for("response.done", 2))["response"]["status"] == "completed"
        await client.speak(640)
        await client.speak(320, loud=False)
        await client.wait_for("response.done", 3)
        await client.session.close()
        assert client.types.count("response.created") == 3

    run(scene())


def test_without_turn_detection_the_client_says_when() -> None:
    async def scene() -> None:
        client = Client()
        await client.configure(
            audio={"input": {"turn_detection": None, "format": {"type": "audio/pcm", "rate": 16000}}}
        )
        sound = base64.b64encode(np.full(16_000, 8000, "<i2").tobytes()).decode()
        await client.send("input_audio_buffer.append", audio=sound)
        await client.send("input_audio_buffer.clear")
        await client.send("input_audio_buffer.commit")
        assert client.types[-1] == "error"
        await client.send("input_audio_buffer.append", audio=sound)
        await client.send("input_audio_buffer.commit")
        await client.send("response.create")  # the transcript is not there yet
        await client.wait_for("response.done")
        assert client.engines.asked[0]["messages"][-1]["content"] == client.engines.says
        for _ in range(60):
            await client.send("input_audio_buffer.append", audio=sound)
        error = client.events[-1]["error"]
        assert error["code"] == "request_too_large" and "55 s" in error["message"]
        await client.session.close()

    run(scene())


def test_faults_of_the_models_are_told_and_end_nothing() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.stt_error = EngineError("stt failed")
        client = Client(engines)
        await client.speak(640)
        await client.speak(960, loud=False)
        assert (await client.wait_for("error"))["error"]["code"] == "engine_error"
        engines.stt_error, engines.tts_error = None, EngineError("tts failed")
        await client.speak(640)
        await client.speak(960, loud=False)
        done = (await client.wait_for("response.done"))["response"]
        assert done["status"] == "failed" and done["status_details"]["error"]["message"] == "tts failed"
        engines.tts_error = None
        await client.speak(640)
        await client.speak(960, loud=False)
        assert (await client.wait_for("response.done", 2))["response"]["status"] == "completed"
        await client.session.close()

    run(scene())


def test_who_may_not_be_heard_is_told_so() -> None:
    """Whatever of his turn was to be heard first."""

    async def scene() -> None:
        engines = FakeEngines()
        engines.charge_error = NotAllowedError("this key may not use stt")
        engines.is_busy = False
        client = Client(engines)
        await client.speak(2_000)
        await client.speak(960, loud=False)
        assert (await client.wait_for("error"))["error"]["code"] == "not_allowed"
        assert engines.charged == ["stt"] and engines.num_transcribed == 0 and engines.asked == []
        await client.session.close()

    run(scene())


def test_sessions_are_apart() -> None:
    """Ten at once: each hears its own answer, whole."""

    async def one(number: int) -> None:
        engines = FakeEngines()
        engines.says = f"Question {number}?"
        engines.answer_deltas = [f"Answer {number} of ", "ten."]
        client = Client(engines)
        await client.speak(640)
        await client.speak(960, loud=False)
        done = (await client.wait_for("response.done"))["response"]
        assert done["output"][0]["content"][0]["transcript"] == f"Answer {number} of ten."
        await client.session.close()

    async def scene() -> None:
        await asyncio.gather(*map(one, range(10)))

    run(scene())
