"""The way to an upstream: directly, or through one of the environment's outgoing proxies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address, ip_network

from yarl import URL

from proxy.errors import UpstreamUnreachable, UserMistake
from proxy.plan.prices import is_loopback

_SPOKEN = ("http", "https")
"""The kinds of proxies that we can ask."""

_PORTS = {"http": "80", "https": "443"}

_ADDRESS = re.compile(r"\[?(?P<host>[^\]]*?)\]?(?::(?P<port>\d+))?")
"""A host with an optional port; an IPv6 address with one has brackets."""

_Exception = Callable[[str, str], bool]
"""Says of a host and a port whether they are reached directly."""


class Routes:
    """The environment's outgoing proxies.

    `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` are read in either case; the lower case
    wins. Programs set them for one another, so one of a kind that we cannot ask, such as SOCKS,
    matters only to a request that would need it. Raises UserMistake for what is no address.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Sorted, so that the lower case wins if both are set.
        variables = {name.lower(): value for name, value in sorted(environment.items())}
        entries = re.split(r"[,\s]+", variables.get("no_proxy", "").lower())
        self._direct = [_exception(entry) for entry in entries if entry]
        self._proxies = dict[str, tuple[str, URL]]()
        for scheme in (*_SPOKEN, "all"):
            name = f"{scheme}_proxy".upper()
            if address := variables.get(name.lower()):
                self._proxies[scheme] = name, _proxy(name, address)

    def to(self, origin: str) -> URL | None:
        """Return the proxy on the way to `origin`, which is scheme, host and port; None if there is
        none. This machine is reached directly. Raises UpstreamUnreachable if we cannot ask it."""
        scheme, _, authority = origin.partition("://")
        name, proxy = self._proxies.get(scheme) or self._proxies.get("all") or ("", None)
        if proxy is None:
            return None
        host, port = _split(authority.rpartition("@")[2].lower())
        if is_loopback(host):
            return None
        if any(direct(host, port or _PORTS.get(scheme, "")) for direct in self._direct):
            return None
        if proxy.scheme not in _SPOKEN:
            raise UpstreamUnreachable(
                f"Upstream cannot be reached: {name} of the environment is a {proxy.scheme} proxy, and "
                "only HTTP proxies can be asked. Name upstream in NO_PROXY, or set another one"
            )
        return proxy


def origin_of(url: str) -> str:
    """Return scheme, host and port, without the path, which may be the client's own."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0]}"


def _proxy(name: str, address: str) -> URL:
    try:
        url = URL(address if "://" in address else f"http://{address}")
    except ValueError:
        url = URL()
    if not url.host:
        raise UserMistake(f"{name}: expected an address such as http://proxy:3128")
    return url


def _split(authority: str) -> tuple[str, str]:
    """Return the host and the port, which may be empty."""
    if authority.count(":") > 1 and "]" not in authority:
        return authority, ""
    found = _ADDRESS.fullmatch(authority)
    return (found["host"].removesuffix("."), found["port"] or "") if found else (authority, "")


def _exception(entry: str) -> _Exception:
    """Return what an entry of NO_PROXY excepts: `*`, a network such as `10.0.0.0/8`, or a host with
    its subdomains, with an optional port. `.host` and `*.host` mean the host."""
    if entry == "*":
        return lambda host, port: True
    host, port = _split(entry)
    try:
        network = ip_network(host if "/" not in entry else entry, strict=False)
    except ValueError:
        name = host.removeprefix("*").removeprefix(".")
        return lambda asked, on: port in ("", on) and f".{asked}".endswith(f".{name}")

    def within(asked: str, on: str) -> bool:
        try:
            return port in ("", on) and ip_address(asked) in network
        except ValueError:
            return False

    return within
