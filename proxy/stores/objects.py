"""An object store as a store: one object for each record, in S3, Google Cloud Storage or Azure.

This is the only module that uses obstore. The URL is `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or
`az://CONTAINER/PREFIX`. The credentials need access to the prefix only. Credentials and endpoints
come from each ecosystem's usual variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, …). Settings that are not secret can
be in the URL's query under obstore's names (`?region=eu-central-1&endpoint=http://127.0.0.1:9000`).

The store creates records with `If-None-Match: *` or its equivalent. Do not use a server that
ignores this or accepts two puts at once, because the last writer would win there. Some imitations
of S3 do, such as SeaweedFS before its pull request 8801. Objects have no time of last use, so a
record's age counts from when it was written. Prefer a lifecycle rule on the prefix to the sweep.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from proxy.errors import UserMistake
from proxy.stores import Entry, is_key

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Service

PAGE = 1_000
"""Objects of one page of a listing."""

UNDECIDED = frozenset(("ConditionalRequestConflict", "OperationAborted"))
"""S3's codes for a put that met another operation, and may not have happened. obstore takes them
for "exists already"."""

NO_STORE = frozenset(("NoSuchBucket", "ContainerNotFound"))
"""The codes of a missing bucket, which says nothing about its records. obstore takes it for a
missing object."""

CLIENT: ClientConfig = {
    "allow_http": True,  # endpoints use https unless the operator configured another
    "connect_timeout": timedelta(seconds=2),
    "timeout": timedelta(seconds=10),
}
RETRY: RetryConfig = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
"""obstore retries ten times within three minutes by default, but no request waits that long for a
store."""


class Objects:
    """Records as objects."""

    name = "the object store"
    errors = Exception  # obstore raises foreign classes for a reply that it cannot read
    threads = 32
    batch = 1

    def __init__(self, service: Service) -> None:
        self._service = service

    def put(self, key: str, value: bytes, *, sync: bool) -> bool:
        """Create the object in one request, whatever its size: a multipart upload would not be
        conditional."""
        try:
            obstore.put(self._service, key, value, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if UNDECIDED.isdisjoint(_codes(error)):
                return False
            raise
        return True

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        return [self._get(key) for key in keys]

    def renew(self, keys: Sequence[str], seconds: float) -> None:
        """Write the same bytes once more: services tell an object's age from when it was
        written."""
        for key in keys:
            with suppress(FileNotFoundError):
                if time.time() - self._written(key) > seconds:
                    value = bytes(obstore.get(self._service, key).bytes())
                    obstore.put(self._service, key, value, mode="overwrite", use_multipart=False)

    def pages(self, prefix: str) -> Iterator[Sequence[Entry]]:
        """The service lists only whole folders, so this method compares the rest of the prefix
        itself."""
        for page in obstore.list(self._service, prefix.rpartition("/")[0] or None, chunk_size=PAGE):
            yield [
                Entry(found["path"], found["size"], found["last_modified"].timestamp())
                for found in page
                if found["path"].startswith(prefix) and is_key(found["path"])
            ]

    def delete(self, keys: Sequence[str], until: float | None = None) -> None:
        for key in keys:
            # S3 reports no error for a missing object, the others do
            with suppress(FileNotFoundError):
                if until is None or self._written(key) <= until:
                    obstore.delete(self._service, key)

    def discard(self, key: str, value: bytes) -> None:
        """Looks and deletes, as obstore knows no condition for a deletion: two steps with nothing
        between them."""
        if self._get(key) == value:
            self.delete([key])

    def reason(self, error: Exception) -> str:
        """Return its class and the codes in its text, which can also contain signed addresses and
        our data."""
        return ", ".join(dict.fromkeys((type(error).__name__, *_codes(error))))

    def is_full(self, error: Exception) -> bool:
        """Buckets have no end."""
        return False

    def _written(self, key: str) -> float:
        """Return when an object was written, in seconds since the epoch."""
        return obstore.head(self._service, key)["last_modified"].timestamp()

    def _get(self, key: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._service, key).bytes())
        except FileNotFoundError as error:
            if NO_STORE.isdisjoint(_codes(error)):
                return None
            raise


_TELLING = re.compile(
    r"status code: (\d{3} ?[A-Za-z ]{0,40})|<Code>(\w{1,60})</Code>|(connection refused|timed out|dns error)",
    re.I,
)
"""The parts of an error's text that come from the server or the network and never contain our
data."""


def _codes(error: Exception) -> list[str]:
    """Return the safe parts of an error's text, such as `403 Forbidden` and
    `SignatureDoesNotMatch`."""
    return [next(filter(None, match)).strip() for match in _TELLING.findall(str(error))]


def open_objects(url: str) -> Objects:
    """Return the engine at a URL without connecting. Raises UserMistake if obstore does not
    understand the URL."""
    parts = urlsplit(url)
    config: Any = dict(parse_qsl(parts.query))
    try:
        service = from_url(
            parts._replace(query="").geturl(),
            config=config,
            client_options=CLIENT,
            retry_config=RETRY,
        )
    except (BaseError, ValueError) as error:
        # One line of bounded length, without obstore's internal dump after its first blank line.
        said = " ".join(str(error).partition("\n\n")[0].split())[:500]
        raise UserMistake(f"the store's URL: {said}") from error
    return Objects(service)
