"""Header hygiene and addresses, as tables."""

from __future__ import annotations

import pytest

from proxy.upstream.headers import Headers, location_for, reply_headers, request_headers, url_for

AS_THEY_ARE = [
    (b"Content-Type", b"application/json"),
    (b"content-length", b"12"),
    (b"Authorization", b"Bearer client"),
    (b"Accept-Encoding", b"gzip"),
    (b"X-Stainless-Retry-Count", b"0"),
    (b"x-forwarded-for", b"10.0.0.1"),
    (b"Cookie", b"a=1"),
    (b"X-Same", b"1"),
    (b"X-Same", b"1"),
    (b"X-Same", b""),
]
NOT_SENT_ON = [
    (b"Host", b"proxy:8787"),
    (b"Connection", b"X-Named"),
    (b"X-NAMED", b"for this hop only"),
    (b"Keep-Alive", b"timeout=5"),
    (b"Proxy-Authorization", b"Basic x"),
    (b"Proxy-Connection", b"keep-alive"),
    (b"TE", b"trailers"),
    (b"Trailer", b"X-Sum"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Upgrade", b"h2c"),
    (b"Expect", b"100-continue"),
    (b"X-Offload", b"off"),
    (b"x-offload-mode", b"auto"),
]


def test_request_headers_keep_order_case_and_repetition() -> None:
    mixed = [*AS_THEY_ARE[:4], *NOT_SENT_ON, *AS_THEY_ARE[4:]]
    assert request_headers(mixed) == AS_THEY_ARE


def test_tenants_credential_displaces_every_credential_of_the_clients() -> None:
    clients = [
        (b"AUTHORIZATION", b"x"),
        (b"Api-Key", b"x"),
        (b"x-api-key", b"x"),
        (b"Cookie", b"x"),
        (b"Accept", b"*"),
    ]
    assert request_headers(clients, (b"api-key", b"tenant")) == [
        (b"Accept", b"*"),
        (b"api-key", b"tenant"),
    ]


def test_reply_headers() -> None:
    upstreams = [
        (b"Set-Cookie", b"a=1"),
        (b"Connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"Set-Cookie", b"b=2"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Server", b"uvicorn"),
        (b"X-Offload-Mode", b"of another proxy behind us"),
        (b"X-Offload-Reason", b"its own"),
    ]
    kept = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"server", b"uvicorn")]
    others = [(name.lower(), value) for name, value in upstreams[-2:]]
    assert reply_headers(upstreams) == [*kept, *others]
    assert reply_headers(upstreams, [(b"x-offload-mode", b"auto")]) == [
        *kept,
        (b"x-offload-mode", b"auto"),
    ]


SEVERAL = Headers([(b"Vary", b"A"), (b"Content-Length", b"1"), (b"VARY", b"B")])


def test_names_are_found_in_any_case_and_order() -> None:
    assert (SEVERAL.get(b"vary"), SEVERAL.get(b"date"), SEVERAL.get(b"date", b"never")) == (
        b"A",
        b"",
        b"never",
    )
    assert (SEVERAL.get_all(b"vary"), SEVERAL.get_all(b"date")) == ([b"A", b"B"], [])
    assert (
        SEVERAL.without([b"vary", b"date"])
        == [(b"Content-Length", b"1")]
        == SEVERAL.only([b"content-length"])
    )
    assert (SEVERAL.has(b"vary"), SEVERAL.has(b"date"), len(SEVERAL)) == (True, False, 3)


@pytest.mark.parametrize(
    ("base_url", "target", "url"),
    [
        ("https://h/v1", b"/v1/chat/completions", "https://h/v1/chat/completions"),
        ("https://h/v1/", b"/v1/models?limit=%2f&x=", "https://h/v1/models?limit=%2f&x="),
        ("https://h/v1", b"/v1", "https://h/v1"),
        ("https://h/v1", b"/v1?", "https://h/v1?"),
        ("https://h/v1", b"/v1beta/models", "https://h/v1beta/models"),
        (
            "https://h/v1",
            b"/openai/deployments/d/chat/completions",
            "https://h/openai/deployments/d/chat/completions",
        ),
        (
            "https://h",
            b"/openai/deployments/d/chat/completions?v",
            "https://h/openai/deployments/d/chat/completions?v",
        ),
        (
            "https://h/openai/v1",
            b"/openai/deployments/d/embeddings",
            "https://h/openai/deployments/d/embeddings",
        ),
        ("https://h/openai/v1", b"/openai/v1/responses", "https://h/openai/v1/responses"),
        ("https://h/openai/v1", b"/v1/responses", "https://h/openai/v1/responses"),
        ("https://h/v1", b"/", "https://h/"),
        ("https://h/v1", b"/chat/completions", "https://h/v1/chat/completions"),
        ("https://h/v1", b"/responses/r1?x", "https://h/v1/responses/r1?x"),
        ("https://h/v1", b"/models", "https://h/v1/models"),
        ("https://h", b"/chat/completions", "https://h/chat/completions"),
        ("https://h/v1", b"/modelsx", "https://h/modelsx"),
        ("https://h", b"/v1/models", "https://h/models"),
        ("https://h/api/v3", b"/v1/models", "https://h/api/v3/models"),
        ("https://h/api/v3", b"/files", "https://h/api/v3/files"),
        ("https://h/api/v1", b"/files", "https://h/api/files"),
        ("https://h", b"/v1/threads/t/messages", "https://h/threads/t/messages"),
        ("http://h:1", b"//v1//a|b", "http://h:1//v1//a|b"),
    ],
)
def test_url_for(base_url: str, target: bytes, url: str) -> None:
    assert url_for(base_url, target) == url


