"""Where traces go that nobody looks at: an OpenTelemetry collector, by OTLP over HTTP, that counts requests' spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUEST_SPAN = "chat"


class TraceSink:
    """On a free port of loopback while entered. What comes is read only when it is asked for."""

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        bodies = self._bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> TraceSink:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count_spans(self) -> tuple[int, int]:
        """Of requests, and all."""
        names = [
            span.name
            for body in list(self._bodies)
            for each in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in each.scope_spans
            for span in scope.spans
        ]
        return names.count(REQUEST_SPAN), len(names)
