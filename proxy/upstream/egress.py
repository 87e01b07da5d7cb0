"""The environment's outgoing proxies and certificates, read as httpx reads them.

`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` are read in either case; the lower case wins. NO_PROXY is `*`,
or a comma-separated list of hosts, each with an optional port and including its subdomains.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import certifi
import msgspec
from yarl import URL

from proxy.errors import UserMistake


class Route(msgspec.Struct, frozen=True, eq=False):
    """How to reach one origin. `Routes` makes one for each."""

    origin: URL
    proxy: URL | None


class Routes:
    """Finds the proxy for each origin. Raises UserMistake if the environment names a proxy that cannot be used."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Sorted, so that the lower case wins if both are set.
        variables = {name.lower(): value for name, value in sorted(environment.items())}
        addresses = {scheme: variables.get(f"{scheme}_proxy") for scheme in ("http", "https", "all")}
        self._proxies = {scheme: _parsed(scheme, address) for scheme, address in addresses.items() if address}
        self._none_for = {"no": variables.get("no_proxy", "")}
        self._known: dict[str, Route] = {}

    def to(self, origin: str) -> Route:
        """Return the route to `origin`: scheme, host and port. Cached, because policies name only a few origins."""
        route = self._known.get(origin)
        if route is None:
            route = self._known[origin] = Route(URL(origin), self._proxy(origin))
        return route

    def _proxy(self, origin: str) -> URL | None:
        scheme, _, authority = origin.partition("://")
        if proxy_bypass_environment(authority, self._none_for):
            return None
        return self._proxies.get(scheme) or self._proxies.get("all")


def _parsed(scheme: str, address: str) -> URL:
    url = URL(address if "://" in address else f"http://{address}")
    if url.scheme not in ("http", "https") or not url.host:
        raise UserMistake(f"{scheme.upper()}_PROXY: expected an address such as http://proxy:3128")
    return url


def certificates(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Load the trusted certificates: SSL_CERT_FILE, else SSL_CERT_DIR, else certifi's list. Raises UserMistake."""
    file, directory = environment.get("SSL_CERT_FILE"), environment.get("SSL_CERT_DIR")
    try:
        if file or not directory:
            return ssl.create_default_context(cafile=file or certifi.where())
        return ssl.create_default_context(capath=directory)
    except OSError as error:
        raise UserMistake(f"SSL_CERT_FILE: {file}: {error.strerror or error}") from error
