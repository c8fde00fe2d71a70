"""What the model is fed with, measured at a served target through its gateway."""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from perf.errors import PerfError
from perf.processes import descendants, processor_s
from perf.prompts import QUESTIONS, fresh_question, script
from perf.report import say
from perf.simulation.events import Simulation
from perf.simulation.replica import Service
from perf.simulation.traffic import Ask, Tier, Tokens
from perf.stack import Stack
from perf.worker import Worker

SEQUENCES = (1, 2, 4, 8, 16, 32)
_STEPS = 48  # tokens of each sequence whose steps are timed
_ROUNDS = 3
_TTFTS = 8  # requests of each length
# In prompts: a long one, of some 150 tokens, and those of the sequences whose steps are timed. As long as what the
# model is held against: prefill is not quite linear, and a step takes longer the more there is to attend to.
_MANY_QUESTIONS, _SOME_QUESTIONS = 12, 3
# Requests that come as fast as the engine could answer them, if so many were in a step: the longer they come, the less
# their end is that of the last ones, and the more of them run together in the end.
_NUM_JOINING, _JOINED_TOKENS, _TOGETHER = 96, 24, 16
_JOINING = Tier("simple", 1.0, Tokens(60), Tokens(_JOINED_TOKENS))
_HALVINGS = 20
_HITS = 10
_MEASURED = ("prefill_s_per_token", "join_s", "before_s", "hit_s", "first_token_s", "cores")
_TIMEOUT_S = 60


@dataclass
class Gateway:
    """A served target as its callers see it. Prompts are fresh: each has a number of its own in front."""

    stack: Stack
    worker: Worker
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._tokenizer = self.stack.load_tokenizer()

    def prompt(self, num_questions: int = 1) -> str:
        number = next(self.numbers)
        more = (QUESTIONS[(number + place) % len(QUESTIONS)] for place in range(1, num_questions))
        return "\n".join([fresh_question(number, number), *more])

    def script(self, num_tokens: int, first_token_ms: float, itl_ms: float) -> str:
        """Of the scripted engine: so many tokens."""
        return script("one" + " two" * (num_tokens - 1), first_token_ms, itl_ms, next(self.numbers))

    def count(self, prompt: str) -> int:
        """Tokens of the prompt, chat template included."""
        return len(self._tokenizer.encode_chat([{"role": "user", "content": prompt}]))

    def ask(self, asks: Sequence[tuple[float, str, int]]) -> list[dict[str, Any]]:
        """`perf.open_load`'s answers. Raises `PerfError` when one failed, or is not as long as was asked for."""
        answers: list[dict[str, Any]] = self.worker.ask({"asks": list(asks)})["answers"]
        if failures := [each["failed"] for each in answers if "failed" in each]:
            raise PerfError(f"{len(failures)} of {len(answers)} requests failed: {failures[0]}")
        if wrong := [each["tokens"] for each, (_, _, asked) in zip(answers, asks) if each["tokens"] != asked]:
            raise PerfError(
                f"{len(wrong)} of {len(answers)} answers have another length than was asked for: {wrong[:5]}"
            )
        return answers

    def processor_s(self) -> float:
        """What all processes of the served target have used so far."""
        return sum(map(processor_s, descendants(self.stack.serve_pid)))


def ttft_s(answer: dict[str, Any]) -> float:
    return float(answer["times_s"][0] - answer["sent_s"])


def calibrate(gateway: Gateway, max_running: int, max_live: int, step_tokens: int) -> Service:
    """Time an engine that batches in flight; the three limits are its target's. Raises `PerfError`."""
    gateway.ask([(0.0, gateway.prompt(), 8) for _ in range(4)])  # warms up
    say("service times: prefill")
    times: dict[int, list[tuple[int, float]]] = {1: [], _MANY_QUESTIONS: []}
    for num_questions in list(times) * _TTFTS:
        prompt = gateway.prompt(num_questions)
        (answer,) = gateway.ask([(0.0, prompt, 2)])
        times[num_questions].append((gateway.count(prompt), ttft_s(answer)))
    short, long = ([statistics.median(each) for each in zip(*points)] for points in times.values())
    prefill_s = max(0.0, (long[1] - short[1]) / (long[0] - short[0]))
    steps: list[tuple[int, float]] = []
    cores = 1.0
    for size in SEQUENCES:
        if size > max_running:
            break
        say(f"service times: {size} sequences")
        rounds = []
        for _ in range(_ROUNDS):
            used_s, began_s = gateway.processor_s(), time.monotonic()
            rounds.append(
                _step_s(gateway.ask([(0.0, gateway.prompt(_SOME_QUESTIONS), _STEPS + size) for _ in range(size)]))
            )
            cores = max(cores, (gateway.processor_s() - used_s) / (time.monotonic() - began_s))
        # More sequences never make a step shorter: what looks so is noise.
        steps.append((size, max([statistics.median(rounds), *(took_s for _, took_s in steps)])))
    service = Service(
        steps=tuple(steps),
        prefill_s_per_token=prefill_s,
        hit_s=_hit_s(gateway.stack.gateway_url),
        step_tokens=step_tokens,
        max_running=max_running,
        max_live=max_live,
        cores=round(cores, 2),
    )
    say("service times: requests that join")
    service = _with_joins(gateway, service)
    before_s = max(0.0, short[1] - short[0] * prefill_s - service.join_s - steps[0][1])
    return dataclasses.replace(service, before_s=before_s)


