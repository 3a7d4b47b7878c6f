"""The index against recorded events, against plain dictionaries, and against what a publisher may invent."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.kv.captures import payloads
from tests.kv.told import W0, Feed, removed, runs, stored
from vllm_cp.kv import Batch, Cleared, Decoded, Match, PrefixIndex, Reset, ResetReason, SourceId, Stored, decode


def test_what_a_publisher_invents_is_bounded() -> None:
    """Thousands of media, groups, ranks and block sizes do not fill the memory."""
    feed = Feed(max_blocks=1000)
    everyone = SourceId(worker="w0", rank=None)
    for number in range(3000):
        feed(
            stored(number, tokens=[1] * (number + 1), size=number + 1, medium=f"m{number}", group_idx=number),
            source=everyone,
            stamp=number,
        )
        feed(stored(number, tokens=[1, 2], medium=f"m{number}", group_idx=number))
    index = feed.index
    assert len(index) <= 1000
    assert (len(index._owners), len(index._planes)) == (257, 65)
    index.match([1] * 100)


def test_a_real_vllm_s_events() -> None:
    """The recorded session, prompt by prompt: held, evicted, and after the last reset only one block."""
    index = PrefixIndex()
    batches = [batch for batch in map(decode, payloads("live_rank0")) if isinstance(batch, Decoded)]

    def apply(number: int) -> None:
        index.apply(Batch(source=W0, seq=number, ts=batches[number].ts, events=batches[number].events))

    [first] = batches[0].events
    assert isinstance(first, Stored)
    apply(0)
    apply(1)
    [more] = batches[1].events
    assert isinstance(more, Stored)
    [match] = index.match([*first.token_ids, *more.token_ids, 1])
    assert (match.blocks, match.tokens, match.by_medium["GPU"].tokens) == (4, 128, 128)
    apply(2)
    [salted] = batches[2].events
    assert isinstance(salted, Stored)
    assert runs(index, salted.token_ids, salt="pepper") == {"w0": 96}
    for number in range(3, 8):
        apply(number)
    assert runs(index, first.token_ids) == {}, "evicted by longer prompts"
    for number in range(8, 10):
        apply(number)
    assert len(index) == 1
    assert index.views()[0].complete


Step = tuple[str, int, int, int]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "store", "remove", "clear", "reset"]),
            st.integers(0, 2),
            st.integers(0, 5),
            st.integers(1, 4),
        ),
        max_size=40,
    ),
    seed=st.integers(0, 1000),
)
def test_it_agrees_with_a_naive_index(steps: list[Step], seed: int) -> None:
    """Whatever is stored, removed, cleared and reset, in whatever place: counts and leading blocks are those that
    plain dictionaries give."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(3) for _ in range(8)] for _ in range(6)]
    feed = Feed()
    truth: dict[tuple[str, str], Counter[tuple[int, ...]]] = {}
    names: dict[tuple[int, ...], int] = {}

    def name(prefix: tuple[int, ...]) -> int:
        return names.setdefault(prefix, len(names))

    for kind, worker, prompt, length in steps:
        source = SourceId(worker=f"w{worker}", rank=0)
        medium = chance.choice(["GPU", "CPU"])
        held = truth.setdefault((source.worker, medium), Counter())
        chain = [tuple(prompts[prompt][: 2 * (at + 1)]) for at in range(length)]
        if kind == "store":
            held.update(chain)
            feed(stored(*map(name, chain), tokens=chain[-1], medium=medium), source=source)
        elif kind == "remove":
            gone = [prefix for prefix in chain if held[prefix]]
            held.subtract(gone)
            feed(removed(*map(name, gone), medium=medium), source=source)
        else:
            for each in ("GPU", "CPU"):
                truth[source.worker, each] = Counter()
            if kind == "clear":
                feed(Cleared(), source=source)
            else:
                feed.index.apply(Reset(source=source, reason=ResetReason.RESTARTED))

    def run(prompt: list[int], *media: Counter[tuple[int, ...]]) -> int:
        lengths = range(2, 9, 2)
        return next((end - 2 for end in lengths if not any(held[tuple(prompt[:end])] for held in media)), 8)

    assert len(feed.index) == sum(count > 0 for held in truth.values() for count in held.values())
    for prompt in prompts:
        found = {match.worker: match for match in feed.index.match(prompt)}
        for worker in ("w0", "w1", "w2"):
            media = [truth.get((worker, medium), Counter()) for medium in ("GPU", "CPU")]
            match: Match | None = found.get(worker)
            assert (match.tokens if match else 0) == run(prompt, *media)
            for medium, held in zip(("GPU", "CPU"), media, strict=True):
                got = match.by_medium.get(medium) if match else None
                assert (got.tokens if got else 0) == run(prompt, held)
    for (worker, medium), held in truth.items():
        counts = {block: count for (at, _), _, block, count in feed.index.held(worker, 0) if at == medium}
        assert counts == {name(prefix): count for prefix, count in held.items() if count}


def test_decoding_and_the_index_need_no_sockets() -> None:
    """Events and index are pure: who only decodes or indexes loads neither ZeroMQ nor gRPC."""
    code = "import sys, vllm_cp.kv.index, vllm_cp.kv.decoding; print(sorted({'zmq', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
