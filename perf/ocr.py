"""`python -m perf ocr`: pages a second over HTTP, with dynamic batching and without, and by rapidocr called directly.

Target scripted with target cpu's OCR models, twice: as it is, and with dynamic batching off at all of them, so that
every line of text is computed alone. rapidocr runs in a virtual environment and a process of its own, with its
defaults. The three take turns, round by round; each client asks for its next page when it has the one before.
"""

from __future__ import annotations

import http.client
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from build.compiler import build
from build.fetch import cache_folder
from build.rows import OCR_MODELS, TargetRow, load_models, load_target
from orchestrator.contracts import OCR_DETECTION_MODEL, OCR_RECOGNIZER_MODEL
from orchestrator.gateway.ocr import OCR_PATH
from perf.environment import install as install_environment
from perf.errors import PerfError
from perf.ocr_pages import Page, draw_receipt
from perf.processes import descendants, processor_s
from perf.report import format_table, say
from perf.stack import Stack, running_stack
from perf.stats import percentile
from perf.worker import Worker

RAPIDOCR = "3.10.0"
# Its own dependencies are loose; with these it reads as it did when this was written.
_PACKAGES = (f"rapidocr=={RAPIDOCR}", "onnxruntime==1.23.2", "opencv-python-headless==4.11.0.86", "numpy==1.26.4")
_TIMEOUT_S = 300
# Both at the most clients: lines in a batch of the recogniser's, and pages a second with batching to those without.
BAR = 1.0


class Round(NamedTuple):
    """One round of one way: each page's time in ms, the time of all and the processor time in s, the lines read.

    `num_lines` and `num_batches` are the recogniser's, by Triton's metrics.
    """

    times_ms: list[float]
    seconds: float
    processor_s: float
    texts: list[list[str]]
    num_lines: float = 0.0
    num_batches: float = 0.0


Way = Callable[[int], Round]  # with so many clients


def ocr(clients: Sequence[int], num_pages: int, num_rounds: int) -> tuple[str, dict[str, Any]]:
    """Measure; returns table and result. Raises `PerfError`, with pip's last words if rapidocr cannot be installed."""
    python = install()
    pages = [draw_receipt(seed) for seed in range(num_pages)]
    with tempfile.TemporaryDirectory(prefix="perf-ocr-") as folder, ExitStack() as started:
        ways: dict[str, Way] = {}
        for name, batches in (("batched", True), ("unbatched", False)):
            say(f"building target scripted with OCR, {name}")
            artifact = Path(folder) / name
            target = with_ocr(load_target("scripted"), batches=batches)
            build(target, load_models(target), artifact, cache=cache_folder(), progress=lambda _: nullcontext())
            ways[name] = partial(_ask_all, started.enter_context(running_stack(artifact)), pages)
        ways["rapidocr"] = partial(
            _read_all, started.enter_context(Worker("perf.rapidocr_direct", python=python)), pages
        )
        for way in ways.values():
            way(1)  # warms up
        runs: dict[str, dict[int, list[Round]]] = {name: {count: [] for count in clients} for name in ways}
        for num_clients in clients:
            for number in range(num_rounds):
                say(f"{num_clients} clients, round {number + 1} of {num_rounds}")
                for name, way in list(ways.items())[:: -1 if number % 2 else 1]:
                    runs[name][num_clients].append(way(num_clients))
    return describe(pages, runs)


def with_ocr(target: TargetRow, *, batches: bool = True) -> TargetRow:
    """`target` with target cpu's OCR models; without `batches` each computes every request alone."""
    models = {name: model for name, model in load_target("cpu").models.items() if name in OCR_MODELS}
    if not batches:
        alone = {"max_queue_delay_microseconds": None, "allow_ragged_batch": False}
        models = {name: model.model_copy(update=alone) for name, model in models.items()}
    ensembles = [*target.ensembles, OCR_DETECTION_MODEL]
    return target.model_copy(update={"models": {**target.models, **models}, "ensembles": ensembles})


def install() -> str:
    """The Python of a virtual environment of its own in the cache, with rapidocr."""
    return str(install_environment(f"rapidocr-direct-{RAPIDOCR}", _PACKAGES) / "bin" / "python")


def _read_all(rapidocr: Worker, pages: Sequence[Page], num_clients: int) -> Round:
    return Round(**rapidocr.ask({"images": [page.image.hex() for page in pages], "clients": num_clients}))


