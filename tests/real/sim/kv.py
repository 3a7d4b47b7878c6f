"""KV events: the publisher with vLLM's framing, and the small block cache whose changes it publishes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from tests.real.sim.facts import KvEventsFacts
from tests.real.sim.protocol import pack

log = logging.getLogger(__name__)

# A KV event as newer servers encode it: a map tagged by "type".
KvEvent = dict[str, Any]

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """A PUB socket and a replay ROUTER.

    Live:   ``[topic, seq (8 bytes big-endian), msgpack batch]``
    Replay: the client sends ``["", start_seq]`` from a DEALER (a REQ adds the empty frame itself) and gets
            ``["", topic, seq, batch]`` per buffered batch, then ``["", "", seq -1, ""]``.
    Batch:  the array ``[timestamp, events, data_parallel_rank]``.
    """

    def __init__(self, context: zmq.asyncio.Context, facts: KvEventsFacts, rank: int) -> None:
        self.facts = facts.for_rank(rank)
        self.rank = rank
        self.topic = self.facts.topic.encode()
        self.next_seq = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self.facts.buffer_steps)
        self.drop_next = 0  # batches to keep off the PUB socket (they stay replayable)
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(self.facts.hwm)
        try:
            self._open(context)
        except zmq.ZMQError:  # most often: address already in use
            self.close()
            raise

    def _open(self, context: zmq.asyncio.Context) -> None:
        endpoint, replay = self.facts.endpoint, self.facts.replay_endpoint
        if self.facts.binds(endpoint):
            self._pub.bind(self.facts.bind_address(endpoint))
        else:
            self._pub.connect(endpoint)
        if replay:
            self._router = context.socket(zmq.ROUTER)
            self._router.set(zmq.SNDHWM, 2 * (self.facts.buffer_steps + 1))
            self._router.bind(self.facts.bind_address(replay))
            self._replaying = asyncio.create_task(self._serve_replay(self._router))

    async def publish(self, events: Sequence[Any]) -> int:
        """Publish one batch and return its sequence number."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        payload = pack([time.time(), events, self.rank])
        self.buffer.append((seq, payload))
        if self.drop_next > 0:
            self.drop_next -= 1
        else:
            await self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])
        return seq

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                log.warning("rank %d: bad replay request of %d frames", self.rank, len(frames))
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for seq, payload in list(self.buffer):
                if seq >= first:
                    await router.send_multipart([client, b"", self.topic, seq.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Close both sockets at once, unsent messages included."""
        if self._replaying:
            self._replaying.cancel()
        self._pub.close(linger=0)
        if self._router:
            self._router.close(linger=0)


class BlockCache:
    """A minimal prefix cache: which full blocks are held, evicting the oldest.

    It returns the events a real block pool would publish.  Hashes are unsigned 64-bit integers (vLLM's default).
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @staticmethod
    def _hash(parent: int | None, tokens: list[int]) -> int:
        digest = hashlib.blake2b(repr((parent, tokens)).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big")

    def store(self, tokens: list[int], lora: tuple[int, str] | None = None) -> tuple[list[KvEvent], int]:
        """Cache all full blocks of ``tokens``: (events, tokens found cached)."""
        events: list[KvEvent] = []
        parent: int | None = None
        first_parent: int | None = None
        new_hashes: list[int] = []
        new_tokens: list[int] = []
        cached = 0
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            chunk = tokens[start : start + self.block_size]
            block = self._hash(parent, chunk)
            if block in self._blocks:
                self._blocks.move_to_end(block)
                if not new_hashes:
                    cached += self.block_size
            else:
                if not new_hashes:
                    first_parent = parent
                new_hashes.append(block)
                new_tokens += chunk
                self._blocks[block] = None
            parent = block
        if new_hashes:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": new_hashes,
                    "parent_block_hash": first_parent,
                    "token_ids": new_tokens,
                    "block_size": self.block_size,
                    "lora_id": lora[0] if lora else None,
                    "medium": "GPU",
                    "lora_name": lora[1] if lora else None,
                    "group_idx": 0,
                }
            )
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self.capacity)]
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0})
        return events, cached

    def clear(self) -> list[KvEvent]:
        """Forget every block."""
        self._blocks.clear()
        return [{"type": "AllBlocksCleared"}]
