"""OpenTelemetry: a trace of each request, and our metrics by OTLP. The only module that imports opentelemetry.

The SDK reads its standard variables (`OTEL_…`) itself. Spans follow the GenAI conventions:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans

    POST /v1/chat/completions       the client's request: tokens, moves, cuts and what was read back
    ├── chat gpt-5.5                a call of upstream, whose request carries this span's `traceparent`
    └── chat gpt-5.5                the next round, or a summary
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from opentelemetry import context, propagate, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Span, SpanKind, StatusCode

from proxy import __version__, rawjson
from proxy.telemetry.outcome import Kind, Outcome

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


CLOSING = 1.0
"""Seconds that the last spans and metrics may take when the process ends."""

_OPERATIONS = {
    "/chat/completions": "chat", "/messages": "chat", "/responses": "chat",
    "/embeddings": "embeddings", "/completions": "text_completion",
}  # fmt: skip
"""Ends of paths, and `gen_ai.operation.name`."""

_USAGE = {
    "prompt_tokens": "input_tokens", "completion_tokens": "output_tokens",
    "cached_tokens": "cache_read.input_tokens", "written_tokens": "cache_creation.input_tokens",
}  # fmt: skip
_MODEL = "gen_ai.request.model"
_SHOWN = ("request_id", "tenant", "mode", "reason", "tokens_before", "tokens_after", "rounds", "reinserted")


class _Named(msgspec.Struct):
    model: str = ""


class TracedCall:
    """A call of upstream. `headers` are those that pass the trace on."""

    def __init__(self, span: Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        self.headers: Sequence[tuple[bytes, bytes]] = [
            (name.encode(), value.encode()) for name, value in carrier.items()
        ]

    def replied(self, status: int) -> None:
        """Note the status of the reply."""
        self._span.set_attribute("http.response.status_code", status)
        if status >= 400:
            self.failed(str(status))

    def failed(self, kind: str) -> None:
        """Note what went wrong."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """Note that the reply is over."""
        self._span.end()


class OpenTelemetry:
    """The spans and metrics of one process. `collect` returns Prometheus' metrics. Raises ValueError if a variable is
    wrong."""

    def __init__(self, environment: Mapping[str, str], collect: Callable[[], Iterable[Metric]]) -> None:
        ours = {"service.name": "offload-proxy", "service.version": __version__}
        self._resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # one line for a failed batch, none for its retries
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        if environment.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp":
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("offload-proxy", __version__)
        self._exporter = None
        if environment.get("OTEL_METRICS_EXPORTER", "otlp") == "otlp":
            self._exporter = OTLPMetricExporter()
        self._collect, self._since = collect, time.time_ns()
        interval = environment.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
        if not re.fullmatch("[1-9][0-9]{0,9}", interval):
            raise ValueError("OTEL_METRIC_EXPORT_INTERVAL: expected milliseconds, such as 60000")
        self._seconds = int(interval) / 1000
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opentelemetry", daemon=True)
        self.start = self._thread.start

    def close(self) -> None:
        """Export what is left, within `CLOSING`."""
        self._ended.set()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        """Export metrics, in a thread for which nobody waits if the collector hangs."""
        while not self._ended.wait(self._seconds):
            self._export()
        self._export()
        self._provider.shutdown()

    def _export(self) -> None:
        if self._exporter is not None:
            self._exporter.export(metrics_of(self._collect(), self._resource, self._since, time.time_ns()))

    @contextmanager
    def request(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], *, known: bool) -> Iterator[None]:
        """Run a block, which answers a client, within a span. It is named after the path if that is a `known` one."""
        sent = propagate.extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers})
        about = {"http.request.method": method, "url.path": path}
        span = self._tracer.start_span(f"{method} {path}" if known else method, sent, SpanKind.SERVER, about)
        token = context.attach(trace.set_span_in_context(span, sent))
        try:
            yield
        finally:
            context.detach(token)
            span.end()

    def noting(self, record: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        """Return `record`, which also says in the request's span how it ended."""

        def noted(outcome: Outcome) -> None:
            span = trace.get_current_span()
            if span.is_recording() and outcome.kind is not Kind.SUMMARY:
                _describe(span, outcome)
            record(outcome)

        return noted

    def call(self, method: str, url: str, content: object) -> TracedCall:
        """Begin a call of upstream."""
        where = urlsplit(url)
        about: dict[str, Any] = {"http.request.method": method, "server.address": where.hostname or ""}
        if where.port is not None:
            about["server.port"] = where.port
        operation, model = next((name for end, name in _OPERATIONS.items() if where.path.endswith(end)), ""), ""
        if operation:
            with suppress(msgspec.MsgspecError, RecursionError):
                model = msgspec.json.decode(content, type=_Named).model if isinstance(content, bytes) else ""
            provider = "anthropic" if where.path.endswith("/messages") else "openai"
            about |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider, _MODEL: model}
        name = f"{operation} {model}".strip() or method
        return TracedCall(self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=about))


