"""Every error a caller can receive, sorted by who can act on it.

    ApiError
    ├── InvalidRequestError      400  the caller: fix the field named in `param`
    │   ├── ContextWindowError        prompt and answer are more than the tier's window
    │   ├── NoToolParserError         its model takes no tools
    │   └── CloudRequestError         the API behind a cloud tier does not take it; another tier may
    ├── UnauthorizedError        401  the caller: send a valid key
    ├── NotAllowedError          403  the caller: ask for what the key allows
    ├── ModelNotFoundError       404  the caller: ask for a model that exists
    ├── SlowReaderError          408  the caller: read what is sent as it comes
    ├── RequestTooLargeError     413  the caller: send less
    ├── RateLimitError           429  the caller: ask more slowly, or for less
    ├── BudgetError              429  the caller: the key's money for today is spent
    ├── OverloadedError          503  the caller: try again later
    ├── ShuttingDownError        503  the caller: try again, on another server
    ├── NotCachedError           504  the caller: there is no stored answer, and none else was wanted
    ├── DeadlineError            504  the caller: allow more time
    ├── LimitsUnavailableError   503  the operator: quotas cannot be counted
    ├── TierUnavailableError     503  the operator: an engine or API failed too often, and is left alone for a while
    ├── CancelledError           499  nobody: the caller left
    ├── EngineError              502  the operator: the engine failed or answered nonsense
    │   ├── ConnectionLostError       its Triton is gone, or cannot be reached
    │   ├── EngineTimeoutError        it was silent for too long
    │   └── EngineStopError           it did not end what it was told to
    ├── CloudError               502  the operator: the API behind a cloud tier failed or answered nonsense
    │   ├── CloudRefusalError         it does not take what we send: address, key or model are wrong
    │   └── CloudTimeoutError         it was silent for too long
    └── InternalError            500  us

An error travels from the orchestrator to the gateway as the message of a Triton error: OpenAI's error object as
JSON, because Triton's gRPC stream carries a text and no code; headers that belong to it ride beside the object.
`from_message` is the way back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.contracts import ANSWER_HEADERS

_SHOWN_CHARS = 80


def shorten(value: Any) -> str:
    """What a caller sent, for a message: in quotes if it is text, and never long."""
    if isinstance(value, (str, bytes, list)):
        value = value[: _SHOWN_CHARS + 1]  # the whole of it could take a while to write
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


class ApiError(Exception):
    """An error in OpenAI's shape: `message`, `type`, `param`, `code`, and the HTTP status that fits it.

    `headers` go with it where there are headers; `contracts.ANSWER_HEADERS` names those that travel.
    """

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_message(self) -> str:
        """The text that carries this error through Triton."""
        headers = {"headers": self.headers} if self.headers else {}
        return json.dumps({**self.body(), **headers}, ensure_ascii=False)


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextWindowError(InvalidRequestError):
    pass


class NoToolParserError(InvalidRequestError):
    pass


class CloudRequestError(InvalidRequestError):
    pass


class UnauthorizedError(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotAllowedError(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "not_allowed"


class ModelNotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class SlowReaderError(ApiError):
    status = 408  # of a stream, whose status was sent long ago
    type = "invalid_request_error"
    code = "reader_too_slow"


class RequestTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimitError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class BudgetError(ApiError):
    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class OverloadedError(ApiError):
    status = 503
    code = "overloaded"


class StoreUnavailableError(ApiError):
    status = 503
    code = "store_unavailable"


class ShuttingDownError(ApiError):
    status = 503
    code = "shutting_down"


class NotCachedError(ApiError):
    status = 504  # RFC 9111, section 5.2.1.7
    type = "invalid_request_error"
    code = "not_cached"


class DeadlineError(ApiError):
    status = 504
    code = "deadline_exceeded"


class LimitsUnavailableError(ApiError):
    status = 503
    code = "limits_unavailable"


class TierUnavailableError(ApiError):
    status = 503
    code = "tier_unavailable"


class CancelledError(ApiError):
    status = 499  # nginx's "client closed request"; nobody is left to read it
    type = "cancelled"
    code = "cancelled"


class EngineError(ApiError):
    status = 502
    code = "engine_error"


class ConnectionLostError(EngineError):
    pass


class EngineTimeoutError(EngineError):
    pass


class EngineStopError(EngineError):
    pass


class CloudError(ApiError):
    status = 502
    code = "cloud_error"


class CloudRefusalError(CloudError):
    pass


class CloudTimeoutError(CloudError):
    pass


class InternalError(ApiError):
    pass


_BY_CODE: dict[str, type[ApiError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError,
        UnauthorizedError,
        NotAllowedError,
        ModelNotFoundError,
        SlowReaderError,
        RequestTooLargeError,
        RateLimitError,
        BudgetError,
        OverloadedError,
        StoreUnavailableError,
        ShuttingDownError,
        NotCachedError,
        DeadlineError,
        LimitsUnavailableError,
        TierUnavailableError,
        CancelledError,
        EngineError,
        CloudError,
        InternalError,
    )
}


def is_our_fault(code: str) -> bool:
    """Whether what ended a request with `code` was an engine's, an API's or our own failing; "ok" is none.

    A deadline is the caller's, and so is that he wanted a stored answer and nothing else.
    """
    error = _BY_CODE.get(code)
    return error is not None and error.status >= 500 and error not in (DeadlineError, NotCachedError)


# Triton puts these before what it says, and before what a step of an ensemble says. The ids are ours, and open things.
_PREFIXES = re.compile(r"^(\[request id: [^\]]*\] |in ensemble '[^']*', )+")


def strip_prefixes(message: str) -> str:
    """What Triton, or the step of an ensemble, itself said."""
    return _PREFIXES.sub("", message, count=1)


def from_message(message: str) -> ApiError:
    """The error that `to_message` wrote; any other text is Triton's own and becomes an `EngineError`."""
    message = strip_prefixes(message)
    try:
        whole = json.loads(message)
        error = whole["error"]
        headers = {name: str(value) for name, value in whole.get("headers", {}).items() if name in ANSWER_HEADERS}
        return _BY_CODE[error["code"]](error["message"], param=error["param"], headers=headers)
    except (ValueError, KeyError, TypeError, AttributeError):
        return EngineError(message)
