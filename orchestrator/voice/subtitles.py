"""Transcripts as subtitle files: SubRip (.srt) and WebVTT (https://www.w3.org/TR/webvtt1/)."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.voice.transcript import Segment


def to_srt(segments: Sequence[Segment]) -> str:
    """A numbered block for each segment."""
    return "".join(
        f"{number}\n{_times(segment, ',')}\n{_line(segment)}\n\n" for number, segment in enumerate(segments, 1)
    )


def to_vtt(segments: Sequence[Segment]) -> str:
    """A cue for each segment."""
    return "WEBVTT\n\n" + "".join(f"{_times(segment, '.')}\n{_line(segment)}\n\n" for segment in segments)


def _times(segment: Segment, point: str) -> str:
    return f"{_clock(segment.start_s, point)} --> {_clock(segment.end_s, point)}"


def _clock(time_s: float, point: str) -> str:
    seconds, milliseconds = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}{point}{milliseconds:03d}"


def _line(segment: Segment) -> str:
    # An arrow would be read as times.
    return " ".join(segment.text.split()).replace("-->", "->")
