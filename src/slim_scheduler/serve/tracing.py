"""OpenTelemetry spans, where its packages are installed and switched on (`pip install slim-scheduler[otel]`).

One span per inference, made when the inference is over, as a child of the request's `traceparent`: nothing is done
for it on the way. The exporter is whatever the environment configures (`opentelemetry-instrument slim serve ...`).
"""

import os
import time
from collections.abc import Callable, Mapping

SWITCHES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
Attributes = Mapping[str, str | int | float]
# Called with the traceparent, how long it took in seconds, the status, and what is known of the answer.
Trace = Callable[[str, float, int, Attributes], None]


def tracer_from_environment() -> Trace | None:
    """A tracer if one is configured and its packages are there, else None."""
    if not any(os.environ.get(switch) for switch in SWITCHES):
        return None
    try:
        return span_maker()
    except ImportError:
        return None


def span_maker() -> Trace:
    """Makes spans with OpenTelemetry's global provider. Raises ImportError where it is not installed."""
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = trace.get_tracer("slim_scheduler")
    propagator = TraceContextTextMapPropagator()

    def record(traceparent: str, seconds: float, status: int, attributes: Attributes) -> None:
        end = time.time_ns()
        parent = propagator.extract({"traceparent": traceparent}) if traceparent else None
        span = tracer.start_span(
            "infer", parent, SpanKind.SERVER, dict(attributes), start_time=end - int(seconds * 1e9)
        )
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    return record
