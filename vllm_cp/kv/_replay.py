"""One replay request on its socket, from the request to the end marker, or to the end of patience."""

from __future__ import annotations

import contextlib

import zmq

from vllm_cp.kv._feed import Feed
from vllm_cp.kv._frames import END_OF_REPLAY, replay_parts, replay_request
from vllm_cp.kv._gate import PATIENCE_S
from vllm_cp.kv._queue import Entry
from vllm_cp.kv._sequence import Out
from vllm_cp.kv._sockets import replay_socket
from vllm_cp.kv.decoding import DecodeFailure, unfit
from vllm_cp.kv.settings import Settings

__all__ = ["Replay"]

#: Messages read at one go, so that live events are not kept waiting.
_AT_ONCE = 500


class Replay:
    """A request under way. The socket is its own, so nothing of an earlier request can turn up in it."""

    def __init__(
        self, feed: Feed, start: int, settings: Settings, context: zmq.Context[zmq.Socket[bytes]], now: float
    ) -> None:
        assert feed.wanted.replay is not None
        self.feed = feed
        self._settings = settings
        self._began = now
        self._heard = now
        #: Nothing has come yet.
        self.silent = True
        feed.sequencer.replay_begins()
        # One more than the buffer for the end marker, and as many again for what is published meanwhile.
        self.socket = replay_socket(context, feed.wanted.replay, 2 * feed.wanted.buffer_steps + 2, settings)
        with contextlib.suppress(zmq.Again):  # nowhere to send it to: it will run out of time
            self.socket.send_multipart(replay_request(start), zmq.NOBLOCK)

    def deadline(self) -> float:
        """Monotonic seconds when it is given up unless something comes."""
        return min(self._heard + self._settings.replay_idle_s, self._began + self._settings.replay_total_s)

    def patience(self) -> float:
        """Monotonic seconds when it has waited long enough inside the gate."""
        return self._began + PATIENCE_S

    def read(self, now: float, wall: float) -> tuple[bool, list[Entry]]:
        """What came in, and whether the replay is over."""
        feed = self.feed
        out: list[Out] = []
        over = complete = False
        for _ in range(_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard, self.silent = now, False
            parts = replay_parts(frames)
            if isinstance(parts, DecodeFailure):
                feed.failures[parts.reason] += 1
                continue
            seq, payload = parts
            if seq == END_OF_REPLAY:
                over = complete = True
                break
            failure = unfit(payload)
            if failure is not None:
                feed.failures[failure.reason] += 1
            out += feed.sequencer.replayed(seq, None if failure is not None else payload, wall)
        if not over and now >= self.deadline():
            over = True
        if over:
            out += self.end(now, complete=complete)
        return over, feed.noted(out, wall)

    def end(self, now: float, *, complete: bool) -> list[Out]:
        """It is over; returns what had been waiting for that."""
        feed = self.feed
        restarts = feed.sequencer.restarts
        result, out = feed.sequencer.replay_ended(now, complete=complete)
        feed.shaken = feed.shaken or feed.sequencer.restarts > restarts
        feed.replays[result] += 1
        feed.replay_seconds += now - self._began
        return out
