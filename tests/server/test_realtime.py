"""`/v1/realtime` with the real speech models, on real speech, fed in real time; the language model is scripted."""

from __future__ import annotations

import asyncio
import io
import json
import re
import wave
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import numpy as np
import openai
import pytest
from serving import Stack, wait_for
from speech import BECKETT, KEYS, as_file, make_key, sound, word_error_rate, words_of

from orchestrator.__main__ import main
from orchestrator.talk import ANSWER_RATE_HZ, TalkError, VoiceClient, talking

pytestmark = pytest.mark.timeout(300)  # the first test starts the server

RATE_HZ = 16_000
SHORT = "The sky is blue today, and the sun is warm."
LONG = "This is a rather long answer, which takes a while to be spoken. " * 8
COMMITTED, COMPLETED = "input_audio_buffer.committed", "conversation.item.input_audio_transcription.completed"
T = TypeVar("T")


def run(scene: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scene, 100))


def answer(text: str, **script: Any) -> dict[str, Any]:
    """A session in which the scripted engine answers `text`."""
    return {"instructions": f"#script {json.dumps({'text': text, **script})}"}


@pytest.fixture(scope="module")
def say(speech_stack: Stack) -> Callable[[str], np.ndarray]:
    """What Piper makes of a text: FP32 at 16 kHz, with the little noise that rooms have."""

    def spoken(text: str) -> np.ndarray:
        body = {"model": "tts", "voice": "joe", "input": text, "response_format": "pcm"}
        headers = {"authorization": f"Bearer {KEYS['all']}"}
        raw = httpx.post(f"{speech_stack.url}/v1/audio/speech", json=body, headers=headers, timeout=60).content
        samples = np.frombuffer(raw, "<i2").astype(np.float32) / 32768
        at = np.arange(0, len(samples) - 1, ANSWER_RATE_HZ / RATE_HZ)
        return in_a_room(np.interp(at, np.arange(len(samples)), samples))

    return spoken


def in_a_room(samples: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, 0.001, len(samples))
    return (samples + noise).astype(np.float32)


def heard(client: VoiceClient) -> str:
    return " ".join(each.event["transcript"] for each in client.received if each.type == COMPLETED)


def types(client: VoiceClient, since: int = 0) -> list[str]:
    return [each.type for each in client.received[since:]]


def test_a_spoken_question_is_answered_aloud(
    speech_stack: Stack, speech_keys: Any, say: Callable[[str], np.ndarray]
) -> None:
    question = "What is the capital of France?"
    samples = say(question)

    async def scene() -> None:
        async with talking(speech_stack.url, answer(SHORT), key=KEYS["all"]) as client:
            client.say(samples)
            done = await client.wait_for("response.done")
            assert done.event["response"]["status"] == "completed"
            assert word_error_rate(heard(client), question) <= 0.2
            turn = next(each.event for each in client.received if each.type == "rt.turn")
            times = [turn[name] for name in ("transcript_ms", "first_token_ms", "first_piece_ms", "first_audio_ms")]
            assert times == sorted(times) and turn["rt"]["model"] == "llm_small"
            spoken = np.frombuffer(bytes(client.audio), "<i2")
            file = as_file(spoken.astype(np.float32) / 32768, ANSWER_RATE_HZ)
        with openai.OpenAI(base_url=f"{speech_stack.url}/v1", api_key=KEYS["all"]) as official:
            said = official.audio.transcriptions.create(model="stt", file=("a.wav", file)).text
        assert word_error_rate(said, SHORT) <= 0.35

    run(scene())
    headers = {"authorization": f"Bearer {make_key(speech_keys, 'watcher', '--metrics')}"}
    page = httpx.get(f"{speech_stack.url}/metrics", headers=headers, timeout=10).text
    assert re.search(r'rt_realtime_turn_seconds_count\{stage="first_audio"\} [1-9]', page)
    assert "rt_realtime_sessions 0.0" in page


def test_who_speaks_into_an_answer_ends_it_in_the_engines_too(
    speech_stack: Stack, say: Callable[[str], np.ndarray]
) -> None:
    question, stop = say("Tell me a long story."), say("Wait, stop. I wanted something else.")

    async def scene() -> None:
        async with talking(speech_stack.url, answer(LONG, itl_ms=150), key=KEYS["all"]) as client:
            client.say(question)
            await client.wait_for("response.output_audio.delta")
            await asyncio.sleep(1)
            since = len(client.received)
            begins_s = client.say(stop)
            started = await client.wait_for("input_audio_buffer.speech_started", since)
            assert started.at_s - begins_s < 1  # `perf voice` measures it
            done = await client.wait_for("response.done", since)
            assert done.event["response"]["status_details"]["reason"] == "turn_detected"
            at = client.received.index(started)
            assert "response.output_audio.delta" not in [
                each.type for each in client.received[at : client.received.index(done)]
            ]
            truncated = await client.wait_for("conversation.item.truncated", since)
            assert 500 < truncated.event["audio_end_ms"] < 3_000
            text = done.event["response"]["output"][0]["content"][0]["transcript"]
            assert LONG.startswith(text) and 5 < len(text) < 80
            # The script would run for half a minute; the next answer is for the interruption.
            await client.wait_for(COMMITTED, since)
            await client.wait_for("response.created", since)
        await asyncio.to_thread(wait_for, lambda: speech_stack.num_live("llm_small") == 0)

    run(scene())