@pytest.mark.parametrize(
    ("base_url", "target", "url"),
    [
        ("https://h", b"/v1/messages?beta=true", "https://h/v1/messages?beta=true"),
        ("https://h/v1/", b"/v1/messages", "https://h/v1/messages"),
        ("https://h/v1", b"/v1/v1/messages/count_tokens", "https://h/v1/messages/count_tokens"),
        ("https://h/anthropic", b"/messages/batches", "https://h/anthropic/v1/messages/batches"),
        ("https://h", b"/v1/models?limit=1", "https://h/v1/models?limit=1"),
        ("https://h/v1", b"/v1/files/f", "https://h/v1/files/f"),
        ("https://h", b"/anthropic/v1/messages", "https://h/anthropic/v1/messages"),
        ("https://h/v1", b"/v1beta/x", "https://h/v1beta/x"),
        ("https://h", b"/v1/projects/p/x:rawPredict", "https://h/v1/projects/p/x:rawPredict"),
        ("https://h/v1", b"/projects/p/x:rawPredict", "https://h/v1/projects/p/x:rawPredict"),
    ],
)
def test_url_for_anthropic(base_url: str, target: bytes, url: str) -> None:
    assert url_for(base_url, target, anthropic=True) == url


@pytest.mark.parametrize(
    ("base_url", "said", "location"),
    [
        ("http://h:8000/v1", "http://h:8000/v1/models/", "/v1/models/"),
        ("http://h:8000/v1", "http://h:8000/v1/models/?a=%2f#b", "/v1/models/?a=%2f#b"),
        ("http://h:8000/v1", "http://H:8000/docs", "/docs"),
        ("http://h:8000/v1", "http://h:8000", "/"),
        ("https://h/api/v3", "https://h/api/v3/models/", "/v1/models/"),
        ("https://h/api/v3", "/api/v3/models/", "/v1/models/"),
        ("https://h/openai/v1", "https://h/openai/v1/files/f", "/openai/v1/files/f"),
        ("https://h/v1", "/v1/models/", "/v1/models/"),
        # behind a load balancer that ends TLS (letta-ai/letta#3189)
        ("https://h/v1", "http://h/v1/models/", "/v1/models/"),
        ("https://h:443/v1", "https://h/v1/models/", "/v1/models/"),
        # elsewhere, or in a form that is no address of upstream's
        ("https://h/v1", "https://other/v1/models", None),
        ("https://h/v1", "https://h.other/v1/models", None),
        ("http://h:8000/v1", "http://h:9000/v1/models", None),
        ("http://h:8000/v1", "https://h/v1/models", None),
        ("https://h/api/v3", "https://h/login", None),
        ("https://h/v1", "models/", None),
        ("https://h/v1", "//other/v1", None),
        ("https://h/v1", "http://[::1", None),
        ("https://h/v1", "http://h:x/v1", None),
        ("https://h/v1", "https://h/v1/\xe9", None),
        ("https://h/v1", "", None),
    ],
)
def test_where_a_redirect_leads(base_url: str, said: str, location: str | None) -> None:
    given = said.encode("latin-1")
    made = location_for(base_url, given)
    assert made == (given if location is None else location.encode())


def test_where_a_redirect_of_anthropics_leads() -> None:
    for base in ("https://h", "https://h/v1"):
        made = location_for(base, b"https://h/v1/messages/", anthropic=True)
        assert made == b"/v1/messages/"
    assert (
        location_for("https://h/a", b"https://h/a/v1/messages/", anthropic=True) == b"/v1/messages/"
    )
