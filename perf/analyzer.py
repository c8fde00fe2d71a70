"""NVIDIA's perf_analyzer: found or fetched, run for one level of load, its export read.

Percentiles are made here (`perf.stats`) from the times of single requests that it exports, so that they mean what they
mean everywhere else in perf.
"""

from __future__ import annotations

import csv
import itertools
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build.fetch import cache_folder
from build.locks import lock
from perf.errors import PerfError
from perf.report import say
from perf.stats import percentile

# The last client wheel with the binary in it, which runs on any glibc from 2.28 on; the tool's own wheel wants 2.38.
CLIENT_WHEEL = ("tritonclient", "2.50.0", "manylinux1_x86_64")
OWN_WHEEL = ("perf-analyzer", "2.60.0", "manylinux_2_38_x86_64")
_OWN_GLIBC = (2, 38)
# What the client's binary is linked with and no Debian has by default; nvidia-pytriton's wheel carries both.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
# Its three windows are always taken, whatever they hold: an unstable level is told as such, not thrown away.
NUM_WINDOWS = 3
_ANY_STABILITY = "1000000"
STABILITY = 0.10  # its own default: three windows that differ by at most this much
# No text can imitate a key: inside a JSON string the quotes are escaped.
_TIMES = re.compile(rb'"(timestamp|response_timestamps|window_boundaries)":\s?\[?([\d, ]+|(?=\]))')
_PASS = re.compile(r"Pass \[\d+\] throughput: ([\d.]+) infer/sec\. Avg latency: (\d+) usec")
_EXPORT, _SUMMARY = "export.json", "summary.csv"
_STARTING_S, _ENDING_S = 10.0, 60.0


@dataclass(frozen=True)
class Analyzer:
    """The program and the folder with its libraries (None: it needs none of ours)."""

    program: Path
    libraries: Path | None
    version: str

    def environment(self) -> dict[str, str]:
        if self.libraries is None:
            return dict(os.environ)
        path = os.pathsep.join(filter(None, (str(self.libraries), os.environ.get("LD_LIBRARY_PATH"))))
        return {**os.environ, "LD_LIBRARY_PATH": path}


@dataclass(frozen=True)
class Level:
    """One level of load: so many requests (or sequences) at once, or so many a second, at random (Poisson).

    `load` is a rate that is not known yet: a share of the most that is possible.
    """

    concurrency: int | None = None
    rate: float | None = None
    load: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"

    def of(self, most: float) -> Level:
        """With `load` as a rate, three digits of it."""
        return self if self.load is None else Level(rate=float(f"{self.load * most:.3g}"))

    def flags(self, num_sequences: int | None) -> tuple[str, ...]:
        if self.rate is None:
            return (f"--concurrency-range={self.concurrency}",)
        flags = (f"--request-rate-range={self.rate:g}", "--request-distribution=poisson")
        return flags if num_sequences is None else (*flags, f"--num-of-sequences={num_sequences}")


def find_analyzer() -> Analyzer:
    """The one in `PATH`, else one out of a wheel in the cache. Raises `PerfError` if none can be had that runs."""
    if (found := shutil.which("perf_analyzer")) is not None:
        return _checked(Analyzer(Path(found), None, "PATH"))
    is_new = tuple(map(int, platform.libc_ver()[1].split(".")[:2] or (0,))) >= _OWN_GLIBC
    package, version, tag = OWN_WHEEL if is_new else CLIENT_WHEEL
    folder = cache_folder() / f"{package}-{version}"
    program = folder / "perf_analyzer"
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock"):
        if not program.exists():
            _fetch(f"{package}=={version}", tag, program)
        libraries = None if is_new else _link_libraries(folder / "lib")
    return _checked(Analyzer(program, libraries, f"{package} {version}"))


def _fetch(requirement: str, tag: str, program: Path) -> None:
    say(f"fetching perf_analyzer out of {requirement}")
    with tempfile.TemporaryDirectory(prefix="perf-", dir=program.parent) as scratch:
        command = (
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *(f"--platform={tag}", "--only-binary=:all:", f"--dest={scratch}", requirement),
        )
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise PerfError(
                f"{' '.join(command)}: {run.stderr[-2000:]}\nfix: put a perf_analyzer of your own into PATH"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("bin/perf_analyzer"))
            part = Path(scratch) / "part"
            part.write_bytes(archive.read(name))
        part.chmod(0o755)
        os.replace(part, program)


def _link_libraries(folder: Path) -> Path:
    source = Path(sysconfig.get_paths()["purelib"]) / "nvidia_pytriton.libs"
    folder.mkdir(exist_ok=True)
    for name, pattern in _LIBRARIES.items():
        found = sorted(source.glob(pattern))
        if not found:
            raise PerfError(f"{source}: no {pattern}, which perf_analyzer needs\nfix: pip install -e '.[cpu]'")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(found[0])
    return folder


def _checked(analyzer: Analyzer) -> Analyzer:
    run = subprocess.run([analyzer.program, "--version"], env=analyzer.environment(), capture_output=True, text=True)
    if run.returncode != 0:
        raise PerfError(f"{analyzer.program}: does not run here: {(run.stderr or run.stdout).strip()[-500:]}")
    return analyzer


