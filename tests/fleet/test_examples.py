"""The examples do what they say, against fake workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.fleet.conftest import Start

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_capacity_adds_up_and_admits_what_it_does_not_know(start: Start) -> None:
    """The sum of those that serve, and "at least" as soon as one does not answer."""
    first, second = start(), start()
    first.set(total_kv_blocks=1000)
    second.set(total_kv_blocks=24)
    command = [sys.executable, str(EXAMPLES / "fleet_capacity.py"), first.target, second.target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1024 KV blocks on workers that serve")
    second.stop()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "at least 1000 KV blocks on workers that serve")
    assert "worker unreachable" in done.stdout


def test_watch_tells_of_a_death_and_of_a_worker_that_joins(start: Start, tmp_path: Path) -> None:
    """One line per change, until it is interrupted."""
    first, second = start(), start()
    file = tmp_path / "targets.json"
    file.write_text(json.dumps([{"targets": [first.target], "labels": {"pool": "chat"}}]))
    command = [sys.executable, str(EXAMPLES / "fleet_watch.py"), str(tmp_path / "*.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = process.stdout
            assert next(lines) == f"{first.target}: joined pool chat at {first.target}\n"
            assert next(lines) == f"{first.target}: SERVING\n"
            first.die(reported=True)
            assert next(lines) == f"{first.target}: NOT_SERVING\n"
            file.write_text(json.dumps([{"targets": [first.target, second.target]}]))
            assert {next(lines) for _ in range(3)} == {
                f"{first.target}: now at {first.target}\n",  # its pool changed
                f"{second.target}: joined pool default at {second.target}\n",
                f"{second.target}: SERVING\n",
            }
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        finally:
            process.kill()
