"""What pages and requests ask a process for, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import ForeignSite, UserMistake
from proxy.server.process import LEAST_GRACE, Process
from proxy.settings import Settings
from proxy.telemetry.outcome import Kind
from tests.asgi import ScriptedClient
from tests.clock import Clock, turns, until
from tests.serving import write_policies


def made(folder: Path, **settings: Any) -> Process:
    return Process(Settings(store=str(folder / "store"), **settings))


async def test_the_state_shows_the_policies_and_what_else_is_in_force(tmp_path: Path) -> None:
    policy = {
        "api_keys": [{"sha256": "0" * 64}],
        "upstream": {"base_url": "http://127.0.0.1:9/v1"},
        "offload": {"mode": "compact", "max_total_tokens": 9_000, "holdout": 0.25},
        "retention": "1h",
        "rules": [{"model": "gpt-*", "offload": {"mode": "off"}}],
    }
    write_policies(tmp_path / "policies", {"acme": policy})
    process = made(tmp_path, policies=tmp_path / "policies")
    async with process.running():
        page = await process.state([])
    assert page["policies"] == [
        {
            "tenant": "acme",
            "upstream": "http://127.0.0.1:9/v1",
            "mode": "compact",
            "max_total_tokens": 9_000,
            "holdout": 0.25,
            "retention": 3_600.0,
            "rules": ["gpt-*"],
        }
    ]
    assert page["store"] == {"fault": None, "breaker": "closed"}
    assert page["upstreams"]["http://127.0.0.1:9/v1"]
    assert "store" in page["caches"] and len(page["caches"]) > 1
    assert (page["reload"], page["windows"]) == (None, [])


async def test_other_replicas_reach_this_one_by_its_name(tmp_path: Path) -> None:
    process = made(
        tmp_path, replica_url="http://Proxy-1:8787", allowed_hosts=frozenset({"proxy.example"})
    )
    for host in (b"proxy-1:8787", b"proxy.example", b"localhost"):
        process.check_origin([(b"host", host)], b"/")
    with pytest.raises(ForeignSite):
        process.check_origin([(b"host", b"proxy-2:8787")], b"/")
    with pytest.raises(ForeignSite):
        made(tmp_path).check_origin([(b"host", b"")], b"/")


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environment", "traced"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, True),
    ],
)
def test_requests_are_traced_where_an_endpoint_of_traces_is_named(
    tmp_path: Path, environment: dict[str, str], traced: bool
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    process = made(tmp_path, environment=environment)
    assert (process.traces is not None) == traced
    if process.traces:
        process.traces.close()


def test_a_wrong_variable_of_opentelemetry_is_a_user_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(UserMistake, match="OTEL_ATTRIBUTE_COUNT_LIMIT"):
        made(tmp_path, environment={**ENDPOINT, "OTEL_ATTRIBUTE_COUNT_LIMIT": "many"})


@pytest.mark.parametrize("cut", [False, True], ids=["first signal", "second signal"])
async def test_background_work_has_the_drain_timeout_to_end(
    tmp_path: Path, clock: Clock, cut: bool
) -> None:
    process = made(tmp_path, drain_timeout=60)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncExitStack() as held:
        await held.enter_async_context(process.running())
        process.services.background.start("work", work)
        await turns()
        process.ending()
        if cut:
            process.cut()
        closing = asyncio.create_task(held.pop_all().aclose())
        await turns()
        clock.move(LEAST_GRACE / 2 if cut else 55)
        await turns()
        assert not ended.is_set()
        clock.move(LEAST_GRACE if cut else 6)
        await until(ended.is_set)
        await until(closing.done)
    assert not process.hangs


async def test_the_last_requests_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their lines would wait for others otherwise."""
    process = made(tmp_path)
    with caplog.at_level(logging.INFO, "proxy.request"):
        async with process.running():
            process.record(ScriptedClient().client().outcome(Kind.RELAY))
        assert [record.getMessage() for record in caplog.records] == ["request"]
    assert b'kind="relay"' in process.metrics.render()[1]
