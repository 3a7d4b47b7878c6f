"""Who holds the start of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kv.told import W0, W1, Feed, copies, removed, runs, stored
from vllm_cp.errors import ConfigError
from vllm_cp.kv import (
    Batch,
    Cleared,
    Gap,
    GapReason,
    OnLoss,
    PrefixIndex,
    Reset,
    ResetReason,
    Run,
    SourceId,
    Unknown,
)


def test_b06_the_same_block_stored_and_removed_twice() -> None:
    """Counted: two copies, two removals; CPU and GPU apart; reset by a clear; never below zero."""
    feed = Feed()
    seen = []
    for event in (stored(1, tokens=[1, 2]), stored(1, tokens=[1, 2]), removed(1), removed(1), removed(9)):
        index = feed(event)
        seen.append((len(index), copies(index, 1, "GPU")))
    assert seen == [(1, 1), (1, 2), (1, 1), (0, 0), (0, 0)]
    feed(stored(2, tokens=[1, 2], medium="CPU"))
    index = feed(stored(2, tokens=[1, 2]))
    assert (copies(index, 2, "CPU"), copies(index, 2, "GPU")) == (1, 1)
    index = feed(removed(2))
    assert (copies(index, 2, "CPU"), copies(index, 2, "GPU")) == (1, 0)
    assert len(feed(Cleared())) == 0
    index = feed(removed(2, medium="CPU"))
    assert len(index) == 0
    assert index.unknown_removals == 2


def test_the_leading_blocks_count() -> None:
    """As far as the prompt is held without a hole; a block beyond a hole does not help."""
    feed = Feed()
    index = feed(stored(1, 2, 3, tokens=[1, 2, 3, 4, 5, 6]))
    [match] = index.match([1, 2, 3, 4, 5, 6, 7, 8])
    assert (match.worker, match.rank, match.blocks, match.tokens) == ("w0", 0, 3, 6)
    assert runs(index, [1, 2, 3, 4, 9, 9]) == {"w0": 4}
    assert runs(index, [1, 2, 3]) == {"w0": 2}, "only full blocks"
    assert runs(index, [9, 2, 3, 4]) == {}
    assert runs(index, [3, 4]) == {}, "the same tokens elsewhere in a prompt are another block"
    assert index.match([]) == ()
    index = feed(removed(2))
    assert runs(index, [1, 2, 3, 4, 5, 6]) == {"w0": 2}
    index = feed(stored(2, tokens=[3, 4], parent_block_hash=1))
    assert runs(index, [1, 2, 3, 4, 5, 6]) == {"w0": 6}, "its child was there all the time"


def test_workers_are_ranked_whatever_their_hashes_and_block_sizes() -> None:
    """One engine calls a block 1 and another b"x"; one has blocks of 2 tokens and another of 4: tokens decide."""
    feed = Feed()
    feed(stored(1, 2, tokens=[1, 2, 3, 4]))
    feed(stored(b"x" * 32, b"y" * 32, tokens=range(1, 9), size=4), source=W1)
    index = feed(stored(7, tokens=[1, 2]), source=SourceId(worker="w2", rank=None), stamp=3)
    found = index.match(range(1, 10))
    assert [(match.worker, match.rank, match.blocks, match.tokens) for match in found] == [
        ("w1", 0, 2, 8),
        ("w0", 0, 2, 4),
        ("w2", 3, 1, 2),
    ]
    assert runs(index, range(1, 10), workers=["w0", "gone"]) == {"w0": 4}


def test_media_are_told_apart_and_together() -> None:
    """Two blocks on the GPU, all four on the CPU: that is four to be had, two of them at once."""
    feed = Feed()
    feed(stored(1, 2, 3, 4, tokens=range(8), medium="CPU", ownership="tier-1"))
    index = feed(stored(1, 2, tokens=range(4)), stored(4, tokens=[6, 7], parent_block_hash=3))
    [match] = index.match(range(8))
    assert match.tokens == 8
    assert match.by_medium == {"GPU": Run(2, 4), "CPU": Run(4, 8)}
    index = feed(removed(2, medium="CPU", ownership="tier-1"))
    [match] = index.match(range(8))
    assert (match.tokens, match.by_medium) == (8, {"GPU": Run(2, 4), "CPU": Run(1, 2)})
    [view] = index.views()
    assert view.blocks == {("GPU", None): 3, ("CPU", "tier-1"): 3}


def test_an_absent_medium_stays_absent() -> None:
    """An old vLLM names no medium, and none is made up."""
    index = Feed()(stored(1, tokens=[1, 2], medium=None))
    [match] = index.match([1, 2])
    assert match.by_medium == {None: Run(1, 2)}


def test_adapters_and_salts_are_other_prompts() -> None:
    """The same tokens under an adapter, or with a salt, are other blocks; the engine's extra keys may name both."""
    feed = Feed()
    feed(stored(1, 2, tokens=[1, 2, 3, 4], lora_name="sql", lora_id=1, extra_keys=(("sql",), ("sql",))))
    feed(stored(3, 4, tokens=[1, 2, 3, 4], extra_keys=(("pepper",), None)), source=W1)
    index = feed(
        stored(5, 6, tokens=[1, 2, 3, 4], lora_name="sql", extra_keys=(("sql", "pepper"), ("sql",))),
        source=SourceId(worker="w2", rank=0),
    )
    assert runs(index, [1, 2, 3, 4]) == {}
    assert runs(index, [1, 2, 3, 4], lora="sql") == {"w0": 4}
    assert runs(index, [1, 2, 3, 4], salt="pepper") == {"w1": 4}
    assert runs(index, [1, 2, 3, 4], lora="sql", salt="pepper") == {"w2": 4}
    assert runs(index, [1, 2, 3, 4], lora="other") == {}


