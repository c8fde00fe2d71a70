"""PCM16, little-endian, one channel, as base64: what a realtime client sends and gets."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import FRAME_SAMPLES, SAMPLE_RATE_HZ
from orchestrator.errors import InvalidRequestError
from orchestrator.voice.chunks import Floats

RATES_HZ = (16_000, 24_000)


def decode_pcm(text: str, field: str) -> npt.NDArray[np.int16]:
    """Raises `InvalidRequestError`, which names `field`."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{field}: must be base64 ({error})", param=field) from error
    if len(raw) % 2:
        raise InvalidRequestError(
            f"{field}: has {len(raw)} bytes, which are no whole samples; send PCM16, one channel", param=field
        )
    return np.frombuffer(raw, "<i2")


def encode_pcm(samples: npt.NDArray[np.int16]) -> str:
    return base64.b64encode(samples.astype("<i2", copy=False).tobytes()).decode()


def cut_silence(samples: npt.NDArray[np.int16], rate_hz: int) -> npt.NDArray[np.int16]:
    """Without the silence at the end, but for 30 ms: what stops in the midst of a sentence goes on at once."""
    if not len(samples):
        return samples
    levels = np.abs(samples.astype(np.int32))
    loud = np.flatnonzero(levels > levels.max() // 50)
    return samples[: int(loud[-1]) + int(0.03 * rate_hz)] if len(loud) else samples


class Resampler:
    """A stream of samples at another rate. soxr is of the extra `voice`, and imported when it is needed."""

    def __init__(self, from_hz: int, to_hz: int, dtype: str) -> None:
        self._stream: Any = None
        if from_hz != to_hz:
            import soxr

            # Speech below 8 kHz needs no better, and better is later: this one holds back 5 ms.
            self._stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype, quality="LQ")

    def push(self, samples: npt.NDArray[Any], *, last: bool = False) -> npt.NDArray[Any]:
        resampled: npt.NDArray[Any] = samples if self._stream is None else self._stream.resample_chunk(samples, last)
        return resampled


class Inlet:
    """A client's sound as our models take it."""

    def __init__(self, rate_hz: int) -> None:
        self.rate_hz = rate_hz
        self._resampler = Resampler(rate_hz, SAMPLE_RATE_HZ, "float32")
        self._held: Floats = np.empty(0, np.float32)

    def push(self, samples: npt.NDArray[np.int16]) -> list[Floats]:
        """The frames (FP32 [512], 16 kHz) that became whole."""
        resampled = self._resampler.push(samples.astype(np.float32) / 32768)
        held = np.concatenate([self._held, resampled])
        count = len(held) // FRAME_SAMPLES
        self._held = held[count * FRAME_SAMPLES :]
        return [held[index * FRAME_SAMPLES : (index + 1) * FRAME_SAMPLES] for index in range(count)]
