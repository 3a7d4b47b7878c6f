"""How much KV cache a fleet has, and what of it is only a lower bound.

python examples/fleet_capacity.py llama-0:8001 llama-1:8001
"""

from __future__ import annotations

import sys

from vllm_cp.fleet import Fleet
from vllm_cp.models.health import HealthStatus


def main(targets: list[str]) -> int:
    """Print a line per worker and the sum over those that serve; 1 when any of them did not tell."""
    total, told = 0, True
    with Fleet(targets) as fleet:
        for worker in fleet.snapshot(deadline_s=2.0):
            blocks = worker.server.total_kv_blocks if worker.server is not None else None
            serving = worker.health is HealthStatus.SERVING
            # Unknown is not zero: a worker that did not answer makes the sum a lower bound.
            told = told and not worker.errors
            if serving and blocks is not None:
                total += blocks
            health = worker.health.value if worker.health is not None else "no answer"
            print(f"{worker.key:24} {health:12} {'-' if blocks is None else blocks:>8}")
            for fact, error in list(worker.errors.items())[:1]:
                print(f"  {fact}: {error}")
    print(f"{'' if told else 'at least '}{total} KV blocks on workers that serve")
    return 0 if told else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
