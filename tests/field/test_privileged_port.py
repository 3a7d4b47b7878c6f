"""A port that this user may not listen on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.exporter.process import COMMAND

FIRST_FREE = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
#: What makes root like anybody else, as far as ports go.
HUMBLE = ("setpriv", "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service") if os.geteuid() == 0 else ()


@pytest.mark.skipif(
    not FIRST_FREE.exists() or int(FIRST_FREE.read_text()) <= 80, reason="every port is anybody's on this machine"
)
@pytest.mark.skipif(bool(HUMBLE) and not shutil.which("setpriv"), reason="run as root, and there is no setpriv")
def test_it_is_one_line() -> None:
    """A privileged port is refused like a busy one: one line with address and port, exit code 1."""
    command = [*HUMBLE, *COMMAND, "--target", "a:1", "--listen", "127.0.0.1:80"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "vllm-cp-exporter: cannot listen on 127.0.0.1:80: Permission denied\n"
