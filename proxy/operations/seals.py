"""How a file shows that it is what was written.

The names of moved texts contain a digest of the text, so these files need nothing else. Any other file has a seal
beside it, a record under `NAMESPACE/seals/`, because callers and people read the file itself as it is. Files that older
versions wrote under such names have none, and cannot be checked.
"""

from __future__ import annotations

import hashlib
import re

from proxy.plan.labels import digest_in
from proxy.requests.records import sealed

_SEAL = re.compile(rb'\{"content":"([0-9a-f]{64})","sha256":"[0-9a-f]{64}"\}')


def needs_seal(name: str) -> bool:
    """Whether the name itself does not tell the content."""
    return not digest_in(name)


def seal_of(content: bytes) -> bytes:
    """Return the record that is written beside this content."""
    return _seal(hashlib.sha256(content).hexdigest().encode())


def is_seal(record: bytes) -> bool:
    """Whether the record is a seal, and not a damaged one, which would prove nothing."""
    match = _SEAL.fullmatch(record)
    return match is not None and record == _seal(match[1])


def is_intact(name: str, content: bytes, seal: bytes | None) -> bool:
    """Whether the content is what was written. Without a digest in the name and without a seal, any content is."""
    if digest := digest_in(name):
        return hashlib.sha256(content).hexdigest().startswith(digest)
    return seal is None or seal == seal_of(content)


def _seal(digest: bytes) -> bytes:
    return sealed("", b'{"content":"%b"}' % digest)