def mean_of(services: Sequence[Service]) -> Service:
    """The mean of what was measured several times; the limits are the first's."""
    first = services[0]
    sizes = [size for size, _ in first.steps]
    steps_s = [statistics.mean(took_s) for took_s in zip(*([took_s for _, took_s in each.steps] for each in services))]
    means = {name: statistics.mean(getattr(each, name) for each in services) for name in _MEASURED}
    return dataclasses.replace(first, steps=tuple(zip(sizes, steps_s)), **means)


def _with_joins(gateway: Gateway, service: Service) -> Service:
    """`service` with its `join_s`: by it, requests that come as fast as the engine could answer them end when they did.

    It is what a request takes from the engine beside its prefill: embedder, cache and all else on its way use cores
    that the engine would use. A request alone does not show it.
    """
    lengths = [gateway.count(gateway.prompt()) for _ in range(_NUM_JOINING)]
    every_s = service.step_s(_TOGETHER) * _JOINED_TOKENS / _TOGETHER
    every_s += service.prefill_s_per_token * statistics.mean(lengths)
    begins_s = [place * every_s for place in range(_NUM_JOINING)]

    def asked_end_s() -> float:
        answers = gateway.ask([(at_s, gateway.prompt(), _JOINED_TOKENS) for at_s in begins_s])
        return max(float(answer["times_s"][-1]) for answer in answers)

    def simulated_end_s(join_s: float) -> float:
        simulation = Simulation(dataclasses.replace(service, join_s=join_s), 1)
        simulation.run((at_s, Ask(_JOINING, length, _JOINED_TOKENS)) for at_s, length in zip(begins_s, lengths))
        return simulation.now_s

    end_s = statistics.median(asked_end_s() for _ in range(_ROUNDS))
    low_s, high_s = 0.0, end_s / _NUM_JOINING
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if simulated_end_s(middle_s) >= end_s else (middle_s, high_s)
    return dataclasses.replace(service, join_s=low_s)


def calibrate_scripted(gateway: Gateway, first_token_ms: float, itl_ms: float, max_running: int) -> Service:
    """The same for the scripted engine, of which each sequence keeps its own time.

    What the engine was told is not taken for what it takes: at high loads 2 % more of it are 15 % more of waiting.
    """
    asks = [[(0.0, gateway.script(_STEPS, first_token_ms, itl_ms), _STEPS)] for _ in range(_TTFTS)]
    answers = [answer for ask in asks for answer in gateway.ask(ask)]
    # By the server's own account, since a place in the queue is held for as long.
    first_token_s = statistics.median(answer["rt"]["stages_ms"]["prefill"] / 1000 for answer in answers)
    return Service(
        steps=((1, statistics.median(_step_s([answer]) for answer in answers)),),
        first_token_s=first_token_s,
        before_s=max(0.0, statistics.median(map(ttft_s, answers)) - first_token_s),
        max_running=max_running,
        steps_together=False,
    )


def _step_s(answers: Sequence[dict[str, Any]]) -> float:
    """Seconds of a step while all of them decode."""
    begin = max(answer["times_s"][0] for answer in answers)
    end = min(answer["times_s"][-1] for answer in answers)
    steps: list[float] = []
    for answer in answers:
        within = [time_s for time_s in answer["times_s"] if begin <= time_s <= end]
        per_event = answer["tokens"] / len(answer["times_s"])
        if len(within) > 1:
            steps.append((within[-1] - within[0]) / ((len(within) - 1) * per_event))
    if not steps:
        raise PerfError("service times: the answers did not overlap; the machine is too busy to be measured")
    return statistics.median(steps)


def _hit_s(url: str) -> float:
    """A stored answer's whole time; 0 where the target stores none."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    times_s = []
    for number in range(_HITS):
        question = {"role": "user", "content": f"What is the capital of France? Answer in one sentence. ({number})"}
        body = json.dumps({"model": "simple", "messages": [question], "temperature": 0, "max_tokens": 64})
        for _ in range(2):
            began_s = time.monotonic()
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        if answer.get("rt", {}).get("cache") in ("exact", "semantic"):
            times_s.append(time.monotonic() - began_s)
    connection.close()
    return statistics.median(times_s) if times_s else 0.0