@dataclass(frozen=True)
class Subject:
    """A model under load: `inputs` is a file of perf_analyzer's `--input-data`; `grpc_url` is host:port.
    `headers` are the metadata that open it.

    Of one that `is_bulky` perf_analyzer exports no single requests, for it keeps all that they hold, in 16 bytes a
    number: pixels of a few seconds were 8 GB.
    """

    model: str
    inputs: Path
    grpc_url: str
    headers: Mapping[str, str]
    is_decoupled: bool = False
    is_sequence: bool = False
    is_bulky: bool = False

    def command(self, analyzer: Analyzer, level: Level, window_ms: int, folder: Path, num_sequences: int) -> list[str]:
        return [
            *(str(analyzer.program), "-v", "-m", self.model, "-i", "grpc", "-u", self.grpc_url),
            *(flag for header in self.headers.items() for flag in ("-H", ":".join(header))),
            *("--async", f"--input-data={self.inputs}", "-f", str(folder / _SUMMARY)),
            *(f"--measurement-interval={window_ms}", f"--stability-percentage={_ANY_STABILITY}"),
            f"--max-trials={NUM_WINDOWS}",
            *(() if self.is_bulky else (f"--profile-export-file={folder / _EXPORT}",)),
            *(("--streaming",) if self.is_decoupled or self.is_sequence else ()),
            *level.flags(num_sequences if self.is_sequence else None),
        ]

    def measure(self, analyzer: Analyzer, level: Level, window_ms: int, num_sequences: int = 4) -> dict[str, Any]:
        """`read_export`, or `read_summary` of a bulky one, of one run.

        Raises `PerfError` with its last words, which never hold a key.
        """
        with tempfile.TemporaryDirectory(prefix="perf-") as scratch:
            folder = Path(scratch)
            command = self.command(analyzer, level, window_ms, folder, num_sequences)
            # It makes its windows a fifth longer, and waits for what is under way.
            limit_s = _STARTING_S + NUM_WINDOWS * window_ms * 1.2 / 1000 + _ENDING_S
            try:
                run = subprocess.run(
                    command, env=analyzer.environment(), capture_output=True, text=True, timeout=limit_s
                )
            except subprocess.TimeoutExpired:
                raise PerfError(f"perf_analyzer, model {self.model}: not done after {limit_s:.0f} s") from None
            if run.returncode != 0 or not (folder / (_SUMMARY if self.is_bulky else _EXPORT)).exists():
                words = (run.stderr.strip() or run.stdout.strip()).splitlines()[-5:]
                raise PerfError(f"perf_analyzer, model {self.model}, exit code {run.returncode}: {' '.join(words)}")
            if self.is_bulky:
                return read_summary((folder / _SUMMARY).read_text(encoding="utf-8"), run.stdout)
            with (folder / _EXPORT).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return read_export(raw)


def read_summary(table: str, printed: str) -> dict[str, Any]:
    """What one run's CSV and verbose output say, as `read_export`: here the percentiles are perf_analyzer's own."""
    (row,) = csv.DictReader(table.splitlines())
    passes = [(float(rate), float(mean)) for rate, mean in _PASS.findall(printed)][-NUM_WINDOWS:]
    count = re.search(r"Request count: (\d+)", printed)
    if count is None or not passes:
        raise PerfError(f"perf_analyzer: its output is not as expected: {printed[-500:]}")
    return {
        "num": int(count[1]),
        "requests_per_s": round(float(row["Inferences/Second"]), 3),
        "ms": {f"p{percent}": float(row[f"p{percent} latency"]) / 1000 for percent in (50, 90, 95, 99)},
        "stable": all(_are_alike(values) for values in zip(*passes)),
    }


def read_export(raw: bytes | mmap.mmap) -> dict[str, Any]:
    """What one run's `--profile-export-file` says, which has one experiment.

    Only its times are looked for: it also holds all that was sent and received, images byte by byte, and is neither
    small nor always UTF-8.

    `ms`: request sent to its last response; of requests with several responses also `first_response_ms`, `gap_ms`
    (between the responses of one request) and `responses_per_s`. `stable`: requests/s and mean time of the windows
    differ by at most `STABILITY`. Raises `PerfError` without a single request.
    """
    sent, bounds_ns = 0, [0]
    all_requests: list[tuple[int, list[int]]] = []
    for match in _TIMES.finditer(raw):
        times = [int(time_ns) for time_ns in match[2].split(b",") if time_ns]
        if match[1] == b"timestamp":
            (sent,) = times
        elif match[1] == b"window_boundaries":
            bounds_ns = times[-NUM_WINDOWS - 1 :]
        elif times:
            all_requests.append((sent, times))
    requests = [each for each in all_requests if bounds_ns[0] <= each[1][-1] <= bounds_ns[-1]]
    if not requests:
        raise PerfError("perf_analyzer: no request ended within its windows\nfix: longer windows (--window-ms)")
    seconds = (bounds_ns[-1] - bounds_ns[0]) / 1e9
    times_ms = [(responses[-1] - sent) / 1e6 for sent, responses in requests]
    result: dict[str, Any] = {
        "num": len(requests),
        "requests_per_s": round(len(requests) / seconds, 3),
        "ms": points(times_ms),
        "stable": _is_stable(requests, bounds_ns),
    }
    if any(len(responses) > 1 for _, responses in requests):
        gaps_ms = [(b - a) / 1e6 for _, responses in requests for a, b in itertools.pairwise(responses)]
        result["first_response_ms"] = points([(responses[0] - sent) / 1e6 for sent, responses in requests])
        result["gap_ms"] = points(gaps_ms)
        result["responses_per_s"] = round(sum(len(responses) for _, responses in requests) / seconds, 3)
    return result


def points(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 90, 95, 99)}


def _is_stable(requests: Sequence[tuple[int, Sequence[int]]], bounds_ns: Sequence[int]) -> bool:
    counts, means = [], []
    for begin, end in itertools.pairwise(bounds_ns):
        times = [responses[-1] - sent for sent, responses in requests if begin < responses[-1] <= end]
        if not times:
            return False
        counts.append(len(times) / (end - begin))
        means.append(sum(times) / len(times))
    return _are_alike(counts) and _are_alike(means)


def _are_alike(values: Sequence[float]) -> bool:
    return max(values) <= min(values) * (1 + STABILITY)
