"""The parts of hearing and speaking that need no server: files, frames, turns, sentences, requests, Triton's models."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_pb_utils as pb
import numpy as np
import pytest
import soundfile
from faster_whisper.feature_extractor import FeatureExtractor
from hypothesis import given
from hypothesis import strategies as st
from serving import wait_for
from speech import as_file

import orchestrator.voice.vad as vad_module
from orchestrator.config import Speaker, Transcriber
from orchestrator.errors import ApiError, InvalidRequestError, ModelNotFoundError, RequestTooLargeError
from orchestrator.triton.speech_models import SttModel, TtsModel
from orchestrator.voice.mel import NUM_SAMPLES, log_mel
from orchestrator.voice.recording import MAX_S, Recording
from orchestrator.voice.request import parse_speech_request, parse_transcription_request
from orchestrator.voice.speaking import sentences_of, wav_header
from orchestrator.voice.transcript import Segment, Word, text_of
from orchestrator.voice.vad import Frame, VoiceActivity
from orchestrator.voice.whisper import leave_out_loops, leave_out_made_up

TONE = (0.3 * np.sin(np.arange(24_000) * 2 * np.pi * 440 / 48_000)).astype(np.float32)  # half a second at 48 kHz


# --- recordings --------------------------------------------------------------------------------------------


def read(file: bytes) -> np.ndarray:
    return np.concatenate(list(Recording(file, "file").read()))


@pytest.mark.parametrize(
    ("form", "options"),
    [("WAV", {}), ("WAV", {"subtype": "FLOAT"}), ("WAVEX", {}), ("FLAC", {}), ("OGG", {}), ("MP3", {})],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_becomes_16_khz_of_one_channel(form: str, options: dict[str, Any], channels: int) -> None:
    samples = read(as_file(np.stack([TONE] * channels, axis=1), 48_000, form, **options))
    assert samples.dtype == np.float32
    assert 7_900 <= len(samples) <= 9_000  # MP3 pads
    middle = samples[2000:6000]
    crossings = np.count_nonzero(np.diff(np.sign(middle)))
    assert crossings == pytest.approx(2 * 440 * len(middle) / 16_000, abs=8)
    assert np.abs(middle).max() == pytest.approx(0.3, abs=0.03)


def test_a_long_file_comes_in_blocks() -> None:
    recording = Recording(as_file(np.zeros(23 * 8_000, np.float32), 8_000), "file")
    blocks = list(recording.read())
    assert len(blocks) >= 4
    assert sum(map(len, blocks)) == pytest.approx(23 * 16_000, abs=20)
    assert recording.duration_s == 23


def test_a_wav_from_a_pipe_is_read_to_its_end() -> None:
    file = wav_header(16_000) + (TONE * 32767).astype("<i2").tobytes()
    assert len(read(file)) == len(TONE)


def test_a_flac_from_a_pipe_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    file = bytearray(as_file(np.tile(TONE, 12), form="FLAC"))
    num_samples = 12 * len(TONE)
    assert int.from_bytes(file[21:26], "big") & (1 << 36) - 1 == num_samples
    file[21:26] = (int.from_bytes(file[21:26], "big") - num_samples).to_bytes(5, "big")  # RFC 9639: 0 is unknown
    recording = Recording(bytes(file), "file")
    assert sum(map(len, recording.read())) == num_samples
    assert recording.duration_s == num_samples / 16_000
    with pytest.raises(InvalidRequestError, match="cannot be decoded"):
        read(bytes(file[: len(file) // 2]))
    monkeypatch.setattr("orchestrator.voice.recording.MAX_S", 6.0)
    with pytest.raises(RequestTooLargeError):
        read(bytes(file))


HOUR = as_file(np.zeros(3600 * 8_000, np.int16), 8_000, "FLAC")
FLAC = as_file(np.random.default_rng(0).normal(0, 0.1, 80_000).astype(np.float32), form="FLAC")


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        (b"", InvalidRequestError, "file: must not be empty"),
        (b"Dear sir, I have no voice.", InvalidRequestError, "cannot be read as sound .*; flac, mp3, ogg, wav are"),
        (b"RIFF\x24\0\0\0WAVEfmt and then a text", InvalidRequestError, "cannot be read as sound"),
        (as_file(TONE, form="AIFF"), InvalidRequestError, "is AIFF; allowed are flac, mp3, ogg, wav"),
        (as_file(TONE[:0]), InvalidRequestError, "has no samples"),
        (as_file(TONE)[:-1000], InvalidRequestError, "ends before the length that it states"),
        (FLAC[: len(FLAC) // 2], InvalidRequestError, "cannot be decoded|ends after"),
        (as_file(TONE, 2_000), InvalidRequestError, "has 2000 samples a second; allowed are 4000 to 192000"),
        (as_file(np.zeros((100, 9), np.float32)), InvalidRequestError, "has 9 channels; at most 8"),
        (as_file(np.array([0, np.nan], np.float32), subtype="FLOAT"), InvalidRequestError, "no finite numbers"),
        (HOUR, RequestTooLargeError, f"has 3600 s of sound; at most {MAX_S:.0f} s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a file holds the second in which it was written
)
def test_a_file_that_is_refused(file: bytes, error: type[ApiError], message: str) -> None:
    with pytest.raises(error, match=message) as got:
        read(file)
    assert got.value.param == "file"


def test_an_hour_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(RequestTooLargeError):
        Recording(HOUR, "file")
    assert len(HOUR) < 1_000_000


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_damage_of_a_file_is_a_crash(noise: bytes, place: int) -> None:
    whole = as_file(TONE[:400])
    try:
        read(whole[:place] + noise + whole[place + len(noise) :])
    except ApiError as error:
        assert error.param == "file"


# --- frames ------------------------------------------------------------------------------------------------


class Counting:
    """In the place of the network: its state counts the frames, and it answers with that."""

    def run(self, _: None, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        assert feeds["input"].shape[1] == 576 and feeds["state"].shape == (2, len(feeds["input"]), 128)
        state = feeds["state"] + 1
        return state[0, :, :1], state


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def activity(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> VoiceActivity:
    monkeypatch.setattr(vad_module, "open_session", lambda *_, **__: Counting())
    return VoiceActivity(Path("none"), num_threads=1, max_idle_s=10, clock=lambda: clock[0])


def frame(sequence: int, *, starts: bool = False, ends: bool = False) -> Frame:
    return Frame(sequence, np.zeros(512, np.float32), starts, ends)


def test_sequences_do_not_mix(activity: VoiceActivity) -> None:
    assert activity.hear([frame(1, starts=True)]) == [1]
    assert activity.hear([frame(2, starts=True), frame(1)]) == [1, 2]
    assert activity.hear([frame(1), frame(2)]) == [3, 2]
    assert activity.hear([frame(1, ends=True), frame(2)]) == [4, 3]
    assert activity.num_sequences == 1
    assert activity.hear([frame(2, starts=True)]) == [1], "begun again, it remembers nothing"


def test_a_sequence_that_is_idle_is_forgotten(activity: VoiceActivity, clock: list[float]) -> None:
    activity.hear([frame(1, starts=True), frame(2, starts=True)])
    clock[0] = 8
    activity.hear([frame(2)])
    clock[0] = 11
    activity.hear([frame(2)])
    assert activity.num_sequences == 1
    (answer,) = activity.hear([frame(1)])
    assert isinstance(answer, InvalidRequestError) and "1 has not begun, or was idle for 10 s" in answer.message


def test_a_frame_that_is_refused_does_not_touch_the_others(activity: VoiceActivity) -> None:
    short = frame(1, starts=True)._replace(samples=np.zeros(256, np.float32))
    broken = frame(3, starts=True)._replace(samples=np.full(512, np.nan, np.float32))
    wrong_size, heard, unknown, not_finite = activity.hear([short, frame(2, starts=True), frame(9), broken])
    assert heard == 1
    assert "must be [1, 512]" in str(wrong_size) and "got [256]" in str(wrong_size)
    assert "9 has not begun" in str(unknown) and "finite" in str(not_finite)
    assert activity.num_sequences == 1


# --- turns -------------------------------------------------------------------------------------------------


def test_the_spectrogram_is_whispers() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, NUM_SAMPLES).astype(np.float32)
    even = (noise - noise.mean()) / np.sqrt(noise.var() + 1e-7)
    theirs = FeatureExtractor(chunk_length=8)(even, padding=0)
    found = log_mel(noise)
    assert found.shape == (80, 800) and found.dtype == np.float32
    np.testing.assert_allclose(found, theirs[:, :800], atol=2e-4)


# --- sentences ---------------------------------------------------------------------------------------------


def test_what_says_nothing_comes_with_its_neighbour() -> None:
    text = "... Hello there. *** It costs $3.14! :-) Bye."
    assert "".join(sentences_of(text)) == text
    assert [piece.strip() for piece in sentences_of(text)][-1] == ":-) Bye."
    assert all(any(character.isalnum() for character in piece) for piece in sentences_of(text))


@given(st.text(max_size=300))
def test_sentences_joined_are_the_text(text: str) -> None:
    assert "".join(sentences_of(text)) == text


def test_a_streamed_wav_is_read_by_others() -> None:
    file = wav_header(22_050) + np.arange(100, dtype="<i2").tobytes()
    samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
    assert (rate, samples.tolist()) == (22_050, list(range(100)))
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (22_050, 1, 2)
        assert reader.readframes(1000) == file[44:]


# --- requests ----------------------------------------------------------------------------------------------

TRANSCRIBER = Transcriber(name="whisper-tiny.en", language="en")
SPEAKER = Speaker(name="piper-joe", voice="joe")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "model", "required"),
        ({"model": "whisper-1"}, "model", "'whisper-1' is none that transcribes; one of stt, whisper-tiny.en"),
        ({"language": "de"}, "language", "must be 'en' .*got 'de'"),
        ({"response_format": "docx"}, "response_format", "Input should be 'json', 'text', 'srt', 'verbose_json' or"),
        ({"temperature": "hot"}, "temperature", "must be a number .*got 'hot'"),
        ({"temperature": "1.5"}, "temperature", "less than or equal to 1"),
        ({"temperature": "nan"}, "temperature", "temperature"),
        ({"prompt": "Umm"}, "prompt", "not supported"),
        ({"stream": "true"}, "stream", "stream"),
        ({"include[]": "logprobs"}, "include[]", "not supported"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "needs response_format 'verbose_json'"),
    ],
)
def test_transcriptions_that_are_refused(fields: dict[str, str], param: str, message: str) -> None:
    whole = {"model": ["stt"]} if fields else {}
    with pytest.raises(ApiError, match=message) as got:
        parse_transcription_request({**whole, **{name: [value] for name, value in fields.items()}}, TRANSCRIBER)
    assert got.value.param == param


def test_a_field_that_comes_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="model: sent 2 times"):
        parse_transcription_request({"model": ["stt", "stt"]}, TRANSCRIBER)


def test_a_transcription_request() -> None:
    fields = {
        "model": ["whisper-tiny.en"],
        "language": ["en"],
        "response_format": ["verbose_json"],
        "temperature": ["0.2"],
        "timestamp_granularities[]": ["word", "segment"],
        "stream": ["false"],
    }
    request = parse_transcription_request(fields, TRANSCRIBER)
    assert (request.temperature, request.timestamp_granularities) == (0.2, ("word", "segment"))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": "tts-1"}, "model", "'tts-1' is none that speaks; one of tts, piper-joe"),
        ({"voice": "alloy"}, "voice", "there is one, 'joe' .*got 'alloy'"),
        ({"response_format": "mp3"}, "response_format", "'wav' or 'pcm'"),
        ({"speed": 5}, "speed", "less than or equal to 4"),
        ({"instructions": "Whisper."}, "instructions", "not supported"),
        ({"stream_format": "sse"}, "stream_format", "'audio'"),
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": "x" * 5000}, "input", "at most 4096 characters"),
        ({"input": "?!"}, "input", "nothing that can be said"),
    ],
)
def test_speech_that_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    body = json.dumps({"model": "tts", "voice": "joe", "input": "Hi.", **fields}).encode()
    with pytest.raises(ApiError, match=message) as got:
        parse_speech_request(body, SPEAKER)
    assert got.value.param == param


def test_a_target_without_speech_says_which_has_it() -> None:
    with pytest.raises(ModelNotFoundError, match="no model of this server transcribes; target cpu-voice has one"):
        parse_transcription_request({"model": ["stt"]}, None)
    with pytest.raises(ModelNotFoundError, match="no model of this server speaks"):
        parse_speech_request(b'{"model": "tts", "voice": "joe", "input": "Hi."}', None)


# --- Triton's models ---------------------------------------------------------------------------------------

ARGS = {
    "model_config": json.dumps({"parameters": {"num_threads": {"string_value": "1"}}}),
    "model_repository": "none",
    "model_version": "1",
}


def ask_stt(**tensors: np.ndarray) -> pb.InferenceResponse:
    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def transcribe(self, *_: Any, **__: Any) -> list[Any]:
            return []

    (answer,) = SttModel(ARGS, Nothing).execute([pb.Request([pb.Tensor(*each) for each in tensors.items()])])
    return answer


def test_silence_is_an_empty_transcript() -> None:
    tensors = {tensor.name(): tensor.as_numpy()[0] for tensor in ask_stt(audio=TONE).output_tensors()}
    assert tensors == {"text": b"", "segments": b"[]"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"audio": TONE[:0]}, "audio: has no samples"),
        ({"audio": np.zeros(16_000 * 61, np.float32)}, "audio: has 61.0 s; at most 60 s"),
        ({"audio": TONE * 32767}, "audio: must be numbers between -1 and 1"),
        ({"audio": TONE, "sample_rate": np.array([48_000], np.int32)}, "sample_rate: must be 16000; .*got 48000"),
        ({"audio": TONE, "temperature": np.array([2], np.float32)}, "temperature: must be between 0 and 1"),
    ],
)
def test_sound_that_is_refused(tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(pb.TritonError, match=message):
        raise ask_stt(**tensors).error() or AssertionError("not refused")


class SlowVoice:
    """Speaks a sentence when it is let to."""

    sample_rate_hz = 22_050

    def __init__(self, *_: Any, **__: Any) -> None:
        self.said: list[str] = []
        self.on_speak: Callable[[str], None] = lambda _: None

    def speak(self, sentence: str, speed: float) -> Iterator[np.ndarray]:
        if sentence == "Boom.":
            raise RuntimeError("no such phoneme")
        self.said.append(sentence)
        self.on_speak(sentence)
        yield np.full(10, speed, np.int16)


@pytest.fixture
def tts() -> Iterator[tuple[TtsModel, SlowVoice]]:
    voice = SlowVoice()
    model = TtsModel(ARGS, lambda *_, **__: voice)
    yield model, voice
    model.finalize()


def speak(text: str, request_id: str = "a", **parameters: Any) -> pb.Request:
    return pb.Request([pb.Tensor("text", np.array([text.encode()], np.object_))], request_id, parameters)


def sentences(request: pb.Request) -> list[str]:
    wait_for(lambda: request.sender.sent and request.sender.sent[-1][1])
    return [
        tensor.as_numpy()[0].decode()
        for response, _ in request.sender.sent
        if response is not None
        for tensor in response.output_tensors()
        if tensor.name() == "sentence"
    ]


def test_a_text_is_spoken_sentence_by_sentence(tts: tuple[TtsModel, SlowVoice]) -> None:
    request = speak("It costs $3.14. Another one. ***")
    tts[0].execute([request])
    assert sentences(request) == ["It costs $3.14. ", "Another one. ***"]


def test_a_cancel_ends_it_after_the_sentence(tts: tuple[TtsModel, SlowVoice]) -> None:
    model, voice = tts
    request, cancel, other = speak("One is here. Two is there. Three."), speak("", cancel=True), speak("Four.", "b")
    voice.on_speak = lambda said: model.execute([cancel]) if said == "Two is there." else None
    model.execute([request, other])
    assert sentences(request) == ["One is here. "]
    assert sentences(other) == ["Four."]
    assert sentences(cancel) == []
    assert voice.said == ["One is here.", "Two is there.", "Four."]


def test_a_text_that_fails_says_so_and_others_go_on(tts: tuple[TtsModel, SlowVoice]) -> None:
    failing, empty, other = speak("Boom.", "a"), speak("...", "b"), speak("Fine.", "c")
    tts[0].execute([failing, empty, other])
    assert sentences(other) == ["Fine."]
    for request, message in ((failing, "tts failed: RuntimeError"), (empty, "text: has nothing that can be said")):
        sentences(request)
        ((response, _),) = request.sender.sent
        assert response is not None and message in str(response.error())


def test_what_whisper_made_up_is_left_out() -> None:
    def heard(*words: tuple[str, float, float], logprob: float = -0.3) -> Segment:
        return Segment(tuple(Word(text, start_s, end_s, 0.9) for text, start_s, end_s in words), logprob, 1.0, 0.0, 0.0)

    egg = heard((" an", 0.9, 1.1), (" egg?", 1.1, 1.4), (" How", 1.4, 1.4), (" do", 1.4, 1.4))
    assert text_of(leave_out_made_up([egg])) == "an egg?"
    assert text_of(leave_out_made_up([egg, heard((" This", 1.5, 2.0), (" one.", 2.1, 2.1), logprob=-1.7)])) == "an egg?"
    assert leave_out_made_up([heard((" you", 1.0, 1.0))]) == []
    pause = heard((" one", 0.0, 0.0), (" two", 0.5, 0.9))
    assert leave_out_made_up([pause]) == [pause]


def test_what_whisper_says_over_and_over_is_said_once() -> None:
    def heard(text: str, ratio: float) -> Segment:
        return Segment(tuple(Word(f" {word}", 0.0, 0.1, 0.9) for word in text.split()), -0.3, ratio, 0.0, 0.0)

    real = heard("He said no, no, no, no.", 1.6)
    looped = [heard("In the end.", 30.0), heard("Only. Only.", 30.0), heard("Only only", 30.0), heard("only.", 30.0)]
    assert text_of(leave_out_loops([real, *looped, real])) == f"{text_of([real])} In the end. Only. {text_of([real])}"
    assert text_of(leave_out_loops([heard("and so on " * 70 + "and", 30.0)])) == "and so on and"
    twice = heard("very very good very very good", 30.0)
    assert leave_out_loops([twice]) == [twice]
    assert leave_out_loops([]) == []
