"""What alerts and dashboard ask of Triton is on its page."""

from __future__ import annotations

import re
from pathlib import Path

from serving import Stack, script

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ("grafana/dashboards/triton-realtime.json", "prometheus/alerts.yaml")


def test_every_metric_of_triton_that_is_asked_for_exists(scripted_stack: Stack) -> None:
    """But for the GPU's, of which there is none here; ours are in tests/unit/test_deploy.py."""
    scripted_stack.stream(messages=script(text="a b c"))
    page = scripted_stack.get("/metrics").text
    asked = {name for file in FILES for name in re.findall(r"nv_[a-z0-9_]+", (DEPLOY / file).read_text("utf-8"))}
    names = {name for name in asked if not name.startswith("nv_gpu_")}
    assert len(names) >= 5
    assert {name for name in names if f"\n{name}{{" not in page} == set()
