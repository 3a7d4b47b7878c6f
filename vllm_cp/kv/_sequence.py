"""The order of one source: what to pass on, what to ask again, what is lost. Pure: no sockets, no clock of its own.

Live batches carry numbers without holes. A hole is asked for once over replay while later live batches queue behind
it, so everything comes out once and in order; what cannot be had is said where it is missing. Three things are kept
apart that look alike: a duplicate (live, and already had from a replay), a restart (the live numbers go backwards, or
after a new connection the publisher does not know our last batch), and a late start (a past that we never had).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from vllm_cp.kv.events import SourceId
from vllm_cp.kv.settings import Settings
from vllm_cp.kv.stream import Gap, GapReason, Reset, ResetReason

__all__ = ["Arrived", "Out", "Sequencer"]


class Arrived(NamedTuple):
    """A batch in its place, not decoded yet."""

    source: SourceId
    seq: int
    payload: bytes
    replayed: bool
    #: Unix seconds, our clock.
    at: float


Out: TypeAlias = Arrived | Gap | Reset


class Sequencer:
    """Feed it what happens to one source; each call returns what follows for the consumer, in order."""

    def __init__(self, source: SourceId, settings: Settings, *, has_replay: bool) -> None:
        self.source = source
        self.begins_at: int | None = None
        #: Number of the next batch to pass on; ``None`` before the view begins.
        self.next_seq: int | None = None
        self.batches = self.replayed_batches = self.gaps = self.restarts = 0
        self.lost = dict.fromkeys(GapReason, 0)
        self.replaying = False
        self._settings = settings
        self._has_replay = has_replay
        self._from = settings.from_seq
        self._backfill = settings.backfill and has_replay
        self._out: list[Out] = []
        # The live stream.
        self._last_live: int | None = None
        self._last_payload: bytes | None = None  # of the batch before next_seq, to know the publisher again
        self._bad_end: int | None = None  # unreadable live messages took the numbers from next_seq up to here
        self._pending: deque[tuple[int, bytes, float]] = deque()
        self._pending_bytes = 0
        # The connection.
        self._connected_at: float | None = None
        self._begun_here = False  # the view began in the present connection
        self._suspect = False  # connected anew since the last batch: maybe to another process
        self._suspect_anew = False  # that happened during a replay
        self._old_pending = 0  # of the pending ones, those from before
        self._looked_back = False
        # The replay that is wanted, or under way.
        self._want: int | None = None
        self._not_before = 0.0
        self._attempts = 0
        self._start = 0
        self._asked_up_to: int | None = None
        self._got = 0
        self._holed = self._void = self._verifying = False

    @property
    def pending(self) -> int:
        """Live batches that wait for a replay."""
        return len(self._pending)

    # -- the connection

    def connected(self, now: float) -> None:
        """The publisher, or its successor at the same address, can be heard."""
        self._connected_at = now
        self._begun_here = False
        self._suspect_anew = self.replaying
        if self.next_seq is None:
            # What waits may be of another process, and nothing could tell: if it is not, a replay has it too.
            self._pending.clear()
            self._pending_bytes = 0
            self._last_live = None
            self._looked_back = self._want is not None
            return
        self._suspect = True
        self._old_pending = len(self._pending)
        self._attempts = 0
        if self._has_replay and not self.replaying:
            self._want = self._next_request()

    def disconnected(self) -> None:
        """It cannot be heard any more."""
        self._connected_at = None

    def restarted(self) -> list[Out]:
        """The control plane says that the worker was replaced; the publisher we hear may be the new one already."""
        if self._connected_at is not None:
            if self._begun_here or self.next_seq is None:
                return []  # a restart breaks the connection, and this view began in the present one
            if self._has_replay:
                self._suspect = True
                if not self.replaying:
                    self._want = self._next_request()
                return []
        self._pending.clear()
        self._forget(keep_from=0)
        self._last_live = None
        self._look_back()
        return self._take()

    # -- the live stream

    def live(self, seq: int, payload: bytes, at: float) -> list[Out]:
        """A readable live batch."""
        if self._last_live is not None and seq <= self._last_live:
            if seq == self._last_live and payload == self._newest():
                return []
            self._pending.clear()
            self._forget(keep_from=0)
            if seq > 0:
                self._look_back()
        self._last_live = seq
        if self._behind():
            self._queue(seq, payload, at)
        elif self.next_seq is None:
            if self._backfill and seq > self._from:
                self._look_back()
                self._queue(seq, payload, at)
            else:
                self._begin(seq)
                self._deliver(seq, payload, at, replayed=False)
        elif seq >= self.next_seq:  # below it: a replay had it already
            self._after_gap(self.next_seq, seq, payload, at)
        return self._take()

    def unreadable(self, seq: int) -> None:
        """A live message with a good number whose payload is no batch. It moves nothing: its number may lie too."""
        if self.next_seq is None or self._behind():
            return
        if seq == (self.next_seq if self._bad_end is None else self._bad_end + 1):
            self._bad_end = seq

    def _after_gap(self, expected: int, seq: int, payload: bytes, at: float) -> None:
        if seq > expected:
            self.gaps += 1
            if self._bad_end == seq - 1:
                self._lose(expected, seq - 1, GapReason.UNREADABLE)
            elif not self._has_replay:
                self._lose(expected, seq - 1, GapReason.NO_REPLAY)
            else:
                self._want = self._next_request()
                self._queue(seq, payload, at)
                return
        self._suspect = False  # nothing can be asked, or the numbers go on
        self._deliver(seq, payload, at, replayed=False)

    # -- the replay

    def tick(self, now: float) -> None:
        """Time passes: a source that stays silent from the start is asked for its history."""
        if self._connected_at is None or self._looked_back or self.next_seq is not None or self._behind():
            return
        if self._backfill and now - self._connected_at >= self._settings.catch_up_after_s:
            self._look_back()

    def wanted(self, now: float) -> int | None:
        """From which number a replay is to be asked for, now; ``None`` when there is nothing to ask, or not yet."""
        if self._connected_at is None or self.replaying or now < self._not_before:
            return None
        return self._want

    def wake_at(self) -> float | None:
        """When ``tick`` or ``wanted`` may have something new; ``None`` when only an event can change that."""
        if self._connected_at is None or self.replaying:
            return None
        if self._want is not None:
            return self._not_before
        if self._backfill and self.next_seq is None and not self._looked_back:
            return self._connected_at + self._settings.catch_up_after_s
        return None

    def replay_begins(self) -> None:
        """The request for what is ``wanted`` goes out."""
        assert self._want is not None
        self._start, self._want = self._want, None
        self.replaying = True
        self._attempts += 1
        self._asked_up_to = self._last_live
        self._got = 0
        self._holed = self._void = False
        self._verifying = self._suspect and self.next_seq is not None and self._start == self.next_seq - 1

    def replayed(self, seq: int, payload: bytes | None, at: float) -> list[Out]:
        """One message of the replay; ``payload`` is ``None`` when it is no batch."""
        if self._void:
            return []
        if self._verifying and seq >= self._start:
            self._verifying = False
            if seq == self._start and self._last_payload is not None and payload != self._last_payload:
                self._void = True  # the number is known and the batch is another one: a new process
                self._forget(keep_from=self._old_pending)
                return self._take()
            self._suspect = False
        if self.next_seq is None:
            if seq < self._from:
                return []
            self._begin(seq)
        expected = self.next_seq
        assert expected is not None
        if seq < expected:
            return []
        if seq > expected and self._got:
            # A hole in the middle is the transport's fault, not eviction: what is there comes again.
            self._holed = self._holed or self._attempts < self._settings.replay_attempts
        if self._holed:
            return []
        if seq > expected:
            self._lose(expected, seq - 1, GapReason.REPLAY_FAILED if self._got else GapReason.EVICTED)
        self._got += 1
        if payload is None:
            self._lose(seq, seq, GapReason.UNREADABLE)
            self._last_payload = None
        else:
            self._deliver(seq, payload, at, replayed=True)
        return self._take()

    def replay_ended(self, now: float, *, complete: bool) -> tuple[str, list[Out]]:
        """The replay is over; ``complete`` when its end marker came. Returns ok, partial or failed; what follows."""
        self.replaying = False
        self._not_before = now + self._settings.replay_cool_down_s
        result = "ok" if complete and not self._holed else "partial" if self._got else "failed"
        if self._void:
            self._void = False
            if self.next_seq is None:
                self._look_back()
        elif self._suspect_anew:
            # The answer was of the old connection, what waits may be of the new one.
            self._suspect, self._verifying, self._attempts = True, False, 0
            self._want = self._next_request()
        elif self._verifying and complete:
            # Not even our last batch is there: a new process that has not come that far.
            self._verifying = False
            self._forget(keep_from=self._old_pending)
            self._look_back()
        elif result == "ok" or self._attempts >= self._settings.replay_attempts:
            self._attempts = 0
            if self._verifying:  # it cannot be found out
                self._verifying = self._suspect = False
            self._drain(GapReason.EVICTED if result == "ok" else GapReason.REPLAY_FAILED)
        else:
            self._want = self._next_request()
        self._suspect_anew = False
        if self._suspect and self._want is None and self.next_seq is not None:
            self._want = self._next_request()
        if self._want is None:
            self._drain(None)
        return result, self._take()

    def _drain(self, reason: GapReason | None) -> None:
        """Pass on what queued behind the replay. Holes it was asked for are lost, for ``reason``; others are wanted."""
        covered = self._asked_up_to if reason is not None else None
        while self._pending:
            seq, payload, at = self._pending[0]
            if self.next_seq is None:
                self._begin(seq)
            assert self.next_seq is not None
            if seq > self.next_seq:
                if covered is None or seq > covered or reason is None:
                    self.gaps += 1
                    self._want = self._next_request()
                    return
                self._lose(self.next_seq, seq - 1, reason)
            self._pending.popleft()
            self._pending_bytes -= len(payload)
            if seq >= self.next_seq:
                self._deliver(seq, payload, at, replayed=False)
        self._old_pending = 0
        if self.next_seq is not None and self._last_live is not None and self._last_live >= self.next_seq:
            # Live batches that found no room while the replay ran.
            if covered is not None and reason is not None and self._last_live <= covered:
                self._lose(self.next_seq, self._last_live, reason)
            else:
                self._want = self._next_request()

    # -- parts

    def _behind(self) -> bool:
        """Live batches have to wait."""
        return bool(self._pending) or self._want is not None or (self.replaying and not self._void)

    def _next_request(self) -> int:
        """Where a replay has to start: one batch early when the publisher has to prove that it is still the same."""
        if self.next_seq is None:
            return self._from
        return self.next_seq - 1 if self._suspect and self.next_seq > 0 else self.next_seq

    def _look_back(self) -> None:
        self._looked_back = True
        if self._backfill:
            self._want = self._from

    def _begin(self, seq: int) -> None:
        self.next_seq = self.begins_at = seq
        self._begun_here = True
        if seq > 0:
            self._out.append(Reset(source=self.source, reason=ResetReason.LATE_START, begins_at=seq))

    def _forget(self, *, keep_from: int) -> None:
        """A new publisher process: nothing of the old one counts, save the pending batches from ``keep_from`` on."""
        self.restarts += 1
        self._out.append(Reset(source=self.source, reason=ResetReason.RESTARTED))
        for _ in range(min(keep_from, len(self._pending))):
            self._pending.popleft()
        self._pending_bytes = sum(len(payload) for _, payload, _ in self._pending)
        self._old_pending = 0
        self._last_live = self._pending[-1][0] if self._pending else None
        self.next_seq = self.begins_at = self._last_payload = self._bad_end = self._want = None
        self._from = self._attempts = 0
        self._suspect = self._suspect_anew = self._looked_back = False
        self._void = self.replaying

    def _queue(self, seq: int, payload: bytes, at: float) -> None:
        size = self._pending_bytes + len(payload)
        if len(self._pending) < self._settings.max_pending and size <= self._settings.max_pending_bytes:
            self._pending.append((seq, payload, at))
            self._pending_bytes = size

    def _newest(self) -> bytes | None:
        """The payload of the last live batch, where it is still at hand."""
        if self._pending:
            return self._pending[-1][1] if self._pending[-1][0] == self._last_live else None
        return self._last_payload if self.next_seq is not None and self.next_seq - 1 == self._last_live else None

    def _deliver(self, seq: int, payload: bytes, at: float, *, replayed: bool) -> None:
        self.next_seq = seq + 1
        self._last_payload = payload
        self._bad_end = None
        self.batches += 1
        self.replayed_batches += replayed
        self._out.append(Arrived(self.source, seq, payload, replayed, at))

    def _lose(self, first: int, last: int, reason: GapReason) -> None:
        self.next_seq = last + 1
        self.lost[reason] += last - first + 1
        self._out.append(Gap(source=self.source, first=first, last=last, reason=reason))

    def _take(self) -> list[Out]:
        out, self._out = self._out, []
        return out
