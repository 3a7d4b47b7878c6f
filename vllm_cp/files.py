"""Reading files that people name: never without end, never stuck."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_file"]

MEBIBYTE = 1024 * 1024


def read_file(path: Path, *, limit: int = MEBIBYTE, pipes: bool = False) -> bytes:
    """The whole file, at most ``limit`` bytes of it. Raises OSError, whose ``strerror`` says why.

    A pipe or a device can be read only once, may never end, and blocks whoever opens it while nobody writes: it is
    refused, unless ``pipes`` allows it for a file that is read once while somebody is waiting for it.
    """
    # Without this flag it is the opening of a pipe that blocks; a regular file does not mind it.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not pipes and not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit} bytes", os.fspath(path))
    return data
