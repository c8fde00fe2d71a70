"""Errors on their way through Triton and back."""

from __future__ import annotations

import json

import pytest

from orchestrator import errors
from orchestrator.errors import ApiError, EngineError, from_message, strip_prefixes

ALL = (
    (errors.InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    (errors.UnauthorizedError, 401, "invalid_request_error", "invalid_api_key"),
    (errors.NotAllowedError, 403, "invalid_request_error", "not_allowed"),
    (errors.ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (errors.SlowReaderError, 408, "invalid_request_error", "reader_too_slow"),
    (errors.RequestTooLargeError, 413, "invalid_request_error", "request_too_large"),
    (errors.RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.BudgetError, 429, "insufficient_quota", "insufficient_quota"),
    (errors.OverloadedError, 503, "server_error", "overloaded"),
    (errors.StoreUnavailableError, 503, "server_error", "store_unavailable"),
    (errors.ShuttingDownError, 503, "server_error", "shutting_down"),
    (errors.NotCachedError, 504, "invalid_request_error", "not_cached"),
    (errors.DeadlineError, 504, "server_error", "deadline_exceeded"),
    (errors.LimitsUnavailableError, 503, "server_error", "limits_unavailable"),
    (errors.TierUnavailableError, 503, "server_error", "tier_unavailable"),
    (errors.CancelledError, 499, "cancelled", "cancelled"),
    (errors.EngineError, 502, "server_error", "engine_error"),
    (errors.CloudError, 502, "server_error", "cloud_error"),
    (errors.InternalError, 500, "server_error", "internal_error"),
)


def test_the_table_is_complete() -> None:
    assert {row[0] for row in ALL} == set(ApiError.__subclasses__())


@pytest.mark.parametrize(("error_type", "status", "type_", "code"), ALL)
def test_round_trip(error_type: type[ApiError], status: int, type_: str, code: str) -> None:
    sent = error_type('stop: "ü"\n', param="stop")
    got = from_message(sent.to_message())
    assert type(got) is error_type
    assert (got.message, got.param, got.status) == ('stop: "ü"\n', "stop", status)
    assert got.body() == {"error": {"message": 'stop: "ü"\n', "type": type_, "param": "stop", "code": code}}


def test_headers_travel_beside_the_object() -> None:
    headers = {"retry-after": "7", "x-ratelimit-remaining-tokens": "0"}
    sent = errors.RateLimitError("m", headers={**headers, "set-cookie": "x"})
    got = from_message(sent.to_message())
    assert (type(got), got.headers) == (errors.RateLimitError, headers)
    assert "headers" not in got.body()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unexpected shape for input 'request'",
        "5",
        "[]",
        "{}",
        '{"error": 5}',
        '{"error": {"message": "m", "param": null, "code": "overloaded"}, "headers": 5}',
        json.dumps({"error": {"message": "m", "param": None, "code": "of another system"}}),
    ],
)
def test_any_other_text_is_an_engine_error(text: str) -> None:
    got = from_message(text)
    assert type(got) is EngineError
    assert got.message == text


def test_what_a_step_of_an_ensemble_says_is_read() -> None:
    said = errors.InvalidRequestError("text: in ensemble 'x', no", param="text")
    got = from_message(f"in ensemble 'embedding', {said.to_message()}")
    assert (type(got), got.message) == (errors.InvalidRequestError, said.message)
    assert from_message("in ensemble 'embedding', the stub died").message == "the stub died"
    assert strip_prefixes("not in ensemble 'embedding', no") == "not in ensemble 'embedding', no"


def test_triton_does_not_tell_our_ids() -> None:
    said = "[request id: 0123abc] inference request batch-size must be <= 8 for 'embedding'"
    assert from_message(said).message == said.partition("] ")[2]
    assert strip_prefixes(f"in ensemble 'embedding', {said}") == said.partition("] ")[2]
