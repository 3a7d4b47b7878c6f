"""The prefix index: how fast it takes events in, what a block costs in memory, and how long a look-up takes.

    python bench/kv_index.py [--workers 64] [--blocks 1000000] [--json]

Every worker caches the same 8192-token prompt and, beside it, prompts of its own until a million blocks are held. The
look-up is the expensive one: all workers hold the whole prompt, so the walk goes to its end.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from vllm_cp.kv import Batch, PrefixIndex, SourceId, Stored

SIZE = 16
PROMPT = 8192


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def batches(worker: int, blocks: int, prompt: list[int], chance: random.Random) -> Iterator[Batch]:
    """What one worker publishes."""
    source = SourceId(worker=f"worker-{worker}", rank=0)
    seq = 0
    tokens = prompt
    while blocks > 0:
        count = len(tokens) // SIZE
        hashes = tuple(chance.getrandbits(64) for _ in range(count))
        stored = Stored(block_hashes=hashes, token_ids=tuple(tokens), block_size=SIZE, medium="GPU", group_idx=0)
        yield Batch(source=source, seq=seq, ts=0.0, events=(stored,))
        seq += 1
        blocks -= count
        tokens = array("I", chance.randbytes(4 * SIZE * 128)).tolist()


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(1)
    prompt = [chance.randrange(150_000) for _ in range(PROMPT)]
    index = PrefixIndex()
    gc.collect()
    before, spent, peak = resident_bytes(), 0.0, 0
    for worker in range(options.workers):
        for batch in batches(worker, options.blocks // options.workers, prompt, chance):
            began = time.perf_counter()
            index.apply(batch)
            spent += time.perf_counter() - began
            peak += len(batch.events[0].block_hashes)  # type: ignore[union-attr]
    gc.collect()
    memory = resident_bytes() - before
    looks = []
    for _ in range(300):
        began = time.perf_counter()
        found = index.match(prompt)
        looks.append(time.perf_counter() - began)
    looks.sort()
    assert len(found) == options.workers
    assert all(match.tokens == PROMPT for match in found)
    result = {
        "workers": options.workers,
        "blocks": len(index),
        "update_blocks_per_s": round(peak / spent),
        "bytes_per_block": round(memory / len(index)),
        "match_tokens": PROMPT,
        "match_p50_ms": round(1000 * looks[len(looks) // 2], 3),
        "match_p99_ms": round(1000 * looks[int(len(looks) * 0.99)], 3),
        "match_target_ms": 1.0,
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:22} {value}")
    return 0 if looks[len(looks) // 2] < 0.001 else 1


if __name__ == "__main__":
    sys.exit(main())
