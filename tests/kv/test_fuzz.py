"""Bytes that nobody meant to send: no crash, no exception, no growth."""

from __future__ import annotations

import random
import resource
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv.captures import payloads
from vllm_cp.kv import Batch, Decoded, DecodeFailure, PrefixIndex, Settings, SourceId, decode
from vllm_cp.kv._frames import live_parts, replay_parts
from vllm_cp.kv._sequence import Arrived, Sequencer
from vllm_cp.kv.decoding import unfit

SOURCE = SourceId(worker="w", rank=None, address="tcp://fuzz")

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "block_hashes", "events", "ts"])
    | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=14) | st.integers(-2, 20), inner),
    max_leaves=20,
)


def read(payload: bytes, index: PrefixIndex, seq: int) -> bool:
    """All the way into the index; whether it was a batch."""
    looked, found = unfit(payload), decode(payload)
    if looked is not None:
        assert isinstance(found, DecodeFailure)
    if isinstance(found, DecodeFailure):
        return False
    index.apply(
        Batch(source=SOURCE, seq=seq, ts=found.ts, events=found.events, data_parallel_rank=found.data_parallel_rank)
    )
    return True


@given(payload=st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_reason(payload: bytes) -> None:
    """Whatever the bytes, the answer is a value."""
    read(payload, PrefixIndex(), 0)


@given(value=values)
def test_any_msgpack_is_a_batch_or_a_reason(value: Any) -> None:
    """Well-formed nonsense is no different, whether it is the whole batch, an event, or a field of one."""
    index = PrefixIndex()
    stored = {"type": "BlockStored", "block_hashes": [1, value], "token_ids": [1, 2, 3, 4], "block_size": 2}
    for batch in (value, [1.0, value], [1.0, [value], 0], [value, [], value], [1.0, [stored], 0]):
        read(msgspec.msgpack.encode(batch), index, 0)
    for field in ("parent_block_hash", "token_ids", "block_size", "medium", "extra_keys", "lora_name", "group_idx"):
        for event in (
            {**stored, "block_hashes": [7], field: value},
            {"type": "BlockRemoved", "block_hashes": [7], field: value},
        ):
            assert isinstance(decode(msgspec.msgpack.encode([1.0, [event], 0])), Decoded)
            read(msgspec.msgpack.encode([1.0, [event], 0]), index, 1)
    index.match([1, 2, 3, 4], salt="pepper")
    assert all(view.unlinked_blocks >= 0 for view in index.views())


@given(message=st.lists(st.binary(max_size=9), max_size=5))
def test_any_frames_are_parts_or_a_reason(message: list[bytes]) -> None:
    """Frames too."""
    for found in (live_parts(message), replay_parts(message)):
        assert isinstance(found, tuple | DecodeFailure)


def mutated(chance: random.Random, sane: list[bytes]) -> bytes:
    """A real batch, damaged."""
    payload = bytearray(chance.choice(sane))
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(payload))
        kind = chance.randrange(4)
        if kind == 0:
            payload[at] = chance.randrange(256)
        elif kind == 1:
            del payload[at : at + chance.randrange(1, 9)]
        elif kind == 2:
            payload[at:at] = chance.randbytes(chance.randrange(1, 9))
        else:
            payload[at] ^= 1 << chance.randrange(8)
        if not payload:
            break
    return bytes(payload)


def fuzz(count: int) -> None:
    """Damaged frames through sequence, decoding and index. What one publisher sends must not fill the memory."""
    chance = random.Random(20)
    sane = [payload for name in ("live_rank0", "replay_rank1", "replay_bytes_hash") for payload in payloads(name)]
    sane = [payload for payload in sane if len(payload) < 500]
    order = Sequencer(SOURCE, Settings(max_pending=1000), has_replay=False)
    index = PrefixIndex(max_blocks=20_000)
    readable, begin = 0, 0
    for number in range(count):
        if number == count // 10:
            begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        payload = mutated(chance, sane)
        if unfit(payload) is not None:
            order.unreadable(number)
            continue
        for out in order.live(number, payload, 0.0):
            if isinstance(out, Arrived):
                readable += read(out.payload, index, out.seq)
            else:
                index.apply(out)
        index.match([1, 2, 3, 4], salt="pepper")
    assert readable > count // 10
    assert len(index) <= 20_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin
    assert grown < 50_000, f"{grown} kB more"


def test_fifty_thousand_damaged_batches() -> None:
    """Real batches with bytes changed, dropped and put in: none is fatal, and memory does not grow."""
    fuzz(50_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_damaged_batches() -> None:
    """The same for longer."""
    fuzz(1_000_000)