def _describe(span: Span, outcome: Outcome) -> None:
    """Say in a request's span how it ended. Usage is that of all its rounds."""
    about: dict[str, Any] = {f"offload.{name}": value for name in _SHOWN if (value := getattr(outcome, name))}
    if outcome.dialect:
        about |= {f"gen_ai.usage.{name}": getattr(outcome, field) for field, name in _USAGE.items()}
        about |= {"gen_ai.operation.name": "chat", _MODEL: rawjson.encodable(outcome.model)}
    if outcome.status:
        about["http.response.status_code"] = outcome.status
    if outcome.fault:
        about["error.type"] = outcome.fault.value
        span.set_status(StatusCode.ERROR)
    span.set_attributes(about)
    if outcome.compacted:
        words = {"cause": outcome.cause, "words": outcome.words}
        span.add_event("offload.move", {"messages": outcome.compacted, "new": outcome.new_event, **words})
    if outcome.compressed:
        span.add_event("offload.cut", {"messages": outcome.compressed})
    for use in outcome.tool_uses:
        span.add_event("offload.read_back", msgspec.structs.asdict(use))


def metrics_of(families: Iterable[Metric], resource: Resource, since: int, now: int) -> export.MetricsData:
    """Return Prometheus' metrics as OTLP has them. Times are in nanoseconds since the epoch."""
    cumulative = export.AggregationTemporality.CUMULATIVE
    found = []
    for family in families:
        points = [export.NumberDataPoint(one.labels, since, now, one.value) for one in family.samples]
        data: Any = export.Gauge(points)
        if family.type == "histogram":
            data = export.Histogram(_buckets(family, since, now), cumulative)
        elif family.type == "counter":
            data = export.Sum(points, cumulative, True)
        if points:
            found.append(export.Metric(family.name, family.documentation, "", data))
    scope = export.ScopeMetrics(InstrumentationScope("offload-proxy", __version__), found, "")
    return export.MetricsData([export.ResourceMetrics(resource, [scope], "")])


def _buckets(family: Metric, since: int, now: int) -> list[export.HistogramDataPoint]:
    """Return a histogram's series. Prometheus' buckets hold those below, too."""
    series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for one in family.samples:
        labels = tuple((name, value) for name, value in one.labels.items() if name != "le")
        series.setdefault(labels, {})[one.labels.get("le") or one.name.rpartition("_")[2]] = one.value
    nothing: Any = None  # what is the least and the most is not known
    points = []
    for labels, values in series.items():
        total, count = values.pop("sum"), int(values.pop("count"))
        below = [int(value) for value in values.values()]
        counts = [value - before for before, value in zip([0, *below], below, strict=False)]
        bounds = [float(end) for end in values if end != "+Inf"]
        points.append(
            export.HistogramDataPoint(dict(labels), since, now, count, total, counts, bounds, nothing, nothing)
        )
    return points
