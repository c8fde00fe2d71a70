"""deploy/ says what the rest of the tree says: metrics, images, files, options. Its tools' checks: tests/deploy."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_targets import GPU_TARGETS, IMAGES

from build.rows import load_target
from orchestrator import __version__
from orchestrator.gateway.metrics import _REGISTRY

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "triton-realtime.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"

# Triton's own that are used, as its docs/user_guide/metrics.md names them. The first are on every page, which
# tests/server/test_dashboard.py looks at; the others where there is a GPU.
TRITON_METRICS = {
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
    "nv_inference_request_failure",
    "nv_inference_request_success",
}
TRITON_GPU_METRICS = {"nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes", "nv_gpu_utilization"}


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def metrics_of_the_code() -> set[str]:
    """As Prometheus sees them."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    found = {f"{metric.name}{suffix}" for metric in _REGISTRY.collect() for suffix in suffixes[metric.type]}
    for path in (ROOT / "orchestrator").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "triton":  # what goes to Triton's page is named whole
            found |= set(re.findall(r'"(rt_[a-z0-9_]+)"', text))
            histograms = re.findall(r'HistogramFamily\("(rt_[a-z0-9_]+)"', text)
            found |= {f"{name}{suffix}" for name in histograms for suffix in suffixes["histogram"]}
        found |= set(re.findall(r"# TYPE (rt_[a-z0-9_]+) ", text))
    return found


# --- observability -----------------------------------------------------------------------------------------


def expressions() -> list[tuple[str, str]]:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    variables = dashboard()["templating"]["list"]
    return [
        *((panel["title"], target["expr"]) for panel in panels for target in panel["targets"]),
        *((variable["name"], variable["query"]["query"]) for variable in variables),
        *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
    ]


def test_every_metric_that_is_asked_for_exists() -> None:
    known = metrics_of_the_code() | TRITON_METRICS | TRITON_GPU_METRICS
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert {"rt_gateway_ttft_seconds_bucket", "rt_queued_requests", "rt_gateway_triton_up"} <= known
    for where, expression in expressions():
        named = set(re.findall(r"\bjob(?:_tier)?:[a-z0-9_:]+", expression))
        assert named <= recorded, where
        for name in re.findall(r"(?<![a-z0-9_:])(?:rt|nv)_[a-z0-9_]+", expression):
            assert name in known, f"{where}: {name} is no metric of this tree"


def test_labels_that_are_asked_for_are_ours() -> None:
    values = {
        "cache": {"exact", "semantic", "miss", "bypass"},
        "class": {"interactive", "batch"},
        "code": {"overloaded", "deadline_exceeded"},
        "kind": {"skipped"},
        "status": {"5.."},
        "route": {"/v1/.*"},
        "job": {"triton-realtime", "$job"},
        "instance": {"$instance"},
    }
    for where, expression in expressions():
        for label, text in re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', expression):
            assert set(text.split("|")) <= values[label], f"{where}: {label}"


def test_the_dashboard_is_one() -> None:
    panels = dashboard()["panels"]
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    cells: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        rows, columns = range(place["y"], place["y"] + place["h"]), range(place["x"], place["x"] + place["w"])
        cells.update((row, column) for row in rows for column in columns)
    assert max(cells.values()) == 1, "panels lie over each other"
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    (uid,) = {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"}
    assert [entry["uid"] for entry in source["datasources"]] == [uid]


def test_each_alert_is_explained() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(Realtime\w+)` \|", page, re.MULTILINE)
    assert sorted(explained) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


# --- images ------------------------------------------------------------------------------------------------


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def argument(name: str) -> str:
    found = re.search(rf"^ARG {name}=(\S+)$", dockerfile(), re.MULTILINE)
    assert found, name
    return found[1]


def test_the_image_is_the_targets() -> None:
    image = argument("TRITON_IMAGE")
    for name in GPU_TARGETS:
        container = load_target(name).container
        assert container is not None and container.image == image, name
    assert image in {entry["ngc_tag"] for entry in IMAGES["images"]}


def test_the_backends_come_from_the_stack_that_the_image_is_made_from() -> None:
    assert argument("BACKENDS_IMAGE") == "nvcr.io/nvidia/tritonserver:25.12-py3"


def test_what_the_images_copy_reaches_the_builder() -> None:
    ignored, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    kept_paths = {line.removeprefix("!") for line in kept if line.startswith("!")}
    assert ignored == "*"
    copied = [line.split()[1:-1] for line in dockerfile().splitlines() if re.match(r"COPY (?!--from)", line)]
    bound = re.findall(r"type=bind,source=([^,]+)", dockerfile())
    paths = {path for line in copied for path in line} | set(bound)
    assert paths == kept_paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("stage", ["gpu", "gpu-build", "cpu"])
def test_nobody_is_root(stage: str) -> None:
    body = re.split(r"^FROM ", dockerfile(), flags=re.MULTILINE)
    (found,) = [part for part in body if part.splitlines()[0].endswith(f" AS {stage}")]
    assert re.findall(r"^USER (.*)$", found, re.MULTILINE) == ["10001:10001"]


def test_the_charts_version_is_the_packages() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "triton-realtime" / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_no_secret_is_in_an_image() -> None:
    assert not re.search(r"(?i)^(ARG|ENV).*(token|password|secret|_key)", dockerfile(), re.MULTILINE)


def test_passwords_and_keys_stay_out_of_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/deploy/.env", "/deploy/secrets/"} <= set(ignored)
