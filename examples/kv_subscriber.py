"""Follow the KV-cache events of one worker.   python examples/kv_subscriber.py localhost:8001"""

import sys

from vllm_cp import ControlClient
from vllm_cp.kv import Batch, Gap, PrefixIndex, Subscriber

target, index = sys.argv[1], PrefixIndex()
with ControlClient(target) as client, Subscriber(None, refresh=client.kv_event_sources, worker=target) as events:
    for item in events:
        index.apply(item)
        if isinstance(item, Batch):
            print(f"rank {item.rank} batch {item.seq}: {len(item.events)} events, {len(index)} blocks held", flush=True)
        elif isinstance(item, Gap):
            print(f"batches {item.first} to {item.last} are lost: {item.reason.value}", flush=True)
