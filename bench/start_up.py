"""Cold start of ``vllm-cp`` against what it can't do without, whole processes in turn, in one run.

    python bench/start_up.py [--rounds 15] [--json FILE]

``--help`` against a process that imports click; ``health`` against the ten lines of raw grpcio below, which make the
same call. Processor seconds, because they don't depend on who else is on the machine; ratios are taken pair by pair.
Byte code is cached beforehand, as an installer does it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_cp.testing import FakeWorker

RAW = """
import sys
import grpc
from vllm_cp._proto import health_pb2
with grpc.insecure_channel(sys.argv[1]) as channel:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(check(health_pb2.HealthCheckRequest(), timeout=5).status))
"""
CLI = ("-m", "vllm_cp.cli")


def measure(rounds: int) -> list[dict[str, object]]:
    """One row for each pair: medians in milliseconds, the median ratio, and what it may be."""
    with FakeWorker() as worker, tempfile.TemporaryDirectory() as cache:
        health = (*CLI, "health", "--target", worker.target)
        shown = compare((*CLI, "--help"), ("-c", "import click"), rounds, cache)
        asked = compare(health, ("-c", RAW, worker.target), rounds, cache)
    return [
        {"name": "--help / import click", **shown, "allowed": 2.0},
        {"name": "health / raw grpcio", **asked, "allowed": 1.3},
    ]


def compare(ours: Sequence[str], theirs: Sequence[str], rounds: int, cache: str) -> dict[str, object]:
    """The two in turn, after one round that is not counted."""
    seconds = [(run(ours, cache), run(theirs, cache)) for _ in range(rounds + 1)][1:]
    return {
        "ours_ms": round(1000 * statistics.median(a for a, _ in seconds), 1),
        "theirs_ms": round(1000 * statistics.median(b for _, b in seconds), 1),
        "ratio": round(statistics.median(a / b for a, b in seconds), 3),
    }


def run(arguments: Sequence[str], cache: str) -> float:
    """Processor seconds of one process from start to end."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM_CP_"))}
    environment = {**kept, "PYTHONPYCACHEPREFIX": cache, "XDG_CONFIG_HOME": cache}
    null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=null)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} ended with {status}")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure, print a table, perhaps write JSON. 1 when a ratio is above what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.rounds)
    print(f"{'':24}{'ours':>10}{'theirs':>10}{'ratio':>8}{'allowed':>9}")
    for row in rows:
        print(f"{row['name']:24}{row['ours_ms']:>7} ms{row['theirs_ms']:>7} ms{row['ratio']:>8}{row['allowed']:>9}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(float(str(row["ratio"])) > float(str(row["allowed"])) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
