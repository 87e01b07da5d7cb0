"""Which outgoing proxy is on the way where, by the environment. What then happens on the wire: test_upstream.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.errors import UserMistake
from proxy.upstream.client import Routes, certificates


@pytest.mark.parametrize(
    ("environment", "authority", "proxy"),
    [
        ({}, "api.openai.com", None),
        ({"HTTPS_PROXY": "http://p:3128"}, "api.openai.com", "http://p:3128"),
        ({"HTTPS_PROXY": "p:3128"}, "api.openai.com", "http://p:3128"),
        ({"https_proxy": "http://lower:1", "HTTPS_PROXY": "http://upper:1"}, "h", "http://lower:1"),
        ({"HTTP_PROXY": "http://p:3128"}, "api.openai.com", None),
        ({"ALL_PROXY": "http://p:3128"}, "api.openai.com", "http://p:3128"),
        ({"ALL_PROXY": "http://all:1", "HTTPS_PROXY": "http://https:1"}, "h", "http://https:1"),
        ({"HTTPS_PROXY": ""}, "h", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, "h", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "localhost, example.com"}, "api.example.com", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.com"}, "notexample.com", "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "h:8443"}, "h:8443", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "h:8443"}, "h:443", "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "no_proxy": "10.0.0.1"}, "10.0.0.1:443", None),
    ],
)
def test_routes(environment: dict[str, str], authority: str, proxy: str | None) -> None:
    route = Routes(environment).to(f"https://{authority}")
    assert (str(route) if route else None) == proxy


@pytest.mark.parametrize("address", ["socks5://127.0.0.1:1080", "http://", "https:///x"])
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_that_cannot_be_used(name: str, address: str) -> None:
    with pytest.raises(UserMistake, match=name.upper()):
        Routes({name: address})


def test_certificates(tmp_path: Path) -> None:
    assert certificates({}).cert_store_stats()["x509_ca"] > 0
    # A folder is looked into only when a certificate is to be checked.
    assert certificates({"SSL_CERT_DIR": str(tmp_path)}).cert_store_stats()["x509_ca"] == 0
    for bad in (tmp_path / "nowhere.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("no certificate")
        with pytest.raises(UserMistake, match="SSL_CERT_FILE"):
            certificates({"SSL_CERT_FILE": str(bad)})
