"""The Triton models `vad`, `stt`, `turn` and `tts` on the python backend."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.errors import ApiError, EngineError, InternalError, InvalidRequestError
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of, to_triton_error
from orchestrator.voice.speaking import MAX_SPEED, MAX_TEXT_CHARACTERS, MIN_SPEED, can_be_said, sentences_of
from orchestrator.voice.transcript import MAX_TEMPERATURE, Segment, encode_segments, text_of
from orchestrator.voice.turn import TurnDetector
from orchestrator.voice.vad import Frame, VoiceActivity

log = logging.getLogger("orchestrator.speech")

# A chunk of `orchestrator.voice.chunks`, and more than any turn: what is longer comes in parts.
MAX_AUDIO_S = 60

Floats = npt.NDArray[np.float32]


class Transcriber(Protocol):
    """What `stt` runs: `orchestrator.voice.whisper.Whisper`."""

    def transcribe(self, audio: Floats, temperature: float = 0.0, *, is_partial: bool = False) -> list[Segment]: ...


class Voice(Protocol):
    """What `tts` runs; model_repository/tts has it."""

    sample_rate_hz: int

    def speak(self, sentence: str, speed: float) -> Iterator[npt.NDArray[np.int16]]: ...


class _Config(NamedTuple):
    """What a model is told: its folder, its threads, and its whole configuration."""

    folder: Path
    num_threads: int
    model: dict[str, Any]

    @classmethod
    def read(cls, args: dict[str, str]) -> _Config:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("faster_whisper").setLevel(logging.WARNING)  # else three lines for each transcript
        model = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        return cls(folder, int(model["parameters"]["num_threads"]["string_value"]), model)

    @property
    def graph(self) -> Path:
        (graph,) = self.folder.glob("*.onnx")
        return graph


class VadModel:
    """What `vad`'s model.py delegates to. Triton batches frames of different sequences."""

    def __init__(self, args: dict[str, str]) -> None:
        config = _Config.read(args)
        # Triton refuses a sequence that was idle; ours goes later than Triton's, never sooner.
        idle_us = int(config.model["sequence_batching"]["max_sequence_idle_microseconds"])
        self._activity = VoiceActivity(config.graph, num_threads=config.num_threads, max_idle_s=2 * idle_us / 1e6)

    def execute(self, requests: list[Any]) -> list[Any]:
        answers = self._activity.hear([_frame_of(request) for request in requests])
        return [
            _refusal(answer)
            if isinstance(answer, ApiError)
            else _answer((contracts.SPEECH_PROBABILITY, np.array([[answer]], np.float32)))
            for answer in answers
        ]


class SttModel:
    """What `stt`'s model.py delegates to."""

    def __init__(self, args: dict[str, str], make_transcriber: Callable[..., Transcriber]) -> None:
        config = _Config.read(args)
        self._transcriber = make_transcriber(config.folder, num_threads=config.num_threads)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [_try(self._transcribe, request) for request in requests]

    def _transcribe(self, request: Any) -> Any:
        audio = _audio_of(request)
        temperature = _number_of(request, contracts.TEMPERATURE, 0.0, 0.0, MAX_TEMPERATURE)
        is_partial = bool(_value_of(request, contracts.PARTIAL, False))
        segments = self._transcriber.transcribe(audio, temperature, is_partial=is_partial)
        return _answer(
            (contracts.TRANSCRIPT, np.array([text_of(segments).encode()], np.object_)),
            (contracts.SEGMENTS, np.array([encode_segments(segments).encode()], np.object_)),
        )


class TurnModel:
    """What `turn`'s model.py delegates to."""

    def __init__(self, args: dict[str, str]) -> None:
        config = _Config.read(args)
        self._detector = TurnDetector(config.graph, num_threads=config.num_threads)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [_try(self._judge, request) for request in requests]

    def _judge(self, request: Any) -> Any:
        probability = self._detector.judge(_audio_of(request))
        return _answer((contracts.DONE_PROBABILITY, np.array([probability], np.float32)))


class _Job(NamedTuple):
    """One text to be spoken. `cancelled` is set when nobody listens any more."""

    id: str
    sender: Sender
    text: str
    speed: float
    cancelled: threading.Event


