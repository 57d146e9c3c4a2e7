# SPDX-License-Identifier: Apache-2.0
"""A collector of spans in the test's process: OTLP over gRPC, kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Seen:
    """A span as it arrived. ``links`` are span ids; times in nanoseconds of the epoch."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    links: tuple[str, ...]
    began: int
    ended: int
    attributes: dict[str, Any] = field(compare=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Seen] = []

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for group in request.resource_spans:
                resource = {item.key: item.value.string_value for item in group.resource.attributes}
                for scope in group.scope_spans:
                    self._spans += [_seen(resource["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        with self._lock:
            return list(self._spans)


def _seen(service: str, span: Any) -> Seen:
    attributes = {
        item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes
    }
    return Seen(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple(link.span_id.hex() for link in span.links),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes,
    )


@contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    """A collector and the endpoint for ``tracing.endpoint``."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
