"""Spans are children of the client's trace and say how it ended."""

import pytest

from slim_scheduler.serve.tracing import span_maker, tracer_from_environment

sdk = pytest.importorskip("opentelemetry.sdk.trace")
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_span_is_a_child_of_the_request(monkeypatch):
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    record = span_maker()
    record(f"00-{TRACE}-b7ad6b7169203331-01", 0.25, 200, {"slim.model": "digits"})
    record("", 0.1, 503, {})
    child, alone = exporter.get_finished_spans()
    assert f"{child.context.trace_id:032x}" == TRACE
    assert child.end_time - child.start_time == 250_000_000
    assert child.attributes == {"slim.model": "digits", "http.response.status_code": 200}
    assert child.status.is_ok
    assert alone.parent is None
    assert not alone.status.is_ok


def test_nothing_is_traced_unless_asked_for(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert tracer_from_environment() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert tracer_from_environment() is not None
