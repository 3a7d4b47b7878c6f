"""Reading files that people name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_cp import ConfigError, Connection, Tls
from vllm_cp.files import read_file


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """What is in it, to the limit."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, limit=5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_file(path, limit=4)


def test_what_never_ends_is_refused(tmp_path: Path) -> None:
    """A pipe nobody writes to, a device and a folder are refused at once, and not waited for."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, why in ((fifo, "not a regular file"), (Path("/dev/zero"), "not a regular file"), (tmp_path, "directory")):
        with pytest.raises(OSError, match=why):
            read_file(path)
    with pytest.raises(OSError, match="longer than"):
        read_file(Path("/dev/zero"), limit=100, pipes=True)


def test_secrets_from_endless_files_are_a_configuration_error(tmp_path: Path) -> None:
    """A token or certificate file that is a pipe or a device is named, with what is wrong."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match=r"token file .* not a regular file"):
        Connection(tls=Tls(), token_file=Path("/dev/zero"))
    with pytest.raises(ConfigError, match=r"CA file .* not a regular file"):
        Tls(ca_file=fifo)
