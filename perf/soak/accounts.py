"""The books of a soak: what was sent against what the server's log and metrics say of it."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from orchestrator.contracts import ORCHESTRATOR_MODEL
from perf.errors import PerfError
from perf.soak.traffic import Ask, Heard

_EVENTS = ("request", "request_beside")
_GATEWAY_CODES = {"unsupported_media_type"}  # what the gateway refuses by itself, and the orchestrator never sees
_SETTLE_S = 15.0  # the metrics of latencies are up to 2 s old
_POLL_S = 0.2
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class RequestLog:
    """The lines of requests in a Triton's log that is being written, and may be moved or emptied meanwhile.

    `name` is the replica's on the metrics page; "" where there is one alone. `since_start` counts the lines of the
    process that writes now, by model and outcome, and `num_starts` the processes after the first.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name
        self.outcomes: dict[str, list[str]] = {}  # by x_request_id
        self.since_start: Counter[tuple[str, str]] = Counter()
        self.num_starts = self.num_rotations = 0
        self._path = path
        status = path.stat()
        self._inode, self._offset = status.st_ino, status.st_size

    def read(self) -> None:
        """What has come since, as far as lines are whole."""
        before = self._path.with_name(f"{self._path.name}.1")
        try:
            status = self._path.stat()
        except FileNotFoundError:  # the next one is just being started
            return
        if status.st_ino != self._inode:  # another process writes another file
            self._take(before)
            self.num_starts += 1
            self.since_start.clear()
            self._inode, self._offset = status.st_ino, 0
        elif status.st_size < self._offset:
            self._take(before)
            self.num_rotations += 1
            self._offset = 0
        self._take(self._path)

    def _take(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if line.startswith(b'{"event": "request'):
                    row = json.loads(line)
                    if row["event"] in _EVENTS:
                        self.outcomes.setdefault(str(row["x_request_id"]), []).append(row["outcome"])
                        model = row["model"] if row["event"] == "request_beside" else ORCHESTRATOR_MODEL
                        self.since_start[model, row["outcome"]] += 1


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def read_metrics(url: str, key: str) -> list[Sample]:
    """The gateway's page, which has Triton's on it. Raises `PerfError`."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request("GET", "/metrics", headers={"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        page = response.read().decode()
        if response.status != http.HTTPStatus.OK:
            raise PerfError(f"{url}/metrics: {response.status} {page[:200]}")
    finally:
        connection.close()
    return list(_samples(page))


def _samples(page: str) -> Iterator[Sample]:
    for name, labels, value in _SAMPLE.findall(page):
        yield Sample(name, dict(_LABEL.findall(labels)), float(value))


def total(samples: list[Sample], name: str, **labels: str) -> int:
    """Of the counter `name`, over all its lines that have `labels`."""
    return round(sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items()))


class Books:
    """Everything that was sent, and everything that the server says of it, since this was made."""

    def __init__(self, url: str, key: str, logs: Sequence[RequestLog]) -> None:
        self.logs = logs
        self._url, self._key = url, key
        self._before = read_metrics(url, key)
        self._sent: dict[str, Ask] = {}
        self._refused: set[str] = set()  # by the gateway
        self._unseen: set[str] = set()  # never reached it, or left before anything came back
        self._spans: dict[str, tuple[float, float]] = {}  # from when to when
        self._excused: set[str] = set()

    def read(self) -> None:
        for log in self.logs:
            log.read()

    def enter(self, heard: Heard, code: str | None) -> None:
        """A request that is over; `code` is the error that came."""
        ask = heard.ask
        self._sent[ask.request_id] = ask
        self._spans[ask.request_id] = heard.sent_s, heard.ended_s
        if {code, *ask.codes} & _GATEWAY_CODES:
            self._refused.add(ask.request_id)
        if heard.fault is not None and heard.status == 0:
            self._unseen.add(ask.request_id)

    def close(self, is_excused: Callable[[float, float], bool]) -> tuple[dict[str, Any], list[str]]:
        """The sums, and each difference in words. Waits some seconds for lines and metrics to come.

        `is_excused` says of a time from when to when that who would have logged the request may have been killed.
        """
        self._excused = {request_id for request_id, span in self._spans.items() if is_excused(*span)}
        ends_s = time.monotonic() + _SETTLE_S
        while True:
            self.read()
            faults = [*self._check_log(), *self._check_metrics(now := read_metrics(self._url, self._key))]
            if not faults or time.monotonic() > ends_s:
                return self._describe(now), faults
            time.sleep(_POLL_S)

    def _lines(self) -> dict[str, list[str]]:
        """The outcomes of each request, in all logs."""
        lines: dict[str, list[str]] = {}
        for log in self.logs:
            for request_id, ends in log.outcomes.items():
                lines.setdefault(request_id, []).extend(ends)
        return lines

    def _check_log(self) -> Iterator[str]:
        lines = self._lines()
        for request_id in sorted(self._sent.keys() - self._refused - self._unseen - self._excused - lines.keys()):
            yield f"log: no line of {self._sent[request_id].kind} {request_id}"
        for request_id, ends in lines.items():
            if request_id not in self._sent:
                yield f"log: a line of {request_id}, which nobody sent"
            elif request_id in self._refused:
                yield f"log: a line of {request_id}, which the gateway refused"
            if len(ends) > 1 and request_id not in self._excused:
                yield f"log: {len(ends)} lines of {request_id}: {', '.join(ends)}"

    def _check_metrics(self, now: list[Sample]) -> Iterator[str]:
        def compare(what: str, counted: int, known: int) -> Iterator[str]:
            if counted != known:
                yield f"metrics: {what}: {counted} are counted, {known} are known"

        for path in sorted({ask.path for ask in self._sent.values()}):
            # One that was never read was never answered: it may be counted or not.
            sent = sum(ask.path == path for ask in self._sent.values())
            lost = sum(self._sent[request_id].path == path for request_id in self._unseen)
            counted = self._since(now, "rt_gateway_requests_total", route=path)
            yield from compare(f"rt_gateway_requests_total of {path}", max(counted, sent - lost), min(counted, sent))
        for log in self.logs:
            # Counters of a process that was started anew began anew, and so did its log.
            labels = {"replica": log.name} if log.name else {}
            of = f" of {log.name}" if log.name else ""
            is_first = not log.num_starts
            for (model, outcome), num_lines in sorted(log.since_start.items()):
                counted = self._since(now, "rt_requests_total", is_first, model=model, outcome=outcome, **labels)
                yield from compare(f"rt_requests_total{of}, {model}, {outcome}", counted, num_lines)
            counted = self._since(now, "rt_requests_total", is_first, **labels)
            yield from compare(f"rt_requests_total{of}", counted, log.since_start.total())
            counted = self._since(now, "rt_request_seconds_count", is_first, **labels)
            yield from compare(f"rt_request_seconds_count{of}", counted, log.since_start[ORCHESTRATOR_MODEL, "ok"])

    def _since(self, now: list[Sample], name: str, has_before: bool = True, **labels: str) -> int:
        return total(now, name, **labels) - (total(self._before, name, **labels) if has_before else 0)

    def _describe(self, now: list[Sample]) -> dict[str, Any]:
        lines = self._lines()
        statuses = {each.labels["status"] for each in now if each.name == "rt_gateway_requests_total"}
        answers = {
            status: sum(
                self._since(now, "rt_gateway_requests_total", route=path, status=status)
                for path in {ask.path for ask in self._sent.values()}
            )
            for status in sorted(statuses)
        }
        return {
            "sent": len(self._sent),
            "refused_by_gateway": len(self._refused),
            "never_answered": len(self._unseen),
            "excused": len(self._excused),
            "lines_in_log": sum(map(len, lines.values())),
            "outcomes": dict(sorted(Counter(end for ends in lines.values() for end in ends).items())),
            "gateway_statuses": {status: num for status, num in answers.items() if num},
            "log_rotations": sum(log.num_rotations for log in self.logs),
        }


def are_all_up(url: str, key: str) -> bool:
    """Whether the gateway is ready, and finds every replica well."""
    try:
        replicas = [each.value for each in read_metrics(url, key) if each.name == "rt_gateway_replica_up"]
    except (PerfError, OSError, http.client.HTTPException):
        return False
    return all(replicas) and _is_ready(url)


def _is_ready(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