@pytest.mark.parametrize(
    ("words", "interrupts"), [("Yeah.", False), ("Okay.", False), ("Yeah, but I wanted the other one.", True)]
)
def test_little_words_do_not_interrupt(
    speech_stack: Stack, say: Callable[[str], np.ndarray], words: str, interrupts: bool
) -> None:
    question, word = say("Tell me a story."), say(words)

    async def scene() -> None:
        text = "This is a rather long answer, which takes a while to be spoken. "
        async with talking(speech_stack.url, answer(text), key=KEYS["all"]) as client:
            client.say(question)
            await client.wait_for("response.output_audio.delta")
            await asyncio.sleep(0.5)
            since = len(client.received)
            client.say(word)
            done = await client.wait_for("response.done", since)
            assert done.event["response"]["status"] == ("cancelled" if interrupts else "completed")
            assert ("rt.output_audio.resumed" in types(client, since)) is not interrupts

    run(scene())


def test_silence_and_noise_are_no_turns(speech_stack: Stack) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 5 * RATE_HZ).astype(np.float32)

    async def scene() -> None:
        async with talking(speech_stack.url, key=KEYS["all"]) as client:
            client.say(np.concatenate([np.zeros(RATE_HZ, np.float32), noise]))
            await asyncio.sleep(9)
            assert not {COMMITTED, "response.created", "error"} & set(types(client))

    speech_stack.wait_until_idle()  # the answers that others' clients left are logged by then
    since = speech_stack.log_length()
    run(scene())
    assert speech_stack.logged("request", since) == []


def test_a_reader_is_heard_while_he_speaks(speech_stack: Stack) -> None:
    """Ten seconds with pauses; what is certain comes before he is done."""
    samples, _ = sound("beckett.wav")
    detection = {"type": "server_vad", "silence_duration_ms": 2000, "create_response": False}

    async def scene() -> None:
        session = {"audio": {"input": {"turn_detection": detection}}}
        async with talking(speech_stack.url, session, key=KEYS["all"]) as client:
            client.say(samples)
            completed = await client.wait_for(COMPLETED)
            assert word_error_rate(completed.event["transcript"], BECKETT) <= 0.2
            delta = "conversation.item.input_audio_transcription.delta"
            deltas = [each.event["delta"] for each in client.received if each.type == delta]
            assert words_of("".join(deltas))[:2] == ["ever", "tried"]
            assert types(client).count("input_audio_buffer.speech_started") == 1

    run(scene())


def test_two_at_once_are_not_mixed(speech_stack: Stack, say: Callable[[str], np.ndarray]) -> None:
    questions = ["What is the capital of France?", "How many legs does a spider have?"]
    sounds = [say(text) for text in questions]

    async def ask(number: int) -> str:
        async with talking(speech_stack.url, answer(f"Answer {number}."), key=KEYS["all"]) as client:
            client.say(sounds[number])
            done = await client.wait_for("response.done")
            assert done.event["response"]["output"][0]["content"][0]["transcript"] == f"Answer {number}."
            return heard(client)

    async def scene() -> list[str]:
        return list(await asyncio.gather(ask(0), ask(1)))

    for text, question in zip(run(scene()), questions):
        assert word_error_rate(text, question) <= 0.35


def test_keys_and_rights(speech_stack: Stack, speech_keys: Any, say: Callable[[str], np.ndarray]) -> None:
    question = say("What is the capital of France?")
    writer = make_key(speech_keys, "writer", "--tier", "simple")

    async def refused() -> None:
        async with talking(speech_stack.url, key="rt-nobody"):
            pass

    async def unheard() -> None:
        async with talking(speech_stack.url, key=writer, model="simple") as client:
            client.say(question)
            error = (await client.wait_for("error")).event["error"]
            assert error["code"] == "not_allowed" and "stt" in error["message"]
            assert COMMITTED not in types(client)

    with pytest.raises(TalkError, match="401"):
        run(refused())
    run(unheard())


def test_talk(
    speech_stack: Stack, say: Callable[[str], np.ndarray], tmp_path: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RT_KEY", KEYS["all"])
    question, output = tmp_path / "question.wav", tmp_path / "answer.wav"
    question.write_bytes(as_file(say("What is the capital of France?")))
    arguments = ["talk", str(question), "--output", str(output), "--url", speech_stack.url, "--key-env", "RT_KEY"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "answered: The scripted engine answers." in printed and "first token" in printed
    assert json.loads(printed.splitlines()[-1])["first_audio_ms"] > 0
    with wave.open(io.BytesIO(output.read_bytes())) as reader:
        assert reader.getframerate() == ANSWER_RATE_HZ and reader.getnframes() > ANSWER_RATE_HZ


def test_text_without_speech_models(scripted_stack: Stack) -> None:
    with (
        openai.OpenAI(base_url=f"{scripted_stack.url}/v1", api_key="none") as client,
        client.realtime.connect(model="auto") as connection,
    ):
        content: Any = [{"type": "input_text", "text": "Hello?"}]
        connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        connection.response.create()
        connection.input_audio_buffer.append(audio="AAAA")
        words, error = "", None
        for event in connection:
            if event.type == "response.output_text.delta":
                words += event.delta
            elif event.type == "error":
                error = event.error
            elif event.type == "response.done":
                assert event.response.status == "completed"
                break
        assert words == "The scripted engine answers."
        assert error is not None and "no model of this server hears" in error.message
    scripted_stack.wait_until_idle()
    answer = scripted_stack.get("/v1/realtime")
    assert answer.status_code == 426 and answer.json()["error"]["code"] == "upgrade_required"
