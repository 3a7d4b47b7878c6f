"""A publisher, a network and a replay socket as plain data, to drive a Sequencer through any weather."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_cp.kv import Gap, Reset, ResetReason, Settings, SourceId
from vllm_cp.kv._sequence import Arrived, Out, Sequencer

SOURCE = SourceId(worker="w", rank=0, address="tcp://sim")


@dataclass
class World:
    """Batches are ``b"life:seq"``, so that one of another process is never mistaken for the right one."""

    settings: Settings = field(default_factory=Settings)
    replay: bool = True
    buffer: int = 10_000

    def __post_init__(self) -> None:
        self.order = Sequencer(SOURCE, self.settings, has_replay=self.replay)
        self.out: list[Out] = []
        self.requests: list[int] = []
        self.now = 0.0
        self.life = 0
        self.next = 0
        self.history: deque[int] = deque(maxlen=self.buffer)
        self._answering = 0
        self.order.connected(self.now)

    def batch(self, seq: int, life: int | None = None) -> bytes:
        """The payload of a number in this life."""
        return f"{self.life if life is None else life}:{seq}".encode()

    def publish(self, count: int = 1, *, heard: bool = True) -> None:
        """Publish the next batches."""
        for _ in range(count):
            seq, self.next = self.next, self.next + 1
            self.history.append(seq)
            if heard:
                self.out += self.order.live(seq, self.batch(seq), self.now)

    def miss(self, count: int = 1) -> None:
        """Publish batches that get lost on the way."""
        self.publish(count, heard=False)

    def hear(self, seq: int) -> None:
        """A live message, whatever the history."""
        self.out += self.order.live(seq, self.batch(seq), self.now)

    def restart(self, *, reconnect: bool = True) -> None:
        """A new process."""
        if reconnect:
            self.order.disconnected()
        self.life += 1
        self.next = 0
        self.history.clear()
        if reconnect:
            self.order.connected(self.now)

    def reconnect(self) -> None:
        """The connection breaks and comes back."""
        self.order.disconnected()
        self.order.connected(self.now)

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.order.tick(self.now)

    def begin_replay(self) -> list[int] | None:
        """Send the request, if one is due; what the answer will hold."""
        start = self.order.wanted(self.now)
        if start is None:
            return None
        self.order.replay_begins()
        self.requests.append(start)
        self._answering = self.life
        return [seq for seq in self.history if seq >= start]

    def answer(self, seqs: list[int], *, complete: bool = True) -> str:
        """The answer comes in, of the process that was asked."""
        for seq in seqs:
            self.out += self.order.replayed(seq, self.batch(seq, self._answering), self.now)
        result, out = self.order.replay_ended(self.now, complete=complete)
        self.out += out
        return result

    def ask(self) -> str | None:
        """A whole replay, when one is due."""
        held = self.begin_replay()
        return None if held is None else self.answer(held)

    def settle(self) -> None:
        """Replays until nothing is wanted."""
        for _ in range(100):
            self.wait(10.0)
            if self.ask() is None:
                return
        raise AssertionError("replays without end")

    def words(self) -> str:
        """What came out: ``0 1 lost:2-6 7``; batches of a later life are marked by a reset before them."""
        said = []
        for item in self.out:
            if isinstance(item, Arrived):
                said.append(str(item.seq))
            elif isinstance(item, Gap):
                said.append(f"lost:{item.first}-{item.last}")
            else:
                said.append("restart" if item.reason is ResetReason.RESTARTED else f"late:{item.begins_at}")
        return " ".join(said)

    def check(self, *, provable: bool) -> None:
        """Each life in order, each number once or stated as lost; never a batch of another life, where it is
        ``provable`` which one is which (the replay still has our last batch)."""
        life, expected = None, None
        for item in self.out:
            if isinstance(item, Arrived):
                its_life, seq = map(int, item.payload.split(b":"))
                assert seq == item.seq
                assert not provable or life in (None, its_life), "a batch of another process without a reset"
                assert seq == (expected if expected is not None else 0), self.words()
                life, expected = its_life, seq + 1
            elif isinstance(item, Gap):
                assert item.first == expected, self.words()
                expected = item.last + 1
            else:
                assert isinstance(item, Reset)
                life, expected = None, item.begins_at