def _ask_all(stack: Stack, pages: Sequence[Page], num_clients: int) -> Round:
    host = urlsplit(stack.gateway_url).netloc
    times_ms, texts = [0.0] * len(pages), [[""]] * len(pages)

    def run(client: int) -> None:
        connection = http.client.HTTPConnection(host, timeout=_TIMEOUT_S)
        for index in range(client, len(pages), num_clients):
            started_s = time.perf_counter()
            connection.request("POST", OCR_PATH, pages[index].image, {"content-type": "image/png"})
            response = connection.getresponse()
            raw = response.read()
            times_ms[index] = (time.perf_counter() - started_s) * 1000
            if response.status != http.HTTPStatus.OK:
                raise PerfError(f"{OCR_PATH}: {response.status} {raw.decode(errors='replace')}")
            texts[index] = [line["text"] for line in json.loads(raw)["lines"]]
        connection.close()

    processes = list(descendants(stack.serve_pid))
    used_s, before = sum(map(processor_s, processes)), _executions(stack)
    started_s = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        for done in [pool.submit(run, client) for client in range(num_clients)]:
            done.result()
    seconds = time.perf_counter() - started_s
    used_s = sum(map(processor_s, processes)) - used_s
    num_lines, num_batches = (now - then for now, then in zip(_executions(stack), before))
    return Round(times_ms, seconds, used_s, texts, num_lines, num_batches)


def _executions(stack: Stack) -> tuple[float, float]:
    """How many lines the recogniser has read, and in how many batches."""
    with urllib.request.urlopen(f"{stack.gateway_url}/metrics", timeout=_TIMEOUT_S) as response:
        page = response.read().decode()
    found = []
    for name in ("nv_inference_count", "nv_inference_exec_count"):
        match = re.search(rf'^{name}{{[^}}]*model="{OCR_RECOGNIZER_MODEL}"[^}}]*}} (\S+)$', page, re.MULTILINE)
        if match is None:
            raise PerfError(f"/metrics has no {name} of {OCR_RECOGNIZER_MODEL}")
        found.append(float(match[1]))
    return found[0], found[1]


def describe(pages: Sequence[Page], runs: dict[str, dict[int, list[Round]]]) -> tuple[str, dict[str, Any]]:
    """Table and result of the rounds of each way and number of clients."""
    rows: list[tuple[object, ...]] = []
    ways: dict[str, Any] = {}
    for name, by_clients in runs.items():
        ways[name] = {str(count): _describe_rounds(rounds) for count, rounds in by_clients.items()}
        for count, one in ways[name].items():
            points = (one["ms"]["p50"], one["ms"]["p95"])
            rows.append(
                (
                    f"{name}, {count} clients",
                    one["pages_per_s"],
                    *points,
                    one["processor_s_per_page"],
                    one.get("batch_size", ""),
                )
            )
        ways[name]["right_lines"] = round(_share_right(pages, by_clients[max(by_clients)][0].texts), 4)
    most = str(max(runs["batched"]))
    pairs = zip(*(runs[name][int(most)] for name in ("batched", "unbatched")))
    result = {
        "command": "ocr",
        "pages": len(pages),
        "rapidocr_version": RAPIDOCR,
        "batch_size": ways["batched"][most]["batch_size"],
        "batching_gain": round(percentile([off.seconds / on.seconds for on, off in pairs], 50), 3),
        "against_rapidocr": {
            str(count): round(
                ways["batched"][str(count)]["pages_per_s"] / ways["rapidocr"][str(count)]["pages_per_s"], 3
            )
            for count in runs["batched"]
        },
        **ways,
    }
    rows += [(f"batch size, {most} clients", result["batch_size"], "", "", "", f"bar > {BAR:g}")]
    rows += [(f"batched / unbatched, {most} clients", result["batching_gain"], "", "", "", f"bar > {BAR:g}")]
    rows += [
        (f"batched / rapidocr, {n} clients", ratio, "", "", "", "") for n, ratio in result["against_rapidocr"].items()
    ]
    rows += [(f"{name}: lines read letter by letter", ways[name]["right_lines"], "", "", "", "") for name in runs]
    header = ("receipts over HTTP", "pages/s", "p50 ms", "p95 ms", "processor s/page", "lines/batch")
    return format_table(header, rows), result


def _describe_rounds(rounds: Sequence[Round]) -> dict[str, Any]:
    times = [each for one in rounds for each in one.times_ms]
    described: dict[str, Any] = {
        "pages_per_s": round(len(times) / sum(one.seconds for one in rounds), 3),
        "ms": {f"p{percent}": round(percentile(times, percent), 1) for percent in (50, 95)},
        "processor_s_per_page": round(sum(one.processor_s for one in rounds) / len(times), 3),
    }
    if num_batches := sum(one.num_batches for one in rounds):
        described["batch_size"] = round(sum(one.num_lines for one in rounds) / num_batches, 2)
    return described


def _share_right(pages: Sequence[Page], texts: Sequence[Sequence[str]]) -> float:
    """The share of lines that were read letter by letter, spaces aside."""
    written = [{line.replace(" ", "") for line in page.texts} for page in pages]
    found = [{line.replace(" ", "") for line in lines} for lines in texts]
    return sum(len(lines & read) for lines, read in zip(written, found)) / sum(map(len, written))
