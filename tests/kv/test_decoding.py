"""Bytes to events: what a real vLLM sent, what older ones sent, and what nobody should send."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest

from tests.kv.captures import frames, payloads
from vllm_cp.kv import Cleared, Decoded, DecodeFailure, DecodeReason, Event, Removed, Stored, Unknown, decode
from vllm_cp.kv._frames import END_OF_REPLAY, live_parts, replay_parts
from vllm_cp.kv.decoding import unfit

pack = msgspec.msgpack.encode


def decoded(batch: Any) -> Decoded:
    """The batch, which has to be readable."""
    found = decode(pack(batch))
    assert isinstance(found, Decoded), found
    return found


def one(event: Any) -> Event:
    """The single event of a batch."""
    [found] = decoded([1.0, [event], 0]).events
    return found


def failure(payload: bytes) -> DecodeReason:
    """Why it cannot be read; the cheap look says the same."""
    found, looked = decode(payload), unfit(payload)
    assert isinstance(found, DecodeFailure)
    assert looked is not None
    assert looked.reason is found.reason
    return found.reason


def test_batches_of_a_real_vllm_are_read() -> None:
    """Every recorded batch takes the fast path, and what it says is all there."""
    batches = [decode(payload) for payload in payloads("live_rank0")]
    assert all(isinstance(batch, Decoded) and batch.current for batch in batches)
    first, _, salted, *_ = [batch for batch in batches if isinstance(batch, Decoded)]
    assert first.ts == pytest.approx(1796065885.619, abs=0.001)
    assert first.data_parallel_rank == 0
    [event] = first.events
    assert isinstance(event, Stored)
    assert event.block_hashes == (7426493657458383946, 8726981816631797660, 15506838154714034807)
    assert (event.parent_block_hash, event.block_size, len(event.token_ids)) == (None, 32, 96)
    assert (event.medium, event.group_idx, event.kv_cache_spec_kind) == ("GPU", 0, "full_attention")
    assert event.extra_keys == (None, None, None)
    assert (event.lora_name, event.session_id, event.ownership, event.extra) == (None, None, None, None)
    [event] = salted.events
    assert isinstance(event, Stored)
    assert event.session_id == "sess-1"
    assert event.extra_keys == (("pepper",), None, None)


def test_hashes_of_a_real_vllm_may_be_bytes() -> None:
    """An engine with SHA-256 hashes sends 32 bytes, and they stay bytes."""
    [batch] = [decode(payload) for payload in payloads("replay_bytes_hash")]
    assert isinstance(batch, Decoded)
    [event] = batch.events
    assert isinstance(event, Stored)
    assert [len(block) for block in event.block_hashes if isinstance(block, bytes)] == [32, 32]


def test_evictions_and_clears_of_a_real_vllm_are_read() -> None:
    """Removals come one by one before the store that needed the room; a clear has no fields."""
    batches = [decode(payload) for payload in payloads("live_rank0")]
    evicting, clearing = batches[6], batches[8]
    assert isinstance(evicting, Decoded)
    assert isinstance(clearing, Decoded)
    assert isinstance(evicting.events[-1], Stored)
    assert all(isinstance(event, Removed) and len(event.block_hashes) == 1 for event in evicting.events[:-1])
    assert isinstance(clearing.events[0], Cleared)


def test_the_frames_of_a_real_vllm_are_understood() -> None:
    """Live messages have three frames; replays four, and end with the number -1."""
    assert [parts[0] for parts in map(live_parts, frames("live_rank0")) if isinstance(parts, tuple)] == list(range(10))
    replay = [replay_parts(message) for message in frames("replay_rank1")]
    assert [parts[0] for parts in replay if isinstance(parts, tuple)] == [0, 1, END_OF_REPLAY]


def test_b02_hashes_and_optional_fields_drift() -> None:
    """Hashes of any kind stay apart, absent stays absent, and an unknown key is kept."""
    big, negative, digest = 2**63 + 5, -7, bytes(range(32))
    event = {
        "type": "BlockStored",
        "block_hashes": [big, negative, digest],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "lora_name": "sql",
        "group_idx": 1,
        "colour": "blue",
    }
    found = one(event)
    assert isinstance(found, Stored)
    assert found.block_hashes == (big, negative, digest)
    assert len({*found.block_hashes, big - 2**64, negative + 2**64}) == 5
    assert (found.token_ids, found.block_size, found.parent_block_hash) == ((), 0, None)
    assert (found.lora_id, found.lora_name, found.group_idx) == (None, "sql", 1)
    assert found.medium is None
    assert found.extra == {"colour": "blue"}
    for medium in ("GPU", "CPU"):
        stored = one({**event, "medium": medium})
        assert isinstance(stored, Stored)
        assert stored.medium == medium


STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": 9,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": 3,
    "medium": "CPU",
    "lora_name": "sql",
    "extra_keys": [["sql"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "local",
    "ownership": "tier-1",
    "session_id": "s",
    "lookahead_token_ids": [5],
}
REMOVED = {
    "type": "BlockRemoved",
    "block_hashes": [b"\1" * 32, -1],
    "medium": "CPU",
    "group_idx": 1,
    "locality": "local",
    "ownership": "tier-1",
}


@pytest.mark.parametrize("event", [STORED, REMOVED, {"type": "AllBlocksCleared"}], ids=lambda event: event["type"])
def test_every_layout_says_the_same(event: dict[str, Any]) -> None:
    """Maps, arrays in field order, maps with integer keys, batches as maps: one event comes out of all of them."""
    now = decoded([1.5, [event], 3])
    assert now.current
    layouts: list[Any] = [
        [1.5, [list(event.values())], 3],
        [1.5, [dict(enumerate(event.values()))], 3],
        {"ts": 1.5, "events": [event], "data_parallel_rank": 3},
        {"data_parallel_rank": 3, "events": [list(event.values())], "ts": 1.5},
        {0: 1.5, 1: [event], 2: 3},
    ]
    for layout in layouts:
        found = decoded(layout)
        assert (found.ts, found.events, found.data_parallel_rank) == (now.ts, now.events, now.data_parallel_rank)


def test_short_arrays_leave_the_rest_absent() -> None:
    """An old vLLM that knows six fields sends six; there is no medium to invent."""
    found = one(["BlockStored", [1], None, [1, 2], 2, None])
    assert found == Stored(block_hashes=(1,), token_ids=(1, 2), block_size=2)
    assert decoded([2, [["AllBlocksCleared"]]]).data_parallel_rank is None


def test_what_is_longer_than_known_is_kept_by_position() -> None:
    """Fields after the last one known are kept under their position, in events and in batches."""
    assert one(["BlockRemoved", [1], "GPU", 0, None, None, "new"]) == Removed(
        block_hashes=(1,), medium="GPU", group_idx=0, extra={6: "new"}
    )
    assert decoded([1.0, [], 0, "new"]).extra == {3: "new"}
    assert decoded({"events": [], "host": "a"}).extra == {"host": "a"}


def test_optional_fields_of_an_odd_type_are_set_aside() -> None:
    """Only what an event must have is required: a medium that is a number is kept as received, and no medium."""
    found = one({**STORED, "medium": 5, "group_idx": True, "token_ids": ["a"], "extra_keys": [1]})
    assert isinstance(found, Stored)
    assert (found.medium, found.group_idx, found.token_ids, found.extra_keys) == (None, None, (), None)
    assert found.extra == {"medium": 5, "group_idx": True, "token_ids": ["a"], "extra_keys": [1]}
    assert decoded(["noon", [], "first"]) == Decoded(None, (), None, {"ts": "noon", "data_parallel_rank": "first"})


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        ["BlockMoved", [1]],
        {"kind": "BlockStored"},
        [],
        [[1]],
        "Heartbeat",
        None,
        7,
        {1: 2},
    ],
    ids=repr,
)
def test_unknown_kinds_are_kept_whole(event: Any) -> None:
    """An event of a kind that is not known comes out as it came in, and its neighbours come out too."""
    before, found, after = decoded([1.0, [STORED, event, REMOVED], 0]).events
    assert isinstance(before, Stored)
    assert isinstance(after, Removed)
    assert isinstance(found, Unknown)
    assert (found.raw, found.malformed) == (event, "")


@pytest.mark.parametrize("hashes", [None, 5, "abc", [1, None], [1.5], [True], ["abc"], {}], ids=repr)
def test_a_known_kind_needs_its_hashes(hashes: Any) -> None:
    """Without hashes that are hashes an event says nothing; it is marked as malformed and kept."""
    found = one({"type": "BlockStored", "block_hashes": hashes})
    assert isinstance(found, Unknown)
    assert (found.kind, bool(found.malformed)) == ("BlockStored", True)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", DecodeReason.MSGPACK),
        (b"\xc1", DecodeReason.MSGPACK),
        (b"\x01\x02", DecodeReason.MSGPACK),
        (b"\xdd\xff\xff\xff\xff", DecodeReason.MSGPACK),
        (b"\x92\x01" + b"\x91" * 100_000, DecodeReason.MSGPACK),
        (pack("just a string"), DecodeReason.BATCH),
        (pack(None), DecodeReason.BATCH),
        (pack(7), DecodeReason.BATCH),
        (pack({1: 2, 3: 4}), DecodeReason.BATCH),
        (pack([]), DecodeReason.BATCH),
        (pack([1.0]), DecodeReason.BATCH),
        (pack([1.0, "events", 0]), DecodeReason.BATCH),
        (pack({"ts": 1.0}), DecodeReason.BATCH),
    ],
    ids=lambda value: value.hex()[:16] if isinstance(value, bytes) else value.value,
)
def test_what_is_no_batch_has_a_reason(payload: bytes, reason: DecodeReason) -> None:
    """A payload that cannot be read is a reason of a closed set, never an exception."""
    assert failure(payload) is reason


def test_a_text_that_is_no_text_is_seen_when_decoding() -> None:
    """The cheap look does not check texts; decoding does, and says why."""
    payload = pack([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}], 0])
    payload = payload.replace(b"GPU", b"\xff\xfe\xfd")
    assert unfit(payload) is None
    found = decode(payload)
    assert isinstance(found, DecodeFailure)
    assert found.reason is DecodeReason.MSGPACK


def test_timestamps_of_another_kind_are_set_aside() -> None:
    """A msgpack timestamp is no number of seconds; the batch is read all the same."""
    when = datetime.datetime.fromtimestamp(1, datetime.timezone.utc)
    assert decoded([when, [], 0]) == Decoded(None, (), 0, {"ts": when})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([b"x"], DecodeReason.FRAMES),
        ([bytes(8), b"x"], DecodeReason.FRAMES),
        ([b"", bytes(8), b"x", b"y"], DecodeReason.FRAMES),
        ([b"", bytes(7), b"x"], DecodeReason.SEQUENCE),
        ([b"", b"\x7f" + bytes(7), b"x"], DecodeReason.SEQUENCE),
        ([b"", b"\xff" * 8, b""], DecodeReason.RESERVED),
    ],
    ids=repr,
)
def test_frames_that_are_no_live_message_have_a_reason(message: list[bytes], reason: DecodeReason) -> None:
    """Too few or too many frames, numbers of the wrong length or out of reach, and the end marker of a replay."""
    found = live_parts(message)
    assert isinstance(found, DecodeFailure)
    assert found.reason is reason


def test_replies_of_older_servers_have_no_topic() -> None:
    """With a topic frame or without one, a reply is its last two frames."""
    number = (5).to_bytes(8, "big")
    assert replay_parts([b"", b"topic", number, b"x"]) == replay_parts([b"", number, b"x"]) == (5, b"x")
    assert isinstance(replay_parts([b"x"]), DecodeFailure)
