"""Detects requests that a web page sent: through a browser, pages can reach loopback and use the proxy's own key. Pure.

Any page may POST text to `127.0.0.1`, and a page whose host name was rebound to `127.0.0.1` can also read the reply.
`Origin` or `Sec-Fetch-Site` reveals the first and `Host` the second: browsers do not let pages set these headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from proxy.errors import ForeignSite
from proxy.plan.prices import is_loopback
from proxy.upstream.headers import Header

_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::[0-9]*)?")
"""Host and port (RFC 3986, 3.2), in lower case. Browsers never send user information in it."""

_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_AUTHORITY.pattern}")
"""RFC 6454, 6.2. `null`, the origin of sandboxed frames and local files, does not match."""


_TELLING = frozenset((b"host", b"origin", b"sec-fetch-site"))
"""The headers that reveal a foreign page."""


def check(headers: Iterable[Header], target: bytes, allowed: Collection[str]) -> None:
    """Raises ForeignSite if a foreign page may have sent the request.

    `target` is the raw request target; `allowed` has lower-case host names in addition to loopback's. A request
    without `Host` (HTTP/1.0) comes from no browser. A known `Origin` outweighs `Sec-Fetch-Site`: to a browser,
    `localhost` and `127.0.0.1` are two sites.
    """
    telling = [(lower, value) for name, value in headers if (lower := name.lower()) in _TELLING]
    said = [(name, value.decode("latin-1").strip().lower()) for name, value in telling]
    hosts = [value for name, value in said if name == b"host"]
    if b"://" in target.partition(b"?")[0]:
        hosts.append(target.decode("latin-1").lower().partition("://")[2].partition("/")[0].partition("?")[0])
    for host in hosts:
        if not _is_known(_AUTHORITY.fullmatch(host), allowed):
            raise ForeignSite(f"This proxy does not serve the host {_shown(host)}. {_HINT}")
    origins = [value for name, value in said if name == b"origin"]
    for origin in origins:
        if not _is_known(_ORIGIN.fullmatch(origin), allowed):
            raise ForeignSite(f"This proxy does not serve pages of the origin {_shown(origin)}. {_HINT}")
    if not origins and (b"sec-fetch-site", "cross-site") in said:
        raise ForeignSite(f"This proxy does not serve pages of other sites. {_HINT}")


_HINT = (
    "The operator can allow a host name, such as host.docker.internal or that of a web page, with "
    "--allowed-hosts NAME,NAME or OFFLOAD_ALLOWED_HOSTS."
)


def _is_known(found: re.Match[str] | None, allowed: Collection[str]) -> bool:
    if found is None:
        return False
    host = found["host"].removesuffix(".")
    return is_loopback(host) or host in allowed or host.removeprefix("[").removesuffix("]") in allowed


def _shown(text: str) -> str:
    return ascii(text[:_LONGEST])


_LONGEST = 100
"""Most characters of the caller's text that an error repeats."""
