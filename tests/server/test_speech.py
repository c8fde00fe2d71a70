"""The speech models on Triton, and `/v1/audio` over them, on real speech."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from serving import Stack, wait_for
from speech import BECKETT, KEYS, TWO_CITIES, as_file, make_key, recording, sound, word_error_rate, words_of

pytestmark = pytest.mark.timeout(300)  # the first test starts the server

PATH = "/v1/audio/transcriptions"
FRAME = 512
NOISE = np.random.default_rng(0).normal(0, 0.1, 10 * 16_000).astype(np.float32)
SILENCE = np.zeros(10 * 16_000, np.float32)


@pytest.fixture(scope="module")
def client(speech_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speech_stack.url}/v1", api_key=KEYS["all"], max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def connection(speech_stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with speech_stack.triton_client() as connection:
        yield connection


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), triton_type(array))
    found.set_data_from_numpy(array)
    return found


def triton_type(array: np.ndarray) -> str:
    return {"float32": "FP32", "int32": "INT32", "bool": "BOOL", "object": "BYTES"}[array.dtype.name]


# --- vad ---------------------------------------------------------------------------------------------------


class Person:
    """A sequence of frames."""

    def __init__(self, connection: triton.InferenceServerClient, sequence_id: int) -> None:
        self._connection = connection
        self._id = sequence_id
        self._has_begun = False

    def hear(self, samples: np.ndarray, *, ends: bool = False) -> float:
        result = self._connection.infer(
            "vad",
            [tensor("frame", samples[None])],
            sequence_id=self._id,
            sequence_start=not self._has_begun,
            sequence_end=ends,
            client_timeout=30,
        )
        self._has_begun = True
        return float(result.as_numpy("speech_probability")[0, 0])

    def hear_all(self, samples: np.ndarray) -> list[float]:
        count = len(samples) // FRAME
        frames = [samples[index * FRAME : (index + 1) * FRAME] for index in range(count)]
        return [self.hear(frame, ends=index == count - 1) for index, frame in enumerate(frames)]


def test_speech_is_told_from_silence(connection: triton.InferenceServerClient) -> None:
    speech, _ = sound("beckett.wav")
    heard = Person(connection, 101).hear_all(speech[: 100 * FRAME])
    assert max(heard) > 0.99 and sum(probability > 0.5 for probability in heard) > 20
    assert max(Person(connection, 102).hear_all(SILENCE[: 30 * FRAME])) < 0.2
    assert max(Person(connection, 103).hear_all(NOISE[: 30 * FRAME])) < 0.5


def test_two_sequences_side_by_side_are_as_each_alone(connection: triton.InferenceServerClient) -> None:
    speech, _ = sound("beckett.wav")
    first, second = speech[: 60 * FRAME], speech[80 * FRAME : 140 * FRAME]
    alone = [Person(connection, 201).hear_all(first), Person(connection, 202).hear_all(second)]
    one, other = Person(connection, 203), Person(connection, 204)
    together: list[list[float]] = [[], []]
    for index in range(60):
        place = slice(index * FRAME, (index + 1) * FRAME)
        together[0].append(one.hear(first[place], ends=index == 59))
        together[1].append(other.hear(second[place], ends=index == 59))
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_many_people_at_once_are_not_mixed(connection: triton.InferenceServerClient, speech_stack: Stack) -> None:
    """From threads, so that Triton batches them."""
    speech, _ = sound("beckett.wav")
    parts = [speech[index * 12 * FRAME :][: 40 * FRAME] for index in range(6)]
    alone = [Person(connection, 300 + index).hear_all(part) for index, part in enumerate(parts)]
    together: dict[int, list[float]] = {}

    def hear(index: int) -> None:
        with speech_stack.triton_client() as own:
            together[index] = Person(own, 320 + index).hear_all(parts[index])

    threads = [threading.Thread(target=hear, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose([together[index] for index in range(6)], alone, atol=1e-4)


def test_an_idle_sequence_is_freed(connection: triton.InferenceServerClient) -> None:
    person = Person(connection, 401)
    person.hear(SILENCE[:FRAME])
    person.hear(SILENCE[:FRAME])
    time.sleep(7)  # the model's config.pbtxt: 5 s
    with pytest.raises(triton.InferenceServerException, match="must specify the START flag"):
        person.hear(SILENCE[:FRAME])


@pytest.mark.parametrize(("samples", "message"), [(SILENCE[:256], "shape"), (np.full(512, np.nan, "f4"), "finite")])
def test_a_wrong_frame_is_refused(connection: triton.InferenceServerClient, samples: Any, message: str) -> None:
    with pytest.raises(triton.InferenceServerException, match=message):
        Person(connection, 501).hear(samples, ends=True)


# --- stt and turn ------------------------------------------------------------------------------------------


def transcribe(connection: triton.InferenceServerClient, audio: np.ndarray, **more: np.ndarray) -> tuple[str, Any]:
    inputs = [tensor("audio", audio), *(tensor(name, array) for name, array in more.items())]
    result = connection.infer("stt", inputs, client_timeout=120)
    return result.as_numpy("text")[0].decode(), json.loads(result.as_numpy("segments")[0])


def test_partial_transcripts_grow(connection: triton.InferenceServerClient) -> None:
    speech, _ = sound("beckett.wav")
    partial = np.array([True])
    texts = [transcribe(connection, speech[: seconds * 16_000], partial=partial)[0] for seconds in (2, 4, 9)]
    assert [len(words_of(text)) for text in texts] == sorted(len(words_of(text)) for text in texts)
    assert words_of(texts[0])[:2] == ["ever", "tried"]


def test_words_have_their_times(connection: triton.InferenceServerClient) -> None:
    text, segments = transcribe(connection, sound("beckett.wav")[0])
    words = [word for segment in segments for word in segment["words"]]
    assert words_of(text) == words_of(BECKETT)
    assert all(word["start_s"] <= word["end_s"] <= 10 for word in words)
    assert [word["start_s"] for word in words] == sorted(word["start_s"] for word in words)


def test_the_wrong_rate_is_refused(connection: triton.InferenceServerClient) -> None:
    for model in ("stt", "turn"):
        inputs = [tensor("audio", NOISE), tensor("sample_rate", np.array([48_000], np.int32))]
        with pytest.raises(triton.InferenceServerException, match="sample_rate: must be 16000"):
            connection.infer(model, inputs)


def test_a_whole_sentence_is_a_turn_and_half_of_one_is_not(connection: triton.InferenceServerClient) -> None:
    speech, _ = sound("beckett.wav")

    def done(audio: np.ndarray) -> float:
        return float(connection.infer("turn", [tensor("audio", audio)]).as_numpy("done_probability")[0])

    quiet = np.zeros(3200, np.float32)
    assert done(np.concatenate([speech, quiet])) > 0.5
    samples, rate_hz = sound("two_cities.wav")
    assert rate_hz == 48_000
    end = samples[::3][-14 * 16_000 :]
    assert done(np.concatenate([end, quiet])) > 0.5  # "... in the superlative degree of comparison only."
    assert done(np.concatenate([end[: int(8.5 * 16_000)], quiet])) < 0.3  # "... for good or for evil, in"


# --- transcriptions ----------------------------------------------------------------------------------------


def test_a_recording_is_transcribed(client: openai.OpenAI) -> None:
    with recording("beckett.wav").open("rb") as file:
        answer = client.audio.transcriptions.create(model="whisper-tiny.en", file=file)
    assert words_of(answer.text) == words_of(BECKETT)
    assert answer.usage is not None and (answer.usage.type, answer.usage.seconds) == ("duration", 10)


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_other_formats(client: openai.OpenAI, form: str) -> None:
    samples, rate_hz = sound("beckett.wav")
    file = (f"question.{form.lower()}", as_file(samples, rate_hz, form))
    answer = client.audio.transcriptions.create(model="stt", file=file)
    assert word_error_rate(answer.text, BECKETT) <= 0.15


def test_a_long_recording_is_heard_whole(client: openai.OpenAI) -> None:
    """Two chunks; each word once."""
    with recording("two_cities.wav").open("rb") as file:
        answer = client.audio.transcriptions.create(
            model="stt", file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
    assert word_error_rate(answer.text, TWO_CITIES) <= 0.10
    # No word twice in a row, no four words more often than they were said.
    heard = words_of(answer.text)
    assert not [word for word, following in itertools.pairwise(heard) if word == following]
    said = " ".join(words_of(TWO_CITIES))
    fours = [" ".join(heard[index : index + 4]) for index in range(len(heard) - 3)]
    assert all(fours.count(four) <= max(said.count(four), 1) for four in fours)
    assert answer.words is not None and answer.segments is not None
    assert [word.word for word in answer.words] == " ".join(segment.text for segment in answer.segments).split()
    starts = [word.start for word in answer.words]
    assert starts == sorted(starts) and 40 < answer.words[-1].end <= 45
    assert answer.duration == pytest.approx(44.37, abs=0.1)


@pytest.mark.parametrize("samples", [SILENCE, NOISE, NOISE * 4])
def test_who_says_nothing_has_an_empty_transcript(client: openai.OpenAI, samples: np.ndarray) -> None:
    file = ("silence.wav", as_file(np.clip(samples, -1, 1)))
    assert client.audio.transcriptions.create(model="stt", file=file).text == ""
    assert client.audio.transcriptions.create(model="stt", file=file, response_format="vtt") == "WEBVTT\n\n"


def test_formats_of_the_answer(client: openai.OpenAI) -> None:
    file = ("question.wav", recording("beckett.wav").read_bytes())
    ask = client.audio.transcriptions.create
    assert words_of(ask(model="stt", file=file, response_format="text")) == words_of(BECKETT)
    srt = ask(model="stt", file=file, response_format="srt")
    assert srt.startswith("1\n00:00:00,") and " --> 00:00:" in srt
    segments = ask(model="stt", file=file, response_format="verbose_json", temperature=0, language="en").segments
    assert segments and all(segment.end > segment.start for segment in segments)


FILE = recording("beckett.wav").read_bytes()
HOUR = as_file(np.zeros(3600 * 8_000, np.int16), 8_000, "FLAC")


@pytest.mark.parametrize(
    ("file", "fields", "status", "param", "message"),
    [
        (b"Dear sir", {}, 400, "file", "cannot be read as sound"),
        (b"", {}, 400, "file", "must not be empty"),
        (as_file(SILENCE[:0]), {}, 400, "file", "has no samples"),
        (FILE[:100_000], {}, 400, "file", "ends before the length that it states"),
        (HOUR, {}, 413, "file", "has 3600 s of sound"),
        (b"RIFF" + bytes(26 << 20), {}, 413, None, "at most"),
        (FILE, {"model": "whisper-1"}, 404, "model", "one of stt, whisper-tiny.en"),
        (FILE, {"language": "de"}, 400, "language", "must be 'en'"),
        (FILE, {"prompt": "Hm."}, 400, "prompt", "not supported"),
        (FILE, {"temperature": 3}, 400, "temperature", "less than or equal to 1"),
        (FILE, {"extra_body": {"stream": "true"}}, 400, "stream", "stream"),
    ],
)
def test_what_is_refused(
    client: openai.OpenAI, file: bytes, fields: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as got:
        client.audio.transcriptions.create(**{"model": "stt", "file": ("a.wav", file), **fields})
    assert (got.value.status_code, got.value.param) == (status, param)


def test_a_body_that_is_no_form_is_refused(speech_stack: Stack) -> None:
    url, key = f"{speech_stack.url}{PATH}", {"authorization": f"Bearer {KEYS['all']}"}
    answer = httpx.post(url, json={}, headers=key)
    assert answer.status_code == 415 and "multipart/form-data" in answer.json()["error"]["message"]
    answer = httpx.post(url, data={"model": "stt"}, files={"other": b"x"}, headers=key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "other")
    answer = httpx.post(url, content=b"x", headers={"content-type": "multipart/form-data", **key})
    assert answer.status_code == 400


def test_a_large_file_may_come_in_chunks(speech_stack: Stack) -> None:
    """Without a length, and larger than any other route's request may be: it is the sound that is refused."""
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    model = b'\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nstt\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b", "authorization": f"Bearer {KEYS['all']}"}
    body = iter([part, *[bytes(1 << 20)] * 12, model])
    answer = httpx.post(f"{speech_stack.url}{PATH}", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400 and "cannot be read as sound" in answer.json()["error"]["message"]


# --- speech ------------------------------------------------------------------------------------------------


def test_what_is_spoken_can_be_understood(client: openai.OpenAI) -> None:
    text = "What is the capital of France? Please answer in one sentence."
    answer = client.audio.speech.create(model="tts", voice="joe", input=text, response_format="wav").read()
    with wave.open(io.BytesIO(answer)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (22_050, 1, 2)
    heard = client.audio.transcriptions.create(model="stt", file=("answer.wav", answer))
    assert word_error_rate(heard.text, text) <= 0.1


def test_pcm_is_openais_and_speed_is_heeded(client: openai.OpenAI) -> None:
    text = "One, two, three, four, five, six, seven, eight."
    lengths_s = {}
    for speed in (0.75, 1.5):
        with client.audio.speech.with_streaming_response.create(
            model="piper-joe", voice="joe", input=text, response_format="pcm", speed=speed
        ) as answer:
            assert answer.headers["content-type"] == "audio/pcm"
            pcm = answer.read()
        lengths_s[speed] = len(pcm) / 2 / 24_000
    assert lengths_s[0.75] / lengths_s[1.5] == pytest.approx(2, abs=0.4)
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    heard = client.audio.transcriptions.create(model="stt", file=("a.wav", as_file(samples, 24_000)))
    assert len(words_of(heard.text)) >= 5


def test_the_first_sentence_comes_before_the_last_is_made(client: openai.OpenAI) -> None:
    text = "This is a sentence of some length, which takes a while. " * 8
    with client.audio.speech.with_streaming_response.create(model="tts", voice="joe", input=text) as answer:
        started_s = time.monotonic()
        came_s = [time.monotonic() - started_s for _ in answer.iter_bytes(8192)]
    assert came_s[0] < came_s[-1] / 2


def test_who_leaves_ends_the_speaking(speech_stack: Stack, client: openai.OpenAI) -> None:
    before = speech_stack.model_metric("nv_inference_request_success", "tts")
    text = "This is a sentence of some length, which takes a while to be said. " * 60
    with client.audio.speech.with_streaming_response.create(model="tts", voice="joe", input=text) as answer:
        next(answer.iter_bytes(1024))
    # The one thread is free for the next one long before all is said, which is minutes.
    started_s = time.monotonic()
    client.audio.speech.create(model="tts", voice="joe", input="Next.").read()
    assert time.monotonic() - started_s < 30
    wait_for(lambda: speech_stack.model_metric("nv_inference_request_success", "tts") >= before + 2)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "tts-1"}, 404, "model"),
        ({"voice": "alloy"}, 400, "voice"),
        ({"response_format": "mp3"}, 400, "response_format"),
        ({"speed": 9}, 400, "speed"),
        ({"input": ""}, 400, "input"),
        ({"instructions": "Shout."}, 400, "instructions"),
    ],
)
def test_speech_that_is_refused(client: openai.OpenAI, fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as got:
        client.audio.speech.create(**{"model": "tts", "voice": "joe", "input": "Hi.", **fields})
    assert (got.value.status_code, got.value.param) == (status, param)


def test_tts_says_which_sentence_it_speaks(connection: triton.InferenceServerClient) -> None:
    """By Triton's own stream: sentences as they stand in the text, each with its sound."""
    answers: list[Any] = []
    ended = threading.Event()

    def answered(result: Any, error: Any) -> None:
        assert error is None, error
        is_end = result.get_response().parameters["triton_final_response"].bool_param
        if is_end:
            ended.set()
        else:
            answers.append(result)

    connection.start_stream(answered)
    text = "It is 98.6°F today. It costs $3.14!"
    connection.async_stream_infer(
        "tts", [tensor("text", np.array([text.encode()], np.object_))], enable_empty_final_response=True
    )
    assert ended.wait(60)
    connection.stop_stream()
    assert "".join(answer.as_numpy("sentence")[0].decode() for answer in answers) == text
    assert len(answers) == 2
    assert all(answer.as_numpy("pcm").dtype == np.int16 and len(answer.as_numpy("pcm")) > 10_000 for answer in answers)


# --- keys --------------------------------------------------------------------------------------------------


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert {"stt", "tts", "whisper-tiny.en", "piper-joe"} <= {model.id for model in client.models.list()}


def test_keys_and_quotas(speech_stack: Stack, speech_keys: Path) -> None:
    def post(key: str) -> list[httpx.Response]:
        """A transcription and a speech."""
        headers = {"authorization": f"Bearer {key}"}
        speech = {"model": "tts", "voice": "joe", "input": "Hi."}
        return [
            httpx.post(f"{speech_stack.url}{PATH}", data={"model": "stt"}, files={"file": b"x"}, headers=headers),
            httpx.post(f"{speech_stack.url}/v1/audio/speech", json=speech, headers=headers, timeout=60),
        ]

    assert [answer.status_code for answer in post("nobody's")] == [401, 401]
    speaker = make_key(speech_keys, "speaker", "--tier", "tts")
    assert [answer.status_code for answer in post(speaker)] == [403, 200]
    # The first one has a file that is refused, and counts all the same.
    assert [answer.status_code for answer in post(make_key(speech_keys, "few", "--requests-per-minute", "1"))] == [
        400,
        429,
    ]


def test_deadlines_hold_here_too(speech_stack: Stack) -> None:
    headers = {"authorization": f"Bearer {KEYS['all']}", "x-deadline-ms": "3"}
    speech = {"model": "tts", "voice": "joe", "input": "One long sentence " * 20}
    for answer in (
        httpx.post(f"{speech_stack.url}{PATH}", data={"model": "stt"}, files={"file": FILE}, headers=headers),
        httpx.post(f"{speech_stack.url}/v1/audio/speech", json=speech, headers=headers),
    ):
        # Not expected to be in time, or not in time.
        assert (answer.status_code, answer.json()["error"]["code"]) in {
            (503, "overloaded"),
            (504, "deadline_exceeded"),
        }


def test_targets_without_speech_say_so(scripted_stack: Stack) -> None:
    answer = httpx.post(f"{scripted_stack.url}{PATH}", data={"model": "stt"}, files={"file": FILE})
    assert answer.status_code == 404 and "target cpu-voice has one" in answer.json()["error"]["message"]
    speech = {"model": "tts", "voice": "joe", "input": "Hi."}
    answer = httpx.post(f"{scripted_stack.url}/v1/audio/speech", json=speech)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
