"""The example in ``examples/`` does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllm_cp.testing import FakeKvPublisher, FakeWorker

ROOT = Path(__file__).parents[2]


def test_the_example_follows_a_worker() -> None:
    """It finds the sources itself, prints a line per batch, and says what is lost."""
    with FakeKvPublisher(replay=False) as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / "kv_subscriber.py"), worker.target]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as example:
            try:
                kv.wait_subscribed(timeout_s=20.0)
                kv.store(range(64))
                kv.drop(1)
                kv.evict()
                kv.evict()
                assert example.stdout is not None
                lines = [example.stdout.readline().strip() for _ in range(3)]
            finally:
                example.terminate()
    assert lines == [
        "rank 0 batch 0: 1 events, 4 blocks held",
        "batches 1 to 1 are lost: no_replay",
        "rank 0 batch 2: 1 events, 3 blocks held",
    ]
