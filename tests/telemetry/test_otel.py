"""Traces as a collector gets them: over OTLP, from a proxy that serves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed"
)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.apps.dashboard.traffic import session
from tests.clock import PATIENCE
from tests.fake_upstream import StrictUpstream
from tests.serving import served, tight

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


class Collector(ThreadingHTTPServer):
    """Takes in what is exported, as OpenTelemetry's own messages."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}
        super().__init__(("127.0.0.1", 0), _Receives)

    @property
    def environment(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}"}


class _Receives(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resource = attributes(part.resource)
            self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def attributes(found: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


def test_a_session_is_traced_round_by_round(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StrictUpstream() as upstream:
        environment = {**collector.environment, "OTEL_SERVICE_NAME": "ours"}
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        with served({"default": tight(upstream.url)}, environment=environment) as proxy:
            session(proxy, upstream, 6, read=True, headers=PARENT)
    requests = [span for span in collector.spans if span.name == "POST /v1/chat/completions"]
    calls = [span for span in collector.spans if span.name == "chat gpt-4.1-mini"]
    assert len(requests) == 6 and len(calls) == 7
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert {span.parent_span_id.hex() for span in requests} == {SPAN}
    sent = [
        dict(request.headers).get(b"traceparent", b"").decode() for request in upstream.requests
    ]
    assert sorted(sent) == sorted(f"00-{TRACE}-{span.span_id.hex()}-01" for span in calls)
    last = requests[-1]
    assert [span.parent_span_id for span in calls[-2:]] == [last.span_id] * 2
    said = attributes(last)
    assert (
        said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == "gpt-4.1-mini"
    )
    assert (
        said["gen_ai.usage.input_tokens"] > 0
        and said["offload.rounds"] == 1
        and said["offload.mode"]
    )
    assert said["offload.tokens_after"] < said["offload.tokens_before"]
    events = {event.name: attributes(event) for event in last.events}
    assert events["offload.move"]["messages"] > 0 and events["offload.read_back"]["tool"] == "grep"
    call = attributes(calls[0])
    assert call["gen_ai.provider.name"] == "openai" and call["server.address"] == "127.0.0.1"
    assert call["http.response.status_code"] == 200
    assert collector.resource["service.name"] == "ours" and collector.resource["service.version"]


def test_a_failed_call_says_so(collector: Collector) -> None:
    policy = tight("http://127.0.0.1:9/v1")
    with (
        StrictUpstream() as upstream,
        served({"default": policy}, environment=collector.environment) as proxy,
    ):
        session(proxy, upstream, 1)
    assert {attributes(span).get("error.type") for span in collector.spans} == {
        "connect",
        "UpstreamUnreachable",
    }
    assert {span.status.code for span in collector.spans} == {2}


def test_a_collector_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "1",
            "OTEL_EXPORTER_OTLP_TIMEOUT": str(2 * PATIENCE),
        }
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        with served({"default": tight("http://127.0.0.1:9/v1")}, environment=environment) as proxy:
            assert proxy.post("/v1/chat/completions", {}).status_code == 502
            silent.accept()
            began = time.monotonic()
    assert time.monotonic() - began < PATIENCE, "the exporter waits twice as long for an answer"
