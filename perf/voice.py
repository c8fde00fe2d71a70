"""`python -m perf voice`: conversations over `/v1/realtime`, fed in real time, on target cpu-voice.

Times are a client's: from the last sample of speech (`voice_sounds.speech_bounds`) leaving the microphone to the
first sound of the answer coming in; and from the first sample of an interruption to silence at a listener who plays
what comes in real time, and stops when he is told that somebody speaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.contracts import SAMPLE_RATE_HZ
from orchestrator.talk import TalkError, VoiceClient, talking
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stack import find_artifact, running_stack
from perf.stats import percentile
from perf.voice_sounds import (
    INTERRUPTIONS,
    QUESTIONS,
    STORIES,
    Floats,
    Paused,
    speech_bounds,
    spoken,
    two_cities,
    with_equal_gaps,
    with_pauses,
    words_of,
)

PAUSE_S = 0.7
BARS = {
    "speech_end_to_audio_ms.p50": 900,
    "speech_end_to_audio_ms.p95": 1500,
    "barge_in_ms.p95": 200,
    "false_cutoffs": 0.05,
}
_TRANSCRIPT = "conversation.item.input_audio_transcription.completed"
_LATE_S = 0.3  # by which an event comes after what it is about
_TURNS_A_SESSION = 5
_SESSION = {"max_output_tokens": 60}
_STAGES = ("transcript_ms", "turn_end_ms", "asked_ms", "first_token_ms", "first_piece_ms", "first_audio_ms")


def voice(
    artifacts: Path, num_turns: int, num_barge_ins: int, num_pauses: int, num_parallel: int
) -> tuple[str, dict[str, Any]]:
    """Measure; returns table and result. Raises `PerfError`."""
    with running_stack(find_artifact(artifacts, "cpu-voice")) as stack:
        url = stack.gateway_url
        say("speaking the questions")
        questions = [(text, spoken(url, text)) for text in QUESTIONS]
        try:
            result = asyncio.run(_measure(url, questions, num_turns, num_barge_ins, num_pauses, num_parallel))
        except TalkError as error:
            raise PerfError(str(error)) from error
    return describe(result), result


Question = tuple[str, Floats]


async def _measure(
    url: str, questions: Sequence[Question], num_turns: int, num_barge_ins: int, num_pauses: int, num_parallel: int
) -> dict[str, Any]:
    await _take_turns(url, questions[:1])  # warms up
    say(f"{num_turns} turns")
    chosen = [questions[number % len(questions)] for number in range(num_turns)]
    turns: list[dict[str, float]] = []
    for begin in range(0, num_turns, _TURNS_A_SESSION):
        turns += await _take_turns(url, chosen[begin : begin + _TURNS_A_SESSION])
        for turn in turns[begin:]:
            stages = ", ".join(f"{name.removesuffix('_ms')} {turn[name]:.0f}" for name in _STAGES)
            say(f"  {turn['audio_ms']:.0f} ms; by the server: {stages}")
    say(f"{num_barge_ins} interruptions")
    stories = [await asyncio.to_thread(spoken, url, text) for text in STORIES]
    interruptions = [await asyncio.to_thread(spoken, url, text) for text in INTERRUPTIONS]
    barge_ins = [
        await _barge_in(url, stories[number % len(stories)], interruptions[number // len(stories) % len(interruptions)])
        for number in range(num_barge_ins)
    ]
    say(f"  {[round(each['silent_ms']) for each in barge_ins]} ms")
    say(f"{num_pauses} pauses")
    num_found, num_cut = await _pause(url, questions, num_pauses)
    say(f"  {num_cut} of {num_found} were taken for an end")
    say(f"{num_parallel} sessions at once")
    parallel = await _in_parallel(url, questions, num_parallel)
    return {
        "command": "voice",
        "turns": num_turns,
        "speech_end_to_audio_ms": _points([turn["audio_ms"] for turn in turns]),
        "stages_ms": {name: _points([turn[name] for turn in turns]) for name in _STAGES},
        "word_errors": round(float(np.mean([turn["word_errors"] for turn in turns])), 4),
        "questions_cut": sum(turn["num_parts"] > 1 for turn in turns),
        "barge_in_ms": _points([each["silent_ms"] for each in barge_ins]),
        "barge_in_cancelled_ms": _points([each["cancelled_ms"] for each in barge_ins]),
        "pauses": num_found,
        "false_cutoffs": round(num_cut / max(num_found, 1), 4),
        "parallel": parallel,
    }


async def _take_turns(url: str, questions: Sequence[Question]) -> list[dict[str, float]]:
    """One session; each answer is heard to its end."""
    turns = []
    async with talking(url, _SESSION) as client:
        for text, samples in questions:
            turns.append(await _ask(client, text, samples))
            await asyncio.sleep(0.5)
    return turns


async def _ask(client: VoiceClient, text: str, samples: Floats) -> dict[str, float]:
    since = len(client.received)
    ends_s = client.say(samples) + speech_bounds(samples)[1] / SAMPLE_RATE_HZ
    timeout_s = len(samples) / SAMPLE_RATE_HZ + 30
    done = await client.wait_for(
        "response.done", since, timeout_s, lambda each: each.event["response"]["status"] != "cancelled"
    )
    response_id = done.event["response"]["id"]
    received = client.received[since:]
    audio = [each for each in received if each.type == "response.output_audio.delta"]
    first = next((each for each in audio if each.event["response_id"] == response_id), None)
    if first is None:
        raise PerfError(f"{text!r} was not answered: {done.event['response']['status_details']}")
    turn = next(each.event for each in received if each.type == "rt.turn" and each.event["response_id"] == response_id)
    heard = [each.event["transcript"] for each in received if each.type == _TRANSCRIPT]
    return {
        "audio_ms": (first.at_s - ends_s) * 1000,
        "word_errors": word_errors(" ".join(heard), text),
        "num_parts": len(heard),
        **{name: turn[name] for name in _STAGES},
    }


async def _barge_in(url: str, story: Floats, interruption: Floats) -> dict[str, float]:
    """Into the answer, a second after it began."""
    async with talking(url, {"max_output_tokens": 200}) as client:
        client.say(story)
        first = await client.wait_for("response.output_audio.delta")
        await asyncio.sleep(max(first.at_s + 1.0 - time.monotonic(), 0))
        since = len(client.received)
        begins_s = client.say(interruption) + speech_bounds(interruption)[0] / SAMPLE_RATE_HZ
        started = await client.wait_for("input_audio_buffer.speech_started", since)
        silent_s = client.silent_s
        done = await client.wait_for("response.done", since)
        reason = done.event["response"]["status_details"].get("reason")
        if reason != "turn_detected":
            raise PerfError(f"the answer was not interrupted: {done.event['response']['status_details']}")
        between = client.received[since : client.received.index(done)]
        late = [each for each in between if each.type == "response.output_audio.delta" and each.at_s > started.at_s]
        silent_s = max([silent_s, *(each.at_s for each in late)])
        return {"silent_ms": (silent_s - begins_s) * 1000, "cancelled_ms": (done.at_s - begins_s) * 1000}


async def _pause(url: str, questions: Sequence[Question], num_wanted: int) -> tuple[int, int]:
    """Sentences with pauses in them: how many pauses there were, and in how many the person was taken for done."""
    samples = two_cities()
    third = len(samples) // 3
    sounds = [with_equal_gaps(samples[begin : begin + third], PAUSE_S) for begin in (0, third, 2 * third)]
    for _, samples in questions:
        if sum(len(each.pauses) for each in sounds) >= num_wanted:
            break
        words = await asyncio.to_thread(words_of, url, samples)
        sounds.append(with_pauses(samples, words, 2 if len(words) > 5 else 1, PAUSE_S))
    slots = asyncio.Semaphore(2)

    async def hear(sound: Paused) -> int:
        async with slots:
            return await _count_cuts(url, sound)

    cuts = await asyncio.gather(*map(hear, sounds))
    return sum(len(each.pauses) for each in sounds), sum(cuts)


async def _count_cuts(url: str, sound: Paused) -> int:
    """In how many of the pauses a turn ended."""
    detection = {"type": "semantic_vad", "create_response": False}
    async with talking(url, {"audio": {"input": {"turn_detection": detection}}}) as client:
        begins_s = client.say(sound.samples)
        await asyncio.sleep(begins_s + len(sound.samples) / SAMPLE_RATE_HZ - time.monotonic())
        stops_s = [each.at_s - begins_s for each in client.received if each.type == "input_audio_buffer.speech_stopped"]
    pauses_s = [(begin / SAMPLE_RATE_HZ, end / SAMPLE_RATE_HZ) for begin, end in sound.pauses]
    return sum(any(begin_s < at_s < end_s + _LATE_S for at_s in stops_s) for begin_s, end_s in pauses_s)


async def _in_parallel(url: str, questions: Sequence[Question], num: int) -> dict[str, Any]:
    """`num` sessions, a question each; and one more than the server takes, which is refused."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(talking(url, _SESSION)) for _ in range(num)]
        is_refused = await _is_refused(url)

        async def ask(number: int) -> dict[str, float]:
            await asyncio.sleep(0.3 * number)  # people do not speak in chorus
            return await _ask(clients[number], *questions[number % len(questions)])

        turns = await asyncio.gather(*map(ask, range(num)))
        return {
            "sessions": num,
            "one_more_refused": is_refused,
            "speech_end_to_audio_ms": _points([turn["audio_ms"] for turn in turns]),
            "word_errors": round(float(np.mean([turn["word_errors"] for turn in turns])), 4),
            "longest_gap_ms": round(max(client.longest_gap_s for client in clients) * 1000, 1),
        }


