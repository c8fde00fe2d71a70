"""Sound files as the sound that our models take: 16 kHz, one channel, block by block.

Decoded by soundfile, which is libsndfile: it knows nothing but sound, reads what it is given and nothing else, and says
how long a file is before it decodes it. PyAV, which faster-whisper brings along, would read more formats; but FFmpeg's
demuxers include playlists that name other files and addresses, which is nothing to feed with strangers' bytes.
Resampled by soxr. Both are of the extra `voice`, and imported when a file comes: without it a gateway starts as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import SAMPLE_RATE_HZ
from orchestrator.errors import InvalidRequestError, RequestTooLargeError

FORMATS = ("flac", "mp3", "ogg", "wav")
MAX_S = 1800.0  # half an hour: MP3 of 25 MB, the most that a request may have, is about that at 128 kbit/s
MAX_CHANNELS = 8
MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 192_000
_BLOCK_S = 5.0
_READ_AS = {"WAV": "wav", "WAVEX": "wav", "RF64": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3", "MPEG": "mp3"}
# A RIFF file that was written into a pipe does not know its length.
_UNKNOWN_LENGTHS = (0, 0x7FFFFFFF, 0xFFFFFFFF)
# Nor does such a FLAC; libsndfile's SF_COUNT_MAX says so.
_UNKNOWN_FRAMES = (1 << 63) - 1

Floats = npt.NDArray[np.float32]


class Recording:
    """A file of sound. For one thread at a time."""

    def __init__(self, file: bytes, field: str) -> None:
        """Raises `InvalidRequestError` or `RequestTooLargeError`, which name `field`, before anything is decoded."""
        import soundfile

        self._field = field
        if not file:
            raise self._refused("must not be empty")
        try:
            self._sound = soundfile.SoundFile(io.BytesIO(file))
        except soundfile.LibsndfileError as error:
            known = ", ".join(FORMATS)
            raise self._refused(f"cannot be read as sound ({error.error_string}); {known} are") from error
        rate, channels, frames = self._sound.samplerate, self._sound.channels, self._sound.frames
        self._has_length = frames != _UNKNOWN_FRAMES
        if self._sound.format not in _READ_AS:
            raise self._refused(f"is {self._sound.format}; allowed are {', '.join(FORMATS)}")
        if not MIN_RATE_HZ <= rate <= MAX_RATE_HZ:
            raise self._refused(f"has {rate} samples a second; allowed are {MIN_RATE_HZ} to {MAX_RATE_HZ}")
        if not 1 <= channels <= MAX_CHANNELS:
            raise self._refused(f"has {channels} channels; at most {MAX_CHANNELS} are allowed")
        if not self._has_length:
            self._sound.seekable = lambda: False  # or soundfile seeks, to where it is, and libsndfile cannot
        if frames <= 0:
            raise self._refused("has no samples")
        if self._has_length and frames > MAX_S * rate:
            raise self._too_long(frames / rate)
        if _is_cut(file):
            raise self._refused("ends before the length that it states; send all of it")
        self._num_read = 0

    @property
    def duration_s(self) -> float:
        """As the file states it, 0 if it does not; once all blocks were read, as it is."""
        stated = self._sound.frames if self._has_length else 0
        return (self._num_read or stated) / float(self._sound.samplerate)

    def read(self) -> Iterator[Floats]:
        """All of it, resampled, its channels made one: FP32 [samples] at a time.

        Raises `InvalidRequestError` where it cannot be decoded, `RequestTooLargeError` where it goes on for longer than
        it stated.
        """
        import soundfile
        import soxr

        rate = self._sound.samplerate
        resampler = None if rate == SAMPLE_RATE_HZ else soxr.ResampleStream(rate, SAMPLE_RATE_HZ, 1, "float32")
        while True:
            try:
                frames = self._sound.read(int(_BLOCK_S * rate), dtype="float32", always_2d=True)  # [frames, channels]
            except soundfile.LibsndfileError as error:
                raise self._refused(f"cannot be decoded ({error.error_string})") from error
            self._num_read += len(frames)
            if self._num_read > MAX_S * rate:
                raise self._too_long(self._num_read / rate)
            if not np.isfinite(frames).all():
                raise self._refused("has samples that are no finite numbers")
            mono: Floats = np.clip(frames.mean(axis=1, dtype=np.float32), -1, 1)
            is_last = len(frames) < int(_BLOCK_S * rate)
            block = mono if resampler is None else resampler.resample_chunk(mono, last=is_last)
            if len(block):
                yield block
            if is_last:
                break
        # Of MP3 and Ogg the length is an estimate; FLAC's is exact.
        if self._sound.format == "FLAC" and self._has_length and self._num_read < self._sound.frames:
            raise self._refused(f"ends after {self._num_read} of {self._sound.frames} samples; send all of it")

    def _refused(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._field}: {reason}", param=self._field)

    def _too_long(self, duration_s: float) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"{self._field}: has {duration_s:.0f} s of sound; at most {MAX_S:.0f} s are allowed, so send it in parts",
            param=self._field,
        )


def _is_cut(file: bytes) -> bool:
    """Whether a RIFF file states more bytes than came; libsndfile takes what there is."""
    stated = int.from_bytes(file[4:8], "little")
    return file[:4] == b"RIFF" and stated not in _UNKNOWN_LENGTHS and stated > len(file) - 8