def test_multi_modal_content_is_part_of_a_block() -> None:
    """The same placeholder tokens over another image are another block."""
    index = Feed()(stored(1, 2, 3, tokens=[7, 7, 7, 7, 8, 8], extra_keys=((["img-1", 0],), (["img-1", 0],), None)))

    def image(name: str) -> Any:
        return lambda first, last: [(name, 0)] if first < 4 else None

    assert runs(index, [7, 7, 7, 7, 8, 8], extra_keys=image("img-1")) == {"w0": 6}
    assert runs(index, [7, 7, 7, 7, 8, 8], extra_keys=image("img-2")) == {}
    assert runs(index, [7, 7, 7, 7, 8, 8]) == {}


def test_every_group_that_keeps_whole_prompts_has_to_hold_it() -> None:
    """A hybrid model: what counts is the shortest of its full-attention groups; a sliding window holds nothing back."""
    feed = Feed()
    full = {"kv_cache_spec_kind": "full_attention"}
    sliding = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    feed(stored(1, 2, 3, 4, tokens=range(8), group_idx=0, **full))
    index = feed(stored(4, tokens=[6, 7], group_idx=2, parent_block_hash=3, **sliding))
    assert runs(index, range(8)) == {"w0": 8}
    index = feed(stored(1, tokens=range(4), size=4, group_idx=1, **full))
    assert runs(index, range(8)) == {"w0": 4}
    index = feed(removed(1, group_idx=0))
    assert runs(index, range(8)) == {}


def test_offload_tiers_name_blocks_by_hash_alone() -> None:
    """No tokens and a block size of 0: what the block is, is known from the GPU copy, also after that is gone."""
    feed = Feed()
    feed(stored(1, 2, tokens=range(4), group_idx=0))
    feed(stored(1, 2, 99, size=0, medium="CPU"))
    index = feed(removed(1, 2, group_idx=0))
    [match] = index.match(range(4))
    assert (match.tokens, match.by_medium) == (4, {"CPU": Run(2, 4)})
    assert index.views()[0].unlinked_blocks == 1
    index = feed(removed(1, 2, 99, medium="CPU"))
    assert len(index) == 0
    assert index.views()[0].unlinked_blocks == 0


def test_removals_that_leave_out_the_medium_mean_the_only_one() -> None:
    """Held in one place, that is where it goes from; held in two, nothing is guessed."""
    feed = Feed()
    feed(stored(1, tokens=[1, 2]), stored(2, tokens=[3, 4]), stored(2, tokens=[3, 4], medium="CPU"))
    index = feed(removed(1, medium=None), removed(2, medium=None))
    assert {block for _, _, block, _ in index.held("w0", 0)} == {2}
    assert index.unknown_removals == 1


def test_blocks_whose_parent_was_never_seen_are_counted_and_not_matched() -> None:
    """After a late start most blocks hang in the air: they are resident, and nobody knows of which prompt."""
    index = Feed()(stored(5, 6, tokens=[1, 2, 3, 4], parent_block_hash=4))
    assert runs(index, [1, 2, 3, 4]) == {}
    [view] = index.views()
    assert (view.blocks, view.unlinked_blocks) == ({("GPU", None): 2}, 2)
    assert len(index) == 2


