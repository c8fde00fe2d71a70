"""The gateway's metrics, and one page with Triton's beside them.

With several workers each keeps its numbers in files of one folder (`PROMETHEUS_MULTIPROC_DIR`, read by
prometheus_client when it is imported), and whichever worker is asked adds all of them up.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from orchestrator.replica_set import ALONE, Address
from orchestrator.replicas import Replica, Replicas

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Prometheus' text format, which Triton writes too.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TRITON_TIMEOUT_S = 2.0

disable_created_metrics()  # type: ignore[no-untyped-call]
_REGISTRY = CollectorRegistry()
OTHER_ROUTE = "other"
_REQUESTS = Counter(
    "rt_gateway_requests",
    f"Answered HTTP requests; status 499: the client left before its answer, route '{OTHER_ROUTE}': not one of ours",
    ("route", "status"),
    registry=_REGISTRY,
)
_LIVE_STREAMS = Gauge(
    "rt_gateway_live_streams", "SSE streams being sent", multiprocess_mode="livesum", registry=_REGISTRY
)
# Fine around the time an answer is felt as immediate, up to a long prefill in a queue.
_TTFT_S = Histogram(
    "rt_gateway_ttft_seconds",
    "From a request's head read to its first event handed to the connection",
    buckets=(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30),
    registry=_REGISTRY,
)
REPLICA_UP = Gauge(
    "rt_gateway_replica_up",
    "Whether a Triton takes requests and is well, as each gateway process found",
    ("replica",),
    multiprocess_mode="livemin",
    registry=_REGISTRY,
)
REPLICA_LIVE = Gauge(
    "rt_gateway_replica_live_requests",
    "Requests that the gateway has at a Triton",
    ("replica",),
    multiprocess_mode="livesum",
    registry=_REGISTRY,
)
REPLICA_RESTARTS = Gauge(
    "rt_gateway_replica_restarts",
    "How often a Triton was started again because it had died",
    ("replica",),
    multiprocess_mode="livemax",
    registry=_REGISTRY,
)
SESSIONS = Gauge("rt_realtime_sessions", "Open /v1/realtime sessions", multiprocess_mode="livesum", registry=_REGISTRY)
# From the end of speech: around the time in which people answer each other (0.2 s) and the bars (0.9 and 1.5 s).
TURN_S = Histogram(
    "rt_realtime_turn_seconds",
    "From the end of speech to the transcript, the model's first token, and the first audio sent",
    ("stage",),
    buckets=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.2, 1.5, 2, 3, 5, 10),
    registry=_REGISTRY,
)
DECISIONS = Counter(
    "rt_realtime_decisions",
    "An answer interrupted, or resumed after noise or a little word; a turn in which nothing was said; an answer that "
    "was begun early, and dropped",
    ("decision",),
    registry=_REGISTRY,
)
_EVENTS = Counter("rt_gateway_events", "SSE events sent; counted when their stream ends", registry=_REGISTRY)


_is_counting = True


def count_requests(is_wanted: bool) -> None:
    """Whether the three below do anything; as it is when the process starts, they do."""
    global _is_counting
    _is_counting = is_wanted


def count_answer(route: str, status: int) -> None:
    """`route` is one of few, never what a caller wrote."""
    if _is_counting:
        _answers(route, status).inc()


def count_stream_begun() -> None:
    if _is_counting:
        _LIVE_STREAMS.inc()


def count_stream_ended(ttft_s: float, num_events: int) -> None:
    if _is_counting:
        _TTFT_S.observe(ttft_s)
        _EVENTS.inc(num_events)
        _LIVE_STREAMS.dec()


@cache
def _answers(route: str, status: int) -> Counter:
    return _REQUESTS.labels(route, status)


def tell_replicas(replicas: Replicas) -> None:
    """What this process knows of each Triton. While one takes another's place, both are the same replica."""
    by_name: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_name.setdefault(replica.name, []).append(replica)
    for name, same in by_name.items():
        REPLICA_UP.labels(name).set(any(each.address.state == "serving" and each.is_up for each in same))
        REPLICA_LIVE.labels(name).set(sum(each.num_live for each in same))
        REPLICA_RESTARTS.labels(name).set(max(each.address.num_restarts for each in same))


async def render_page(replicas: Replicas) -> bytes:
    """Ours, then Triton's; of several Tritons all, each sample with the label `replica`.

    `rt_gateway_triton_up` is 0 when none of them can be read, and the page is still one.
    """
    addresses = [replica.address for replica in replicas.serving]
    return await asyncio.to_thread(_render_page, addresses)


def _render_page(addresses: Sequence[Address]) -> bytes:
    pages = {address.name: _read_triton(address.metrics_url) for address in addresses}
    read = {name: page for name, page in pages.items() if page is not None}
    triton = read.get(ALONE, b"") if list(pages) == [ALONE] else join_pages(read)
    up = (
        "# HELP rt_gateway_triton_up Whether Triton's metrics page could be read\n"
        f"# TYPE rt_gateway_triton_up gauge\nrt_gateway_triton_up {int(bool(read))}.0\n"
    )
    return generate_latest(_registry()) + up.encode() + triton


def join_pages(pages: Mapping[str, bytes]) -> bytes:
    """One page of those of several Tritons, by name: all samples of a metric together, with the label `replica`."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for name, page in pages.items():
        label = b'replica="%s"' % name.encode()
        own: dict[bytes, list[bytes]] = {}
        family = b""
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                own.setdefault(family, []).append(line)
            elif line:
                samples.setdefault(family, []).append(_add_label(line, label))
        for family, lines in own.items():
            heads.setdefault(family, lines)
    return b"".join(line + b"\n" for family in heads for line in (*heads[family], *samples.get(family, ())))


_SAMPLE = re.compile(rb"([A-Za-z0-9_:]+)(?:\{(.*)\})?( .*)")


def _add_label(line: bytes, label: bytes) -> bytes:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    name, others, value = found.groups()
    return b"%s{%s}%s" % (name, b",".join(filter(None, (label, others))), value)


def _registry() -> CollectorRegistry:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return _REGISTRY
    for path in Path(folder).glob("gauge_live*.db"):
        process_id = path.stem.rpartition("_")[2]
        if not Path("/proc", process_id).exists():  # a worker that died left its streams behind
            mark_process_dead(int(process_id), folder)  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return registry


def _read_triton(url: str) -> bytes | None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=_TRITON_TIMEOUT_S)
    try:
        connection.request("GET", address.path)
        response = connection.getresponse()
        return response.read() if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
