"""OpenTelemetry: a trace of each request. The only module that imports opentelemetry; metrics are
at `/metrics`.

The SDK reads its standard variables (`OTEL_…`) itself. Spans follow the GenAI conventions:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans

    POST /v1/chat/completions       the client's request: tokens, moves, cuts and what was read back
    ├── chat gpt-5.5                a call of upstream, whose request carries this span's `traceparent`
    └── chat gpt-5.5                the next round, or a summary
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
from opentelemetry import context, propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from proxy import __version__, rawjson
from proxy.telemetry.outcome import Kind, Outcome

CLOSING = 1.0
"""Seconds that the last spans may take when the process ends."""

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
_SHOWN = (
    "request_id",
    "tenant",
    "mode",
    "reason",
    "tokens_before",
    "tokens_after",
    "rounds",
    "reinserted",
)


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
    """The spans of one process. Raises ValueError if a variable is wrong."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours = {"service.name": "offload-proxy", "service.version": __version__}
        resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
        # one line for a failed batch, none for its retries
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if environment.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp":
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("offload-proxy", __version__)

    def close(self) -> None:
        """Export what is left, within `CLOSING`, in a thread for which nobody waits if the
        collector hangs."""
        last = threading.Thread(target=self._provider.shutdown, name="opentelemetry", daemon=True)
        last.start()
        last.join(CLOSING)

    @contextmanager
    def request(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], *, known: bool
    ) -> Iterator[None]:
        """Run a block, which answers a client, within a span. It is named after the path if that is
        a `known` one."""
        sent = propagate.extract(
            {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        )
        about = {"http.request.method": method, "url.path": path}
        span = self._tracer.start_span(
            f"{method} {path}" if known else method, sent, SpanKind.SERVER, about
        )
        token = context.attach(trace.set_span_in_context(span, sent))
        try:
            yield
        finally:
            context.detach(token)
            span.end()

    def note(self, outcome: Outcome) -> None:
        """Say in the request's span how it ended."""
        span = trace.get_current_span()
        if span.is_recording() and outcome.kind is not Kind.SUMMARY:
            _describe(span, outcome)

    def call(self, method: str, url: str, content: object) -> TracedCall:
        """Begin a call of upstream."""
        where = urlsplit(url)
        about: dict[str, Any] = {
            "http.request.method": method,
            "server.address": where.hostname or "",
        }
        if where.port is not None:
            about["server.port"] = where.port
        operation = next(
            (name for end, name in _OPERATIONS.items() if where.path.endswith(end)), ""
        )
        model = ""
        if operation:
            with suppress(msgspec.MsgspecError, RecursionError):
                model = (
                    msgspec.json.decode(content, type=_Named).model
                    if isinstance(content, bytes)
                    else ""
                )
            provider = "anthropic" if where.path.endswith("/messages") else "openai"
            about |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": provider,
                _MODEL: model,
            }
        name = f"{operation} {model}".strip() or method
        return TracedCall(self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=about))


def _describe(span: Span, outcome: Outcome) -> None:
    """Say in a request's span how it ended. Usage is that of all its rounds."""
    about: dict[str, Any] = {
        f"offload.{name}": value for name in _SHOWN if (value := getattr(outcome, name))
    }
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
        span.add_event(
            "offload.move", {"messages": outcome.compacted, "new": outcome.new_event, **words}
        )
    if outcome.compressed:
        span.add_event("offload.cut", {"messages": outcome.compressed})
    for use in outcome.tool_uses:
        span.add_event("offload.read_back", msgspec.structs.asdict(use))
