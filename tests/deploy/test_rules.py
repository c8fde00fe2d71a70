"""Prometheus' configuration and alerts, by Prometheus' own checker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from debian import NotToBeHad, find_program

ROOT = Path(__file__).parents[2]
ALERTS = "deploy/prometheus/alerts.yaml"
TESTS = "tests/deploy/alerts.yaml"


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return find_program("promtool", "prometheus", "usr/bin/promtool", is_static=True).path
    except NotToBeHad as error:
        if os.environ.get("CI"):
            pytest.fail(f"promtool cannot be had, so no alert was tested: {error}")
        pytest.skip(f"promtool cannot be had, so no alert was tested: {error}\nfix: apt-get install prometheus")


def run(promtool: Path, *arguments: str) -> None:
    done = subprocess.run([promtool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_one(promtool: Path) -> None:
    # The key's file is not there; what else is wrong is found all the same.
    run(promtool, "check", "config", "--syntax-only", "deploy/prometheus/prometheus.yaml")
    run(promtool, "check", "rules", "--lint-fatal", ALERTS)


def test_alerts_fire_where_they_should_and_nowhere_else(promtool: Path) -> None:
    run(promtool, "test", "rules", TESTS)


def test_the_autoscalers_metric_is_the_mean_wait_of_a_minute(promtool: Path, tmp_path: Path) -> None:
    """The adapter's rule, as docs/operations.md has it, filled in as the adapter does for two pods."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (rule,) = yaml.safe_load(next(block for block in text.split("```") if "\nrules:\n" in block)[len("text") :])[
        "rules"
    ]
    assert rule["name"]["as"] == "rt_queue_wait_seconds"
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="prod",pod=~"a|b"')
    query = query.replace("<<.GroupBy>>", "pod").replace("<<.Series>>", "rt_queue_seconds_sum")

    def series(pod: str, cache: str, kind: str, seconds: str, count: str) -> list[dict[str, str]]:
        labels = f'namespace="prod",pod="{pod}",class="{kind}",cache="{cache}",tier="simple"'
        return [
            {"series": f"rt_queue_seconds_sum{{{labels}}}", "values": seconds},
            {"series": f"rt_queue_seconds_count{{{labels}}}", "values": count},
        ]

    given = [
        *series("a", "miss", "interactive", "0+6x20", "0+10x20"),
        *series("a", "bypass", "interactive", "0+2x20", "0+10x20"),
        *series("a", "exact", "interactive", "0x20", "0+1000x20"),
        *series("a", "miss", "batch", "0+900x20", "0+10x20"),
        *series("b", "miss", "interactive", "5x20", "7x20"),
    ]
    wanted = [{"labels": '{pod="a"}', "value": 0.4}, {"labels": '{pod="b"}', "value": 0}]
    test = {"expr": query, "eval_time": "4m", "exp_samples": wanted}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "15s", "input_series": given, "promql_expr_test": [test]}]}))
    run(promtool, "test", "rules", str(file))


def test_each_alert_is_tested_on_both_sides() -> None:
    rules = [rule for group in read(ALERTS)["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    checks = [check for test in read(TESTS)["tests"] for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    quiet, *_ = read(TESTS)["tests"]
    assert [check["alertname"] for check in quiet["alert_rule_test"] if check["exp_alerts"]] == []
    assert {check["alertname"] for check in quiet["alert_rule_test"]} == alerts


def read(name: str) -> dict[str, list]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
