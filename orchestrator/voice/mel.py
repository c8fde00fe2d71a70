"""Whisper's log-mel spectrogram of 8 s, as smart-turn takes it.

Own code, because what has it (transformers, faster-whisper) brings a model's whole runtime along; tests hold it equal
to faster-whisper's. Constants: Radford et al. 2022, section 2.2, and Whisper's own feature extractor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import SAMPLE_RATE_HZ

NUM_SAMPLES = 8 * SAMPLE_RATE_HZ
NUM_BANDS = 80
_WINDOW = 400  # 25 ms
_HOP = 160  # 10 ms

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def log_mel(audio: Floats) -> Floats:
    """FP32 [128000] -> FP32 [80, 800]. The sound is first given mean 0 and variance 1."""
    even = (audio - audio.mean()) / np.sqrt(audio.var() + 1e-7)
    padded = np.pad(even.astype(np.float64), _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]  # [801, 400]
    power = np.abs(np.fft.rfft(frames * _HANN)) ** 2  # [801, 201]
    bands = np.log10(np.maximum(power[:-1] @ _FILTERS, 1e-10)).T  # [80, 800]
    scaled: Floats = ((np.maximum(bands, bands.max() - 8) + 4) / 4).astype(np.float32)
    return scaled


def _mel_filters() -> Doubles:
    """Triangles between 80 centres, of equal area: [201, 80]. The scale is Slaney's: linear to 1 kHz, then by ratio."""
    ratio = np.log(6.4) / 27
    top = 15 + np.log(SAMPLE_RATE_HZ / 2 / 1000) / ratio  # 8 kHz in mels
    mels = np.linspace(0, top, NUM_BANDS + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(ratio * (mels - 15)))  # in Hz
    frequencies = np.linspace(0, SAMPLE_RATE_HZ / 2, _WINDOW // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising = (frequencies - edges[:-2]) / widths[:-1]
    falling = (edges[2:] - frequencies) / widths[1:]
    filters: Doubles = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    return filters


_HANN: Doubles = np.hanning(_WINDOW + 1)[:-1]
_FILTERS = _mel_filters()