class TtsModel:
    """What `tts`'s model.py delegates to. Texts are spoken one after the other, by one thread.

    `execute` returns at once, so that a cancel gets through while something is spoken; it is heeded between sentences.
    """

    def __init__(self, args: dict[str, str], make_voice: Callable[..., Voice]) -> None:
        config = _Config.read(args)
        self._voice = make_voice(config.folder, num_threads=config.num_threads)
        self._jobs: dict[str, _Job] = {}
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tts", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = Sender(request)
            if parameters_of(request).get(contracts.CANCEL_PARAMETER, "").lower() == "true":
                if job := self._jobs.get(request.request_id()):
                    job.cancelled.set()
                sender.send(None, final=True)
                continue
            try:
                job = _job_of(request, sender)
            except InvalidRequestError as error:
                sender.send(_refusal(error), final=True)
                continue
            if job.id:
                self._jobs[job.id] = job
            self._waiting.put(job)

    def finalize(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                self._speak(job)
            except Exception as error:
                log.exception("a text could not be spoken")
                job.sender.send(_refusal(EngineError(f"tts failed: {type(error).__name__}")), final=True)
            else:
                job.sender.send(None, final=True)
            finally:
                if self._jobs.get(job.id) is job:
                    del self._jobs[job.id]

    def _speak(self, job: _Job) -> None:
        for sentence in sentences_of(job.text):
            parts = self._voice.speak(sentence.strip(), job.speed) if can_be_said(sentence) else iter(())
            said = sentence.encode()
            for part in parts:
                if job.cancelled.is_set() or job.sender.is_cancelled():
                    return
                response = _answer(
                    (contracts.PCM, part),
                    (contracts.PCM_RATE, np.array([self._voice.sample_rate_hz], np.int32)),
                    (contracts.SENTENCE, np.array([said], np.object_)),
                )
                job.sender.send(response, final=False)
                said = b""  # told with the first of its parts


def _job_of(request: Any, sender: Sender) -> _Job:
    try:
        text = bytes(_value_of(request, contracts.TEXT, b"")).decode()
    except UnicodeDecodeError as error:
        raise _refused(contracts.TEXT, "must be UTF-8") from error
    if not can_be_said(text):
        raise _refused(contracts.TEXT, "has nothing that can be said: no letter and no digit")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise _refused(contracts.TEXT, f"has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are allowed")
    speed = _number_of(request, contracts.SPEED, 1.0, MIN_SPEED, MAX_SPEED)
    return _Job(request.request_id(), sender, text, speed, threading.Event())


def _frame_of(request: Any) -> Frame:
    samples = _tensor(request, contracts.FRAME)
    is_one = samples.shape[0] == 1
    return Frame(
        sequence_id=int(_value_of(request, contracts.SEQUENCE_ID, 0)),
        samples=samples[0] if is_one else samples,
        starts=bool(_value_of(request, contracts.SEQUENCE_START, 0)),
        ends=bool(_value_of(request, contracts.SEQUENCE_END, 0)),
    )


def _audio_of(request: Any) -> Floats:
    """FP32 [samples] at 16 kHz."""
    rate_hz = int(_value_of(request, contracts.SAMPLE_RATE, contracts.SAMPLE_RATE_HZ))
    if rate_hz != contracts.SAMPLE_RATE_HZ:
        raise _refused(contracts.SAMPLE_RATE, f"must be {contracts.SAMPLE_RATE_HZ}; resample it (got {rate_hz})")
    audio: Floats = _tensor(request, contracts.AUDIO)
    if not len(audio):
        raise _refused(contracts.AUDIO, "has no samples")
    if len(audio) > MAX_AUDIO_S * rate_hz:
        raise _refused(contracts.AUDIO, f"has {len(audio) / rate_hz:.1f} s; at most {MAX_AUDIO_S} s are allowed")
    if not np.isfinite(audio).all() or np.abs(audio).max() > 1.5:  # resampling may overshoot a little
        raise _refused(contracts.AUDIO, "must be numbers between -1 and 1")
    return audio


def _number_of(request: Any, spec: contracts.TensorSpec, default: float, least: float, most: float) -> float:
    value = float(_value_of(request, spec, default))
    if not least <= value <= most:
        raise _refused(spec, f"must be between {least:g} and {most:g} (got {value:g})")
    return value


def _value_of(request: Any, spec: contracts.TensorSpec, default: Any) -> Any:
    """The one element of a tensor that may be left out."""
    tensor = _tensor(request, spec)
    return default if tensor is None else tensor.reshape(-1)[0]


def _tensor(request: Any, spec: contracts.TensorSpec) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
    return None if tensor is None else tensor.as_numpy()


def _answer(*tensors: tuple[contracts.TensorSpec, npt.NDArray[Any]]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(spec.name, array) for spec, array in tensors])


def _try(answer: Callable[[Any], Any], request: Any) -> Any:
    try:
        return answer(request)
    except ApiError as error:
        return _refusal(error)
    except Exception as error:
        log.exception("a speech model failed")
        return _refusal(InternalError(f"the speech model failed: {type(error).__name__}"))


def _refusal(error: ApiError) -> Any:
    return pb_utils.InferenceResponse(error=to_triton_error(error))


def _refused(spec: contracts.TensorSpec, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{spec.name}: {reason}", param=spec.name)
