"""The cache's counts on their way to Triton's metrics."""

from __future__ import annotations

from orchestrator.cache.store import Size
from orchestrator.triton.metrics import CacheMetrics


def test_what_was_counted_is_told_once() -> None:
    metrics = CacheMetrics()
    metrics.publish(Size(0, 0), {})
    answers = metrics.answers._family.metrics
    assert {kind: metric.value for kind, metric in answers.items()} == dict.fromkeys(
        ("exact", "semantic", "miss", "bypass"), 0
    )
    for kind in ("exact", "exact", "miss"):
        metrics.count_answer(kind)
    metrics.count_rejection("number")
    metrics.count_store_error()
    for _ in range(2):
        metrics.publish(Size(2, 70), {"timeout": 3})
    metrics.count_answer("exact")
    metrics.publish(None, {"timeout": 3})
    assert (answers["exact"].value, answers["miss"].value, answers["semantic"].value) == (3, 1, 0)
    assert metrics.rejections._family.metrics["number"].value == 1
    assert {kind: metric.value for kind, metric in metrics.errors._family.metrics.items()} == {
        "failed": 1,
        "timeout": 3,
    }
    sizes = metrics.stored_bytes._family.metrics, metrics.stored_entries._family.metrics
    assert [size[""].value for size in sizes] == [70, 2]