async def _is_refused(url: str) -> bool:
    try:
        async with talking(url):
            return False
    except TalkError as error:
        return "sessions are open" in str(error)


def word_errors(heard: str, said: str) -> float:
    """The share of words that were not heard, or heard otherwise; numbers may be written either way."""
    mine, theirs = (re.findall(r"[a-z']+", text.lower()) for text in (heard, said))
    same = sum(block.size for block in difflib.SequenceMatcher(a=mine, b=theirs, autojunk=False).get_matching_blocks())
    return 1 - same / len(theirs)


def _points(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values, percent), 1) for percent in (50, 95)}


def describe(result: dict[str, Any]) -> str:
    """A table of it."""
    rows: list[tuple[object, ...]] = []
    for name in ("speech_end_to_audio_ms", "barge_in_ms", "barge_in_cancelled_ms"):
        points = result[name]
        bars = " / ".join(f"{BARS[key]:g}" if (key := f"{name}.{point}") in BARS else "" for point in points)
        rows.append((name, points["p50"], points["p95"], bars.strip(" /")))
    rows += [(f"  {name}", points["p50"], points["p95"], "") for name, points in result["stages_ms"].items()]
    parallel = result["parallel"]
    points = parallel["speech_end_to_audio_ms"]
    rows.append((f"{parallel['sessions']} at once: speech_end_to_audio_ms", points["p50"], points["p95"], ""))
    rows.append((f"{parallel['sessions']} at once: longest_gap_ms", parallel["longest_gap_ms"], "", ""))
    rows.append((f"false cut-offs, of {result['pauses']} pauses", result["false_cutoffs"], "", BARS["false_cutoffs"]))
    rows.append(("word errors", result["word_errors"], "", ""))
    return format_table(("voice", "p50", "p95", "bar"), rows)
