"""KV-cache events of simulated engines behind the genuine frontend, on the daemon's page."""

from __future__ import annotations

import re

from tests.exporter.process import Exporter
from tests.real.sim.facts import EngineFacts, KvEventsFacts
from tests.real.stack import StackFactory
from vllm_cp import ControlClient, PauseMode


def _of(text: str, name: str, **labels: str) -> float | None:
    """A sample of the page; ``None`` while it is absent."""
    written = ",".join(
        f'{label}="{value}"' for label, value in sorted({"pool": "default", "worker": "w", **labels}.items())
    )
    found = re.search(rf"^vllm_cp_kv_{name}{{{re.escape(written)}}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


def test_stored_evicted_and_removed(stack: StackFactory) -> None:
    """A generation stores blocks under the rank that served it, one that needs their room removes them, and a clear
    empties the cache: seen on /metrics each time, with nothing lost."""
    facts = EngineFacts(num_gpu_blocks=8, block_size=16)
    running = stack(engines=2, facts=facts, kv_events=KvEventsFacts(topic="kv@tiny"))
    with Exporter("--kv-events", f"--target=w={running.target}") as exporter, ControlClient(running.target) as client:
        for rank in "01":
            exporter.eventually(
                lambda text, rank=rank: _of(text, "subscriber_state", rank=rank, state="connected") == 1
            )
        client.generate(list(range(10, 74)), rank=1)
        page = exporter.eventually(lambda text: (_of(text, "blocks_resident", rank="1", medium="gpu") or 0) >= 4)
        assert _of(page, "view_complete", rank="1") == 1
        assert _of(page, "blocks_stored_total", rank="1", medium="gpu") == _of(
            page, "blocks_resident", rank="1", medium="gpu"
        )
        assert _of(page, "blocks_removed_total", rank="1", medium="gpu") == 0
        assert _of(page, "blocks_stored_total", rank="0", medium="gpu") is None
        client.generate(list(range(100, 228)), rank=1)
        page = exporter.eventually(lambda text: (_of(text, "blocks_removed_total", rank="1", medium="gpu") or 0) >= 4)
        stored, removed, held = (
            _of(page, name, rank="1", medium="gpu")
            for name in ("blocks_stored_total", "blocks_removed_total", "blocks_resident")
        )
        assert stored is not None
        assert removed is not None
        assert held == stored - removed
        assert held <= 8
        client.pause(mode=PauseMode.KEEP, clear_cache=True)
        client.resume()
        page = exporter.eventually(lambda text: _of(text, "blocks_resident", rank="1", medium="gpu") == 0)
        assert (_of(page, "gaps_total"), _of(page, "batches_lost_total")) == (0, 0)