def test_two_hashes_of_one_content_are_both_counted() -> None:
    """An engine that hides why two blocks differ: the content is held until the last of them goes."""
    feed = Feed()
    feed(stored(1, tokens=[1, 2]), stored(2, tokens=[1, 2]), stored(3, tokens=[1, 2]))
    feed(removed(1), removed(3))
    assert runs(feed.index, [1, 2]) == {"w0": 2}
    feed(removed(2))
    assert runs(feed.index, [1, 2]) == {}


def test_a_view_is_complete_from_zero_from_a_clear_or_from_a_restart() -> None:
    """It says since when, and what is missing."""
    feed = Feed()
    feed(stored(1, tokens=[1, 2]))
    [view] = feed.index.views()
    assert (view.complete, view.since_seq, view.since_ts, view.lost_batches) == (True, 0, 0.0, 0)
    feed.index.apply(Gap(source=W0, first=1, last=4, reason=GapReason.EVICTED))
    [view] = feed.index.views()
    assert (view.complete, view.lost_batches, view.since_seq) == (False, 4, 0)
    assert [match.complete for match in feed.index.match([1, 2])] == [False]
    feed(Cleared(), stored(2, tokens=[1, 2]))
    [view] = feed.index.views()
    assert (view.complete, view.lost_batches, view.since_seq) == (True, 0, 1)
    feed.index.apply(Reset(source=W0, reason=ResetReason.LATE_START, begins_at=42))
    assert len(feed.index) == 0
    feed.index.apply(Batch(source=W0, seq=42, ts=1.0, events=()))
    [view] = feed.index.views()
    assert (view.complete, view.since_seq) == (False, 42)
    feed.index.apply(Reset(source=W0, reason=ResetReason.RESTARTED))
    feed.index.apply(Batch(source=W0, seq=0, ts=1.0, events=()))
    [view] = feed.index.views()
    assert (view.complete, view.since_seq) == (True, 0)


def test_a_known_event_that_cannot_be_read_is_a_hole_too() -> None:
    """An unknown kind is not: nobody knows whether it concerns us."""
    feed = Feed()
    feed(Unknown(kind="BlockMoved", raw={}))
    assert feed.index.views()[0].complete
    feed(Unknown(kind="BlockStored", raw={}, malformed="block_hashes is missing"))
    [view] = feed.index.views()
    assert (view.complete, view.unreadable_events) == (False, 1)


def test_losses_can_empty_a_rank() -> None:
    """Who prefers too little to too much drops what a loss makes doubtful."""
    feed = Feed(on_loss=OnLoss.DROP)
    feed(stored(1, tokens=[1, 2]))
    feed(stored(1, tokens=[1, 2]), source=W1)
    feed.index.apply(Gap(source=W0, first=1, last=1, reason=GapReason.NO_REPLAY))
    assert runs(feed.index, [1, 2]) == {"w1": 2}


def test_a_departed_worker_leaves_nothing() -> None:
    """Its blocks go, its place is free for another, and nobody else is concerned."""
    feed = Feed()
    for number in range(200):
        source = SourceId(worker=f"pod-{number}", rank=0)
        feed(stored(1, tokens=[1, 2], size=2), source=source)
        if number % 2:
            feed.index.forget(source.worker)
        else:
            feed.index.apply(Reset(source=source, reason=ResetReason.DEPARTED))
    assert len(feed.index) == 0
    assert feed.index.views() == ()
    assert len(feed.index._groups) == 1
    assert feed.index._sizes == {}


def test_a_restart_empties_one_rank_of_a_worker() -> None:
    """Each rank has a publisher of its own; one that restarts says nothing about the other."""
    feed = Feed()
    other = SourceId(worker="w0", rank=1)
    feed(stored(1, tokens=[1, 2]))
    feed(stored(1, tokens=[1, 2]), source=other)
    feed.index.apply(Reset(source=W0, reason=ResetReason.RESTARTED))
    assert [(match.worker, match.rank) for match in feed.index.match([1, 2])] == [("w0", 1)]


def test_a_full_index_keeps_unbroken_starts() -> None:
    """When there is no more room the newest of the fullest go; what stays still matches from the first block on."""
    feed = Feed(max_blocks=10)
    feed(stored(*range(100, 104), tokens=range(8)), source=W1)
    index = feed(stored(*range(20), tokens=range(40)))
    assert len(index) == 10
    assert runs(index, range(40)) == {"w0": 12, "w1": 8}
    views = {view.worker: view for view in index.views()}
    assert (views["w0"].complete, views["w0"].evicted_blocks) == (False, 14)
    assert views["w1"].complete
    with pytest.raises(ConfigError, match="max_blocks"):
        PrefixIndex(max_blocks=0)
