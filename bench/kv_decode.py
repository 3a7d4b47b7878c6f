"""Decoding KV-cache events: typed, and by bare msgspec into dicts, of the same bytes in one run.

    python bench/kv_decode.py [--json]

Three mixes: one block per batch (decode steps), 64 blocks per batch (prefills), and evictions before a store. Blocks
have 16 tokens. A case is good at a million blocks a second and at most three times the time of the bare decoder.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_cp.kv import Decoded, decode
from vllm_cp.kv.decoding import unfit

SIZE = 16


def stored(chance: random.Random, blocks: int) -> dict[str, Any]:
    """A store event as vLLM sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": [chance.getrandbits(64) for _ in range(blocks)],
        "parent_block_hash": chance.getrandbits(64),
        "token_ids": [chance.randrange(150_000) for _ in range(blocks * SIZE)],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(chance: random.Random) -> dict[str, Any]:
    """An eviction: one event for each block."""
    return {"type": "BlockRemoved", "block_hashes": [chance.getrandbits(64)], "medium": "GPU", "group_idx": 0}


def best(read: Callable[[bytes], object], payloads: list[bytes], rounds: int) -> float:
    """Seconds for all of them, the best of some rounds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for payload in payloads:
            read(payload)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    chance = random.Random(1)
    mixes: dict[str, list[Any]] = {
        "decode_1": [[1.0, [stored(chance, 1)], 0] for _ in range(5_000)],
        "prefill_64": [[1.0, [stored(chance, 64)], 0] for _ in range(300)],
        "evict_64": [[1.0, [*(removed(chance) for _ in range(64)), stored(chance, 64)], 0] for _ in range(200)],
    }
    bare = msgspec.msgpack.Decoder().decode
    results = []
    for name, batches in mixes.items():
        payloads = [msgspec.msgpack.encode(batch) for batch in batches]
        found = [decode(payload) for payload in payloads]
        assert all(isinstance(batch, Decoded) and batch.current for batch in found)
        blocks = sum(len(event["block_hashes"]) for batch in batches for event in batch[1])
        raw, typed, look = (best(read, payloads, options.rounds) for read in (bare, decode, unfit))
        results.append(
            {
                "mix": name,
                "batches": len(payloads),
                "blocks": blocks,
                "typed_blocks_per_s": round(blocks / typed),
                "raw_blocks_per_s": round(blocks / raw),
                "typed_over_raw": round(typed / raw, 2),
                "look_over_raw": round(look / raw, 2),
            }
        )
    if options.json:
        print(json.dumps(results))
    else:
        for result in results:
            print("  ".join(f"{name} {value}" for name, value in result.items()))
    # One block per batch is bound by the batch, not by its blocks: the ratio is what counts there.
    fast = all(result["typed_blocks_per_s"] >= 1_000_000 for result in results if result["mix"] != "decode_1")
    return 0 if fast and all(result["typed_over_raw"] <= 3 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
