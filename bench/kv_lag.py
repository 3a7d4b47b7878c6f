"""End-to-end lag of KV-cache events: from the publisher's clock to the index, under load.

    python bench/kv_lag.py [--rate 1000] [--seconds 10] [--ranks 2] [--drop 0.001] [--json]

Publishers in a process of their own send prefills of 32 blocks at a fixed rate; a subscriber in this one decodes them
and feeds an index. The lag is the time from the stamp in a batch to the moment when the index has it. Dropped batches
come over replay, which is part of the lag; batches that queue behind it wait as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from typing import Any

from vllm_cp.kv import Batch, Gap, PrefixIndex, Settings, Subscriber
from vllm_cp.testing import FakeKvPublisher

BLOCKS = 32


def publish(pipe: Any, ranks: int, rate: float, seconds: float, drop: float) -> None:
    """Say where the publishers are, wait for the word, publish."""
    chance = random.Random(1)
    publishers = [FakeKvPublisher(rank=rank, capacity=4096).start() for rank in range(ranks)]
    try:
        pipe.send([kv.source for kv in publishers])
        pipe.recv()
        for kv in publishers:
            kv.wait_subscribed()
        count = int(rate * seconds)
        prompts = [[chance.randrange(150_000) for _ in range(16 * BLOCKS)] for _ in range(count)]
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            time.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            kv = publishers[number % ranks]
            if chance.random() < drop:
                kv.drop(1)
            kv.store(prompt)
        took = time.perf_counter() - begin
        for kv in publishers:
            kv.store(prompts[0])
        pipe.send((took, [kv.next_seq for kv in publishers]))
        pipe.recv()
    finally:
        for kv in publishers:
            kv.close()


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1000.0, help="batches a second, all ranks together")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--drop", type=float, default=0.0, help="share of the batches kept off the live socket")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, options.ranks, options.rate, options.seconds, options.drop)
    process = multiprocessing.get_context("spawn").Process(target=publish, args=arguments)
    process.start()
    index, lags, lost, replayed = PrefixIndex(), [], 0, 0
    with Subscriber(ours.recv(), settings=Settings(replay_cool_down_s=0.1)) as events:
        ours.send("go")
        done: dict[int | None, int] = {}
        goal: list[int] | None = None
        took = 0.0
        while goal is None or [done.get(rank) for rank in range(options.ranks)] != [last - 1 for last in goal]:
            item = events.poll(0.05)
            if goal is None and ours.poll():
                took, goal = ours.recv()
            if item is None:
                continue
            index.apply(item)
            if isinstance(item, Batch):
                lags.append(time.time() - (item.ts or 0.0))
                done[item.rank] = item.seq
                replayed += item.replayed
            elif isinstance(item, Gap):
                lost += item.lost
    ours.send("bye")
    process.join()
    lags.sort()
    result = {
        "batches": len(lags),
        "rate_per_s": round(len(lags) / took),
        "blocks_per_s": round(len(lags) * BLOCKS / took),
        "replayed": replayed,
        "lost": lost,
        "lag_p50_ms": round(1000 * lags[len(lags) // 2], 2),
        "lag_p99_ms": round(1000 * lags[int(len(lags) * 0.99)], 2),
        "lag_max_ms": round(1000 * lags[-1], 2),
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:14} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
