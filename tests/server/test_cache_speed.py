"""`python -m perf cache-speed` over real servers, with tiny numbers: it raises where the cache is not as it must be."""

from __future__ import annotations

import pytest

from perf.cache_speed import cache_speed


@pytest.mark.alone
@pytest.mark.own_target("the command starts servers of its own, of target scripted")
@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_store_that_has_entries_before_its_server_starts(store: str) -> None:
    table, result = cache_speed([200], [1], 20, [store])
    assert "failed" not in result, result
    (run,) = result["runs"]
    assert (run["store"], run["entries"], run["clients"]) == (store, 200, 1)
    assert 0 < run["exact_ms"]["p50"] < run["miss_ms"]["p50"]
    assert f"{store}, 200 entries, 1 clients: semantic" in table
