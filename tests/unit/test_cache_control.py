"""The request header `Cache-Control`: every directive, malformed ones, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache.control import CacheControl, parse_cache_control
from orchestrator.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", CacheControl()),
        (" , ,", CacheControl()),
        ("no-store", CacheControl(no_store=True)),
        ("No-Cache", CacheControl(no_cache=True)),
        ("max-age=60", CacheControl(max_age_s=60)),
        ("max-age = 60", CacheControl(max_age_s=60)),
        ('max-age="60"', CacheControl(max_age_s=60)),
        ("max-age=0", CacheControl(max_age_s=0)),
        ("max-age=60, max-age=5, max-age=70", CacheControl(max_age_s=5)),
        ("max-age=" + "9" * 5000, CacheControl(max_age_s=float("inf"))),
        ("only-if-cached,max-age=1", CacheControl(only_if_cached=True, max_age_s=1)),
        ("no-store, no-store", CacheControl(no_store=True)),
        ('no-cache="set-cookie, no-store"', CacheControl(no_cache=True)),
        ('x="no-store, max-age=x", no-cache', CacheControl(no_cache=True)),
        ('x="a\\", no-store"', CacheControl()),
        ("no-transform, max-stale=5, min-fresh=3, stale-if-error=x, nostore, unheard=of", CacheControl()),
    ],
)
def test_what_it_says(header: str, expected: CacheControl) -> None:
    assert parse_cache_control(header) == expected


@pytest.mark.parametrize("value", ["", "=", "=-1", "=1.5", "=x", "=1 2", '="', "=٣", "=1e3"])
def test_a_max_age_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="max-age must be a whole number of seconds") as caught:
        parse_cache_control(f"no-cache, max-age{value}")
    assert caught.value.param == "cache-control"


DIRECTIVES = st.sampled_from(
    ["no-store", "no-cache", "only-if-cached", "max-age=0", "max-age=61", "x", 'y="a,no-store"']
)


@given(st.lists(DIRECTIVES), st.randoms())
def test_neither_order_nor_repetition_nor_space_matters(directives: list[str], random: object) -> None:
    expected = CacheControl(
        "no-store" in directives,
        "no-cache" in directives,
        min((float(each[8:]) for each in directives if each.startswith("max-age")), default=None),
        "only-if-cached" in directives,
    )
    assert parse_cache_control(",".join(directives)) == expected
    random.shuffle(directives)  # type: ignore[attr-defined]
    assert parse_cache_control(" ,, ".join([*directives, *directives]).upper()) == expected


@given(st.text(max_size=200) | st.text(alphabet='"\\,= maxgeno-stor19', max_size=60))
def test_any_text_is_read_or_refused(header: str) -> None:
    try:
        control = parse_cache_control(header)
    except InvalidRequestError as error:
        assert "max-age" in error.message and "max-age" in header.lower()
        return
    # Nothing is found that is not there.
    assert control.no_store <= ("no-store" in header.lower())
    assert control.no_cache <= ("no-cache" in header.lower())
    assert (control.max_age_s is not None) <= ("max-age" in header.lower())
