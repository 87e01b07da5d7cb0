"""The way out: which proxy of the environment leads to an upstream, if any."""

from __future__ import annotations

import pytest

from proxy.errors import UpstreamUnreachable, UserMistake
from proxy.upstream.routes import Routes

ONE = "http://p:3128"


def way(environment: dict[str, str], origin: str) -> str | None:
    found = Routes(environment).to(origin)
    return str(found) if found else None


@pytest.mark.parametrize(
    ("environment", "origin", "proxy"),
    [
        ({}, "https://api.openai.com", None),
        ({"HTTPS_PROXY": ONE}, "https://api.openai.com", ONE),
        ({"HTTPS_PROXY": "p:3128"}, "https://api.openai.com", ONE),
        ({"HTTPS_PROXY": ONE}, "http://api.openai.com", None),
        ({"https_proxy": ONE, "HTTPS_PROXY": "http://upper:1"}, "https://h", ONE),
        ({"ALL_PROXY": ONE}, "https://api.openai.com", ONE),
        ({"ALL_PROXY": "http://all:1", "HTTPS_PROXY": ONE}, "https://h", ONE),
        ({"HTTPS_PROXY": ""}, "https://h", None),
        # Clash sets all three (hiyouga/LlamaFactory#8928)
        ({"ALL_PROXY": "socks5://127.0.0.1:7890", "HTTPS_PROXY": ONE}, "https://h", ONE),
        ({"all_proxy": "socks5h://127.0.0.1:7890", "http_proxy": ONE}, "http://h", ONE),
    ],
)
def test_the_proxy_of_an_upstream(
    environment: dict[str, str], origin: str, proxy: str | None
) -> None:
    assert way(environment, origin) == proxy


GNOME = "localhost,127.0.0.0/8,::1"


@pytest.mark.parametrize(
    ("excepted", "authority", "direct"),
    [
        ("*", "h", True),
        ("localhost, example.com", "api.example.com", True),
        ("localhost example.com", "example.com", True),
        ("EXAMPLE.com", "api.Example.COM", True),
        ("example.com", "api.example.com.", True),
        ("example.com", "notexample.com", False),
        (".example.com", "api.example.com", True),
        (".example.com", "example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "notexample.com", False),
        ("h:8443", "h:8443", True),
        ("h:8443", "h", False),
        ("h:443", "h", True),
        ("10.0.0.1", "10.0.0.1:8000", True),
        ("10.0.0.1:8000", "10.0.0.1:8001", False),
        ("10.0.0.0/8,192.168.0.0/16", "192.168.4.5:1234", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.1.2.3/8", "10.9.9.9", True),
        ("10.0.0.0/8", "10.example.com", False),
        ("fd00::/8", "[fd12::7]:11434", True),
        ("fd00::/8", "[fe80::7]", False),
        ("fd12::7", "[fd12::7]:11434", True),
        ("[fd12::7]", "[fd12::7]", True),
        ("[fd12::7]:80", "[fd12::7]:81", False),
        (GNOME, "api.openai.com", False),
        (",, ,", "h", False),
        ("10.0.0.0/99", "h", False),
    ],
)
def test_what_no_proxy_excepts(excepted: str, authority: str, direct: bool) -> None:
    found = way({"HTTPS_PROXY": ONE, "no_proxy": excepted}, f"https://{authority}")
    assert found == (None if direct else ONE)


@pytest.mark.parametrize(
    "authority",
    ["localhost:11434", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "ollama.localhost"],
)
@pytest.mark.parametrize("excepted", ["", GNOME, "example.com"])
def test_this_machine_is_reached_directly(authority: str, excepted: str) -> None:
    environment = {"HTTP_PROXY": ONE, "ALL_PROXY": "socks5://p:1", "NO_PROXY": excepted}
    assert way(environment, f"http://{authority}") is None


@pytest.mark.parametrize("address", ["http://", "https:///x", "http://p:x"])
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY"])
def test_what_is_no_address_is_a_mistake(name: str, address: str) -> None:
    with pytest.raises(UserMistake, match=name.upper()):
        Routes({name: address})


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "socks4", "socks"])
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY"])
def test_a_kind_that_cannot_be_asked_matters_only_where_it_is_needed(
    name: str, scheme: str
) -> None:
    routes = Routes({name: f"{scheme}://127.0.0.1:7890", "NO_PROXY": "direct.example"})
    assert routes.to("https://direct.example") is None
    with pytest.raises(UpstreamUnreachable, match=f"{name} of the environment is a {scheme} proxy"):
        routes.to("https://api.openai.com")
