# SPDX-License-Identifier: Apache-2.0
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from twinpool import tracing
from twinpool.config import TracingConfig


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracing.use(provider)
    yield made
    tracing.use(None)


def test_off_costs_nothing_and_says_nothing() -> None:
    tracing.setup(TracingConfig(), "router", "r")
    span = tracing.start("x", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", links=["y"], n=1)
    assert span is tracing.OFF
    assert span.traceparent == ""
    span.child("hop", 0.0, 1.0)
    span.link("z")
    span.set(n=2)
    span.end("FAILED")
    assert tracing.traceparent_of([("traceparent", "x")]) == ""
    tracing.shutdown()


def test_parents_links_and_times(exporter: InMemorySpanExporter) -> None:
    now = time.monotonic()
    root = tracing.start("root", began=now - 2.0, model="m")
    far = tracing.start("far", root.traceparent)
    leg = tracing.start("leg", root.traceparent, links=[far.traceparent, ""])
    root.child("hop", now - 2.0, now - 1.5)
    for span in (leg, far, root, root):
        span.end()
    hop, *_ = exporter.get_finished_spans()
    named = {span.name: span for span in exporter.get_finished_spans()}
    assert len(exporter.get_finished_spans()) == 4, "a second end is none"
    assert len({span.context.trace_id for span in named.values()}) == 1
    assert named["root"].parent is None
    for name in ("far", "leg", "hop"):
        assert named[name].parent.span_id == named["root"].context.span_id
    assert [link.context.span_id for link in named["leg"].links] == [named["far"].context.span_id]
    assert hop.name == "hop"
    assert abs((hop.end_time - hop.start_time) / 1e9 - 0.5) < 0.05
    assert named["root"].attributes == {"twinpool.model": "m"}


def test_a_failure_is_named(exporter: InMemorySpanExporter) -> None:
    tracing.start("leg").end("TRANSFER")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "TRANSFER"


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_wrong_parent_begins_a_trace_of_its_own(exporter: InMemorySpanExporter, parent: str) -> None:
    span = tracing.start("root", tracing.traceparent_of([("other", "x"), ("traceparent", parent)]))
    span.end()
    (seen,) = exporter.get_finished_spans()
    assert seen.parent is None
    assert span.traceparent.startswith(f"00-{seen.context.trace_id:032x}-")
