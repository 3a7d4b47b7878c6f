"""One source on its sockets: receives, keeps order, counts. Lives in the listener's thread."""

from __future__ import annotations

import contextlib
import errno
import time
from types import MappingProxyType

import zmq

from vllm_cp.kv._frames import live_parts
from vllm_cp.kv._plan import Wanted
from vllm_cp.kv._queue import Entry
from vllm_cp.kv._sequence import Arrived, Out, Sequencer
from vllm_cp.kv._sockets import CONNECTED, FAILED, LOST, monitor_event, subscription
from vllm_cp.kv.decoding import DecodeFailure, unfit
from vllm_cp.kv.events import DecodeReason
from vllm_cp.kv.settings import Settings
from vllm_cp.kv.stream import SourceState, SourceStats, StateChange

__all__ = ["Feed"]

#: Messages read at one go, so that no source starves the others.
_AT_ONCE = 500
#: ZeroMQ lets go of an address in the background, within this many seconds.
_FREED_S = 0.5
_NOT_OURS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV)


class Feed:
    """A subscription to one publisher. ``now`` is monotonic seconds, ``wall`` Unix seconds."""

    def __init__(
        self, wanted: Wanted, settings: Settings, context: zmq.Context[zmq.Socket[bytes]], wall: float
    ) -> None:
        self.wanted = wanted
        self.source = wanted.source
        self.sequencer = Sequencer(wanted.source, settings, has_replay=wanted.replay is not None)
        self.failures = dict.fromkeys(DecodeReason, 0)
        self.replays = {"ok": 0, "partial": 0, "failed": 0}
        self.replay_seconds = 0.0
        self.connects = 0
        self.foreign = 0
        self.state = SourceState.CONNECTING
        self.detail = ""
        self.state_since = wall
        #: The connection broke, or the publisher is a new process, since this was last looked at.
        self.shaken = False
        self._last_batch_at: float | None = None
        self._peers = 0
        self._bound = False
        self.socket, self.monitor = subscription(context, wanted.topic, settings)

    def open(self, wall: float, *, freed: bool = False) -> list[Entry]:
        """Connect, or bind where the publisher connects. ``freed``: we had bound to the address a moment ago."""
        address = self.source.address
        try:
            if self.wanted.bind:
                self._bind(address, patience_s=_FREED_S if freed else 0.0)
            else:
                self.socket.connect(address)
        except zmq.ZMQError as error:
            return self._say(SourceState.UNSUPPORTED, f"{address}: {error.strerror}", wall)
        return [StateChange(source=self.source, state=self.state, detail=self.detail)]

    def _bind(self, address: str, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not self._bound:
            try:
                self.socket.bind(address)
                self._bound = True
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.005)
                    continue
                if error.errno not in _NOT_OURS:
                    raise
                # Not an address of ours, or somebody listens there: a forwarder, or a publisher that binds after all.
                self.socket.connect(address)
                self.detail = f"the address cannot be bound here ({error.strerror}), so it is connected to"
                return
        self.detail = "bound; waiting for the publisher to connect"

    def close(self) -> None:
        """Close the sockets; what they hold unread is gone."""
        if self._bound:
            # Let go of the address: closing does that later still, and a successor may need it.
            with contextlib.suppress(zmq.ZMQError):
                self.socket.unbind(self.source.address)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def read(self, wall: float) -> list[Entry]:
        """What came in, as far as it goes at one go."""
        entries: list[Out] = []
        for _ in range(_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            entries += self._message(frames, wall)
        return self.noted(entries, wall)

    def _message(self, frames: list[bytes], wall: float) -> list[Out]:
        if self.wanted.topic and frames[0] != self.wanted.topic:
            # Subscriptions match by prefix: "kv" hears "kv-2" too.
            self.foreign += 1
            return []
        parts = live_parts(frames)
        if isinstance(parts, DecodeFailure):
            self.failures[parts.reason] += 1
            return []
        seq, payload = parts
        failure = unfit(payload)
        if failure is not None:
            self.failures[failure.reason] += 1
            self.sequencer.unreadable(seq)
            return []
        restarts = self.sequencer.restarts
        out = self.sequencer.live(seq, payload, wall)
        self.shaken = self.shaken or self.sequencer.restarts > restarts
        return out

    def noted(self, out: list[Out], wall: float) -> list[Entry]:
        """The same, with the time of the last batch noted."""
        if any(isinstance(entry, Arrived) for entry in out):
            self._last_batch_at = wall
        return [*out]

    def watch(self, now: float, wall: float) -> list[Entry]:
        """What happened to the connection."""
        said: list[Entry] = []
        while (event := monitor_event(self.monitor)) is not None:
            if event == CONNECTED:
                self._peers += 1
                self.connects += 1
                self.sequencer.connected(now)
                said += self._say(SourceState.CONNECTED, "", wall)
            elif event == LOST:
                self._peers = max(0, self._peers - 1)
                if self.state is SourceState.CONNECTED and not (self._bound and self._peers):
                    self.sequencer.disconnected()
                    self.shaken = True
                    said += self._say(SourceState.CONNECTING, "the connection broke", wall)
            elif event & FAILED and self.state is SourceState.CONNECTING and not self._bound:
                said += self._say(
                    SourceState.UNREACHABLE, f"no ZeroMQ publisher answers at {self.source.address}", wall
                )
        return said

    def _say(self, state: SourceState, detail: str, wall: float) -> list[Entry]:
        self.state, self.detail, self.state_since = state, detail, wall
        return [StateChange(source=self.source, state=state, detail=detail)]

    def stats(self) -> SourceStats:
        """The numbers of this source, without what is counted while delivering."""
        order = self.sequencer
        return SourceStats(
            source=self.source,
            state=self.state,
            detail=self.detail,
            state_since=self.state_since,
            last_seq=None if order.next_seq is None or not order.batches else order.next_seq - 1,
            begins_at=order.begins_at,
            last_batch_at=self._last_batch_at,
            batches=order.batches,
            replayed=order.replayed_batches,
            gaps=order.gaps,
            lost=MappingProxyType(dict(order.lost)),
            replays=MappingProxyType(dict(self.replays)),
            replay_seconds=self.replay_seconds,
            replaying=order.replaying,
            pending=order.pending,
            restarts=order.restarts,
            connects=self.connects,
            failures=MappingProxyType(dict(self.failures)),
            unknown_events=0,
            unknown_keys=0,
            rank_disagreements=0,
            foreign=self.foreign,
        )
