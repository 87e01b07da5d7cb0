"""Which requests a foreign page may have sent, as a table; and whose requests are looked at so,
through the server."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import httpx
import pytest

from proxy.errors import ForeignSite
from proxy.plan.prices import is_loopback
from proxy.server.access import check_origin as check
from tests.fake_upstream import StrictUpstream, text, whole
from tests.serving import PLAIN, Proxy
from tests.wire import ask

ALLOWED = frozenset({"host.docker.internal", "fd00::1"})


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "127.0.0.1",
        "127.1.2.3",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
    ],
)
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "proxy",
        "",
        "notlocalhost",
    ],
)
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


OURS = [
    [("Host", "localhost:8787")],
    [("host", "127.0.0.1")],
    [("Host", "LocalHost.:80")],
    [("Host", "[::1]:8787")],
    [("Host", "Host.Docker.Internal:8787")],
    [("Host", "[fd00::1]:8787")],
    [],
    [("Host", "localhost"), ("Origin", "http://localhost:3000")],
    [("Host", "localhost"), ("Origin", "http://localhost:3000"), ("Sec-Fetch-Site", "cross-site")],
    [("Host", "localhost"), ("Origin", "https://host.docker.internal")],
    [("Host", "localhost"), ("Sec-Fetch-Site", "none")],
    [("Host", "localhost"), ("Sec-Fetch-Site", "same-origin")],
    [("Host", "localhost"), ("Sec-Fetch-Site", "same-site")],
]
FOREIGN = [
    [("Host", "evil.example")],
    [("Host", "evil.example:8787")],
    [("Host", "localhost.evil.example")],
    [("Host", "localhost"), ("Host", "evil.example")],
    [("Host", "localhost@evil.example")],
    [("Host", "evil@localhost")],
    [("Host", "localhost, evil.example")],
    [("Host", "")],
    [("Host", "0.0.0.0:8787")],
    [("Host", "[::1")],
    [("Host", "xhost.docker.internal")],
    [("Host", "localhost"), ("Origin", "https://evil.example")],
    [("Host", "localhost"), ("Origin", "null")],
    [("Host", "localhost"), ("Origin", "")],
    [("Host", "localhost"), ("Origin", "http://localhost@evil.example")],
    [("Host", "localhost"), ("Origin", "http://localhost.evil.example")],
    [("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "http://evil.example")],
    [("Host", "localhost"), ("Origin", "http://localhost http://evil.example")],
    [("Host", "localhost"), ("Origin", "chrome-extension://abcdef")],
    [("Host", "localhost"), ("Sec-Fetch-Site", "cross-site")],
    [("Host", "localhost"), ("SEC-FETCH-SITE", "Cross-Site ")],
]


def raw(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


@pytest.mark.parametrize("headers", OURS, ids=str)
def test_requests_from_no_foreign_page_pass(headers: list[tuple[str, str]]) -> None:
    check(raw(headers), b"/v1/models", ALLOWED)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_foreign_origins_are_refused_with_advice(headers: list[tuple[str, str]]) -> None:
    with pytest.raises(ForeignSite, match="--allowed-hosts") as refused:
        check(raw(headers), b"/v1/models", ALLOWED)
    assert (refused.value.status, refused.value.code) == (403, "origin_not_allowed")


def test_a_refusal_names_what_is_foreign_and_not_at_length() -> None:
    long = "evil." * 100
    for headers, what in (
        ([("Host", "evil.example")], "the host 'evil.example'."),
        ([("Host", long)], f"the host '{long[:100]}'."),
        ([("Origin", "https://evil.example")], "pages of the origin 'https://evil.example'."),
        ([("Sec-Fetch-Site", "cross-site")], "pages of other sites."),
    ):
        with pytest.raises(ForeignSite) as refused:
            check(raw(headers), b"/v1/models", ALLOWED)
        assert f"This proxy does not serve {what} The operator can" in refused.value.message


@pytest.mark.parametrize(
    ("target", "passes"),
    [
        (b"http://localhost:8787/v1/models", True),
        (b"http://evil.example/v1/models", False),
        (b"HTTP://evil.example?x", False),
        (b"http://localhost@evil.example/", False),
        (b"/v1/models?next=http://evil.example/", True),
    ],
)
def test_the_targets_own_authority_counts(target: bytes, passes: bool) -> None:
    headers = [(b"Host", b"localhost")]
    if passes:
        check(headers, target, ())
    else:
        with pytest.raises(ForeignSite):
            check(headers, target, ())


# Whose requests

PAGE = {"origin": "https://evil.example", "content-type": "text/plain"}
REBOUND = {"host": "evil.example"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def chat(proxy: Proxy, headers: dict[str, str]) -> int:
    return proxy.post("/v1/chat/completions", CHAT, "", **headers).status_code


@pytest.fixture
def upstream(up: StrictUpstream) -> StrictUpstream:
    up.respond(lambda _: text("Hello."))
    return up


@pytest.mark.parametrize("foreign", [PAGE, REBOUND, {"sec-fetch-site": "cross-site"}], ids=str)
def test_a_page_cannot_spend_a_key_that_it_does_not_know(
    upstream: StrictUpstream, serve: Callable[..., Proxy], foreign: dict[str, str]
) -> None:
    lent = {"tenant": "lent", "api_keys": [{"sha256": sha256(b"lent").hexdigest()}]}
    by_rule = {"tenant": "ruled", "api_keys": [{"sha256": sha256(b"ruled").hexdigest()}]}
    proxy = serve(
        {
            "default": {"upstream": {"base_url": upstream.url}},
            "lent": lent | {"upstream": {"base_url": upstream.url, "api_key": "sk-tenant"}},
            "ruled": by_rule
            | {
                "upstream": {"base_url": upstream.url},
                "rules": [{"model": "m", "upstream": {"api_key": "sk"}}],
            },
        }
    )
    for key in ({}, {"authorization": "Bearer lent"}, {"authorization": "Bearer ruled"}):
        assert chat(proxy, key) == 200
        asked = len(upstream.requests)
        assert chat(proxy, key | foreign) == 403
        assert len(upstream.requests) == asked
    assert chat(proxy, {"authorization": "Bearer own"} | foreign) == 200, (
        "who brings a key is no page"
    )


def test_allowed_hosts_pass(upstream: StrictUpstream, serve: Callable[..., Proxy]) -> None:
    proxy = serve(
        {"default": {"upstream": {"base_url": upstream.url}}},
        allowed_hosts=frozenset({"evil.example"}),
    )
    assert chat(proxy, PAGE | REBOUND | {"sec-fetch-site": "cross-site"}) == 200


def test_any_host_passes_on_other_addresses_except_for_admin_pages(
    upstream: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    proxy = serve(
        {"default": {"upstream": {"base_url": upstream.url}}}, host="0.0.0.0", admin_token="t"
    )
    assert chat(proxy, REBOUND) == 200
    for path in ("/metrics", "/health?deep=1", "/_offload/x"):
        for foreign in (PAGE, REBOUND):
            assert (
                httpx.get(
                    proxy.root + path, headers=foreign, trust_env=False, verify=PLAIN
                ).status_code
                == 403
            )
    with_token = REBOUND | {"authorization": "Bearer t"}
    assert (
        httpx.get(
            proxy.root + "/metrics", headers=with_token, trust_env=False, verify=PLAIN
        ).status_code
        == 200
    )
    assert (
        httpx.get(
            proxy.root + "/_offload/x", headers=with_token, trust_env=False, verify=PLAIN
        ).status_code
        == 403
    )
    for path, status in (("/metrics", 200), ("/_offload/x", 404), ("/health", 200)):
        assert httpx.get(proxy.root + path, trust_env=False, verify=PLAIN).status_code == status
    assert (
        httpx.get(
            proxy.root + "/health", headers=REBOUND, trust_env=False, verify=PLAIN
        ).status_code
        == 200
    )


async def test_a_target_with_an_origin_of_its_own(
    upstream: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    proxy = serve({"default": {"upstream": {"base_url": upstream.url}}})
    for target in (b"/v1/models", b"/metrics", b"/_offload/x"):
        reply = await ask(
            proxy.port, b"GET http://evil.example%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target
        )
        assert reply.status == 403


# What a browser asks before it sends a page's request

ASKS = {
    "origin": "app://obsidian.md",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def preflight(proxy: Proxy, path: str, **headers: str) -> httpx.Response:
    return httpx.options(proxy.root + path, headers=ASKS | headers, trust_env=False, verify=PLAIN)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/files"])
@pytest.mark.parametrize("keyed", [False, True], ids=["any key", "known keys only"])
def test_a_page_may_ask_whether_it_may_send_its_key(
    upstream: StrictUpstream, serve: Callable[..., Proxy], path: str, keyed: bool
) -> None:
    """9router#3659, gpt-load#566: a preflight has no key, so it is nobody's request."""
    policy = {"upstream": {"base_url": upstream.url}}
    known = {"tenant": "t", "api_keys": [{"sha256": sha256(b"known").hexdigest()}]}
    proxy = serve({"t": known | policy} if keyed else {"default": policy})
    said = preflight(proxy, path, **{"access-control-request-private-network": "true"})
    assert (said.status_code, said.content) == (204, b"")
    assert {name: value for name, value in said.headers.items() if name.startswith("access-")} == {
        "access-control-allow-origin": "*",
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization,content-type",
        "access-control-allow-private-network": "true",
    }
    assert not upstream.requests
    key = {"origin": ASKS["origin"], "authorization": "Bearer known"}
    assert chat(proxy, key) == 200, "and then its request has one"
    assert chat(proxy, {"origin": ASKS["origin"]}) == (401 if keyed else 403)


def test_only_a_preflight_of_an_api_is_answered(
    upstream: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    upstream.respond(lambda _: whole({}, 405))
    proxy = serve({"default": {"upstream": {"base_url": upstream.url}}})
    assert preflight(proxy, "/v1/models", host="evil.example").status_code == 403
    assert preflight(proxy, "/_offload/api/requests").status_code == 403
    plain = httpx.options(proxy.root + "/v1/models", trust_env=False, verify=PLAIN)
    assert plain.status_code == 405 and len(upstream.requests) == 1
