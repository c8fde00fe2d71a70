"""`python -m perf litellm`: what gateway and orchestrator add to the first token, beside what LiteLLM's proxy adds.

Three paths to one scripted engine, in turns in one run: by gRPC to the engine model, through our gateway, and through
LiteLLM's proxy in front of our gateway. What LiteLLM adds is its path less the gateway's; what we add is the gateway's
less the engine's. LiteLLM runs from a virtual environment of its own, with one worker and its defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.triton.ports import LOOPBACK, Ports, settle
from perf.environment import install as install_environment
from perf.errors import PerfError
from perf.overhead import measure
from perf.processes import stop
from perf.prompts import script
from perf.report import format_table, say
from perf.sse import MODEL
from perf.stack import find_artifact, running_stack
from perf.stats import percentile, summarize

VERSION = "1.108.7"
SHARE_BAR = 1 / 3
_FIRST_TOKEN_MS = 40.0
_TEXT, _ITL_MS = "one two", 2.0
_READY_TIMEOUT_S = 120.0


def litellm(artifacts: Path, num_requests: int) -> tuple[str, dict[str, Any]]:
    """Measure; returns table and result. Raises `PerfError`, with pip's last words if LiteLLM cannot be installed."""
    program = install()
    with running_stack(find_artifact(artifacts, "scripted")) as stack, running_proxy(program, stack.gateway_url) as url:
        times = measure(
            stack,
            lambda _, number: script(_TEXT, _FIRST_TOKEN_MS, _ITL_MS, number),
            num_requests,
            {"litellm": url},
        )
    points = (50, 99)
    at = {name: {p: percentile(values, p) for p in points} for name, values in times.items()}
    ours = {f"p{p}": round(at["gateway"][p] - at["engine"][p], 3) for p in points}
    theirs = {f"p{p}": round(at["litellm"][p] - at["gateway"][p], 3) for p in points}
    share = {key: round(ours[key] / theirs[key], 3) for key in ours}
    result = {
        "command": "litellm",
        "added_ttft_ms": {"ours": ours, "litellm": theirs},
        "share": share,
        "litellm_version": VERSION,
        **{name: summarize(values) for name, values in times.items()},
    }
    rows: list[tuple[object, ...]] = [(name, *(values[p] for p in points), "") for name, values in at.items()]
    rows.append(("ours: gateway - engine", *ours.values(), ""))
    rows.append(("LiteLLM: proxy - gateway", *theirs.values(), ""))
    rows.append(("ours / LiteLLM's", *share.values(), f"<= {SHARE_BAR:.2f}"))
    return format_table(("first token, ms", "p50", "p99", "bar"), rows), result


def install() -> Path:
    """The `litellm` program, in a virtual environment of its own in the cache."""
    return install_environment(f"litellm-{VERSION}", [f"litellm[proxy]=={VERSION}"]) / "bin" / "litellm"


@contextmanager
def running_proxy(program: Path, gateway_url: str) -> Iterator[str]:
    """LiteLLM's proxy in front of `gateway_url` until the block ends; yields its URL."""
    with tempfile.TemporaryDirectory(prefix="perf-") as folder:
        port = settle(Ports(0, 0, 0, 0), LOOPBACK).gateway
        config = Path(folder, "config.yaml")
        to = {"model": f"openai/{MODEL}", "api_base": f"{gateway_url}/v1", "api_key": "none"}
        settings = {
            "model_list": [{"model_name": MODEL, "litellm_params": to}],
            # No key, as ours has none here: on loopback, for as long as it is measured.
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML too
        command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        # Its price list comes with the package; it is not to be fetched.
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        log = Path(folder, "litellm.log")
        say(f"starting litellm {VERSION}")
        with log.open("wb") as file:
            proxy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)
        try:
            _wait_until_ready(proxy, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(proxy, 10)


def _wait_until_ready(proxy: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=2):
                return
        except OSError as error:
            if proxy.poll() is not None or time.monotonic() > deadline_s:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise PerfError(f"litellm did not become ready ({error}); its last words:\n{tail}") from error
        time.sleep(0.2)
