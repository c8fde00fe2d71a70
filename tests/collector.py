"""An OpenTelemetry collector as far as tests need one: it takes traces by OTLP over HTTP and keeps their spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """On a free port of loopback while entered."""

    def __init__(self) -> None:
        self._spans: list[Any] = []
        spans = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(
                    span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans
                )
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans_of(self, trace_id: str) -> list[Any]:
        """Those of one trace that have come, by their beginnings; empty until the request's own is among them."""
        found = [span for span in list(self._spans) if span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda span: int(span.start_time_unix_nano)) if found else []
