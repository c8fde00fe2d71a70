"""A Triton response sender that two threads may use."""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils


class Sender:
    """The responses of one request, ended exactly once.

    Asking a request for cancellation after its final response crashes the server (Triton 2.51 has freed the
    request), so asking and ending exclude each other.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._ending = threading.Lock()
        self._ended = False

    def send(self, response: Any | None, *, final: bool) -> None:
        """Send `response`, or with None and `final` just the end."""
        if not final:
            self._sender.send(response)
            return
        with self._ending:
            self._ended = True
            flag = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if response is None:
                self._sender.send(flags=flag)
            else:
                self._sender.send(response, flags=flag)

    def is_cancelled(self) -> bool:
        """Whether the caller left; False once ended."""
        with self._ending:
            return not self._ended and bool(self._sender.is_cancelled())
