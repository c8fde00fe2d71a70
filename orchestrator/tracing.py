"""OpenTelemetry: one trace a request, a span for the whole and one below it for each stage.

Made when the request is over, from its `Stages`: while it runs nothing is done for it, and the stages' spans add up to
the request's. Sent by the SDK's own thread; a collector that is gone costs its spans and a line in the log. The SDK
reads its variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, ...) itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.call import Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Facts of `rt` that OpenTelemetry's conventions for generative AI have a name for; the others keep ours.
_NAMES = {
    "model": "gen_ai.response.model",
    "input_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
}


class Traces:
    """`record` may be called on any thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The SDK has OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before a name of ours only where they are set.
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "triton-realtime"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("orchestrator")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: Call, facts: Mapping[str, object], outcome: str, ended_s: float) -> None:
        """A call that is over, since `ended_s` of `time.monotonic`.

        `facts` are its answer's (`rt`), empty if none began. The parent is what the caller's `traceparent` names.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        since_epoch_ns = time.time_ns() - time.monotonic_ns()

        def at(monotonic_s: float) -> int:
            return int(monotonic_s * 1e9) + since_epoch_ns

        parents = {name: call.parameters[name] for name in ("traceparent", "tracestate") if name in call.parameters}
        request = self._tracer.start_span(
            "chat",
            self._propagator.extract(parents),
            kind=SpanKind.SERVER,
            start_time=at(call.received_s),
            attributes={"gen_ai.operation.name": "chat", "rt.outcome": outcome},
        )
        if request.is_recording():
            for name, value in facts.items():
                if isinstance(value, (str, int, float)):
                    request.set_attribute(_NAMES.get(name, f"rt.{name}"), value)
            for attribute, known in (("gen_ai.response.id", call.id), ("rt.x_request_id", call.request_id)):
                if known is not None:
                    request.set_attribute(attribute, known)
            if outcome != "ok":
                request.set_status(Status(StatusCode.ERROR, outcome))
            context = set_span_in_context(request)
            for stage, started_s, stage_ended_s in call.stages.spans(ended_s):
                self._tracer.start_span(stage, context, start_time=at(started_s)).end(at(stage_ended_s))
        request.end(at(ended_s))

    def close(self) -> None:
        """Sends what is left, for as long as the exporter's timeout says."""
        self._provider.shutdown()


def create_traces(environ: Mapping[str, str]) -> Traces | None:
    """None unless the environment names a collector. Raises `RuntimeError` when the extra `traces` is missing."""
    if not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise RuntimeError(
            f"{' or '.join(ENDPOINT_VARIABLES)} is set, but OpenTelemetry is not installed; "
            "fix: pip install 'triton-realtime[traces]', or unset it"
        ) from error
    return Traces(OTLPSpanExporter())
