"""What the gateway refuses by itself, before the orchestrator hears of it. All are the caller's to fix.

InvalidRequestError
├── OriginNotAllowedError        403  a web page that nobody named
├── NotLocalError                403  an operator's route, asked from elsewhere
├── RouteNotFoundError           404
├── MethodNotAllowedError        405
├── RequestTimeoutError          408  the request took too long to arrive
├── UnsupportedMediaTypeError    415  not plain JSON
├── HostNotAllowedError          421  a name this server does not answer to
├── UpgradeRequiredError         426  a WebSocket's route, asked by plain HTTP
└── HeadersTooLargeError         431

OverloadedError                  503
└── SessionLimitError                 as many realtime sessions as this machine can serve
"""

from __future__ import annotations

from orchestrator.errors import InvalidRequestError, OverloadedError


class OriginNotAllowedError(InvalidRequestError):
    status = 403
    code = "origin_not_allowed"


class NotLocalError(InvalidRequestError):
    status = 403
    code = "not_local"


class RouteNotFoundError(InvalidRequestError):
    status = 404
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    status = 405
    code = "method_not_allowed"


class RequestTimeoutError(InvalidRequestError):
    status = 408
    code = "request_timeout"


class UnsupportedMediaTypeError(InvalidRequestError):
    status = 415
    code = "unsupported_media_type"


class HostNotAllowedError(InvalidRequestError):
    status = 421
    code = "host_not_allowed"


class UpgradeRequiredError(InvalidRequestError):
    status = 426
    code = "upgrade_required"


class HeadersTooLargeError(InvalidRequestError):
    status = 431
    code = "headers_too_large"


class SessionLimitError(OverloadedError):
    code = "session_limit"
