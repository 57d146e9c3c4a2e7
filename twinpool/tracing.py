# SPDX-License-Identifier: Apache-2.0
"""Spans of a request over router and workers, exported by OpenTelemetry; nothing at all where it is off.

``tracing.endpoint`` turns it on and needs the extra ``twinpool[tracing]``. A span's place in its trace travels as a W3C
``traceparent``: from the client in gRPC metadata, from router to worker in the command, and from the prefill to the
decode worker beside the last ticket. Names and attributes hold ids, lengths and reasons, never prompts or tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from twinpool.config import TracingConfig
from twinpool.errors import ConfigError
from twinpool.logs import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = get_logger(__name__)

TRACEPARENT: Final = "traceparent"
"""The key in gRPC metadata (W3C Trace Context)."""

Attribute: TypeAlias = str | bool | int | float | Sequence[str]

_FLUSH_MILLISECONDS: Final = 2000


class Span:
    """Something that takes time. This one is the span of a process that traces nothing, and a base for the other."""

    __slots__ = ()

    traceparent: str = ""
    """What children in other processes name as their parent; "" where nothing is traced."""

    def child(self, name: str, began: float, ended: float) -> None:
        """A span below this one that is over already; times as ``time.monotonic`` gives them."""

    def link(self, traceparent: str) -> None:
        """Names a span of another leg that this one depends on; "" is ignored."""

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes, under ``twinpool.<name>``."""

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Adds attributes under the names that they have, those of a convention."""

    def end(self, failure: str = "") -> None:
        """It ends now, with ``failure`` if it failed. Later calls do nothing."""


OFF: Final = Span()
"""The span of whatever is not traced."""


class _Recorded(Span):
    __slots__ = ("_context", "_ended", "_span", "traceparent")

    def __init__(self, span: Any, context: Any, traceparent: str) -> None:
        self._span = span
        self._context = context
        self._ended = False
        self.traceparent = traceparent

    def child(self, name: str, began: float, ended: float) -> None:
        assert _state.tracer is not None
        span = _state.tracer.start_span(name, context=self._context, start_time=_epoch_ns(began))
        span.end(_epoch_ns(ended))

    def link(self, traceparent: str) -> None:
        if traceparent:
            from opentelemetry.trace import get_current_span

            self._span.add_link(get_current_span(_parse(traceparent)).get_span_context())

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes({f"twinpool.{name}": value for name, value in attributes.items()})

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, failure: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        if failure:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", failure)
            self._span.set_status(StatusCode.ERROR, failure)
        self._span.end(_epoch_ns(time.monotonic()))


class _State:
    offset_ns = 0  # from the monotonic clock to the epoch: one for all spans, so that hops meet
    provider: TracerProvider | None = None
    tracer: Any = None


_state = _State()


def setup(config: TracingConfig, component: str, name: str) -> None:
    """Starts to trace this process as ``name`` of ``component``, if the configuration says so. Raises ConfigError where
    the packages are missing."""
    if not config.endpoint or _state.provider is not None:
        return
    use(_provider(config, component, name))
    log.info("tracing", endpoint=config.endpoint, sample_ratio=config.sample_ratio)


def rename(config: TracingConfig, component: str, name: str) -> None:
    """The process goes on as another component. Spans that run end under the former one; those that have ended are exported,
    which may take seconds: not for an event loop."""
    before = _state.provider
    if before is not None:
        use(_provider(config, component, name))
        _end(before)


def _provider(config: TracingConfig, component: str, name: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: is set but {error.name} is not installed: pip install 'twinpool[tracing]'",
            key="tracing.endpoint",
        ) from None
    resource = Resource.create({"service.name": f"twinpool-{component}", "service.instance.id": name})
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=config.endpoint, insecure=not config.endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def use(provider: TracerProvider | None) -> None:
    """Traces through ``provider``; None: not at all."""
    _state.offset_ns = time.time_ns() - time.monotonic_ns()
    _state.provider = provider
    _state.tracer = provider.get_tracer("twinpool") if provider is not None else None


def shutdown() -> None:
    """Exports what is left and traces no more. May take seconds; not for an event loop."""
    provider = _state.provider
    use(None)
    if provider is not None:
        _end(provider)


def _end(provider: TracerProvider) -> None:
    provider.force_flush(_FLUSH_MILLISECONDS)
    provider.shutdown()


def start(
    name: str,
    parent: str = "",
    *,
    began: float | None = None,
    links: Sequence[str] = (),
    **attributes: Attribute,
) -> Span:
    """A span that begins now, or at ``began`` on the clock of ``time.monotonic``, below the span that ``parent`` names."""
    if _state.tracer is None:
        return OFF
    from opentelemetry.trace import set_span_in_context

    context = _parse(parent)
    span = _state.tracer.start_span(
        name, context=context, start_time=_epoch_ns(time.monotonic() if began is None else began)
    )
    made = _Recorded(span, set_span_in_context(span, context), _format(span.get_span_context()))
    made.set(**attributes)
    for other in links:
        made.link(other)
    return made


def traceparent_of(metadata: Any) -> str:
    """The client's ``traceparent`` in a call's metadata; "" if there is none or nothing is traced."""
    if _state.tracer is None:
        return ""
    for key, value in metadata or ():
        if key == TRACEPARENT:
            return str(value)
    return ""


def _parse(traceparent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, context=Context())


def _format(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _epoch_ns(monotonic: float) -> int:
    return round(monotonic * 1e9) + _state.offset_ns
