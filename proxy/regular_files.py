"""Reads regular files at paths that others control, and refuses anything else."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_ODD = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV)
"""The errors when opening a link (EMLINK on FreeBSD), a socket, or a device without a driver."""


class NotRegular(OSError):
    """The path is a folder, a pipe, a socket or a device, or a link that must not be followed."""


def read(path: Path, limit: int = -1, *, follow: bool = False) -> bytes:
    """Read a regular file, or its first `limit` bytes. Links are followed only with `follow`.

    Raises NotRegular for anything else, or another OSError.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in _ODD:
            raise NotRegular(error.errno, "Not a regular file") from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise NotRegular(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise NotRegular(errno.EINVAL, "Not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)
