"""The health streams behind AsyncFleet.watch."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm_cp._fleet.changes import DIALS_AT_ONCE, TURN_S, FleetChange, Pace, WorkerWatch
from vllm_cp._fleet.roster import EXPECTED, Member, Roster
from vllm_cp.aio import AsyncControlClient
from vllm_cp.discovery.base import TargetSet
from vllm_cp.models.health import HealthStatus

__all__ = ["Streams"]

_Member = Member[AsyncControlClient]


class Streams:
    """The health streams of a watch, one task each."""

    def __init__(self, roster: Roster[AsyncControlClient], news: asyncio.Queue[Any], check_every_s: float) -> None:
        self.roster = roster
        self.news = news
        self.check_every_s = check_every_s
        self.pace = Pace()
        self._gate = asyncio.Semaphore(DIALS_AT_ONCE)
        self._open: dict[str, _Stream] = {}

    def current(self, watch: WorkerWatch) -> bool:
        """Whether news of a worker is still of interest: it may have left since."""
        held = self._open.get(watch.target.key)
        return held is not None and held.watch is watch

    async def follow(self, targets: TargetSet) -> None:
        """Open and close streams so that each of these workers has one."""
        before, kept, fresh, ended = self._open, {}, {}, []
        for target in targets.targets:
            member = self.roster.member(target.key)
            held = before.pop(target.key, None)
            if held is not None and held.member is member:
                held.watch.target = target
                kept[target.key] = held
                continue
            if held is not None:
                ended.append(held)
            fresh[target.key] = (member, WorkerWatch(target) if held is None else held.watch.moved(target))
        ended += before.values()
        self._open = kept
        for stream in ended:
            stream.end()
        await asyncio.gather(*(stream.task for stream in ended), return_exceptions=True)
        # Only now: what an old stream knew goes on in the new one.
        self._open = {**kept, **{key: _Stream(self, member, watch) for key, (member, watch) in fresh.items()}}

    async def gate_in(self) -> bool:
        """Wait for a turn to open a stream, though not for long; whether there is one to give back."""
        try:
            await asyncio.wait_for(self._gate.acquire(), TURN_S)
        except asyncio.TimeoutError:
            return False
        return True

    def gate_out(self) -> None:
        """Give back the turn."""
        self._gate.release()


class _Stream:
    """One worker's health stream."""

    def __init__(self, streams: Streams, member: _Member, watch: WorkerWatch) -> None:
        self.member = member
        self.watch = watch
        self._streams = streams
        # Being cancelled isn't enough: a client that is closed in the same moment takes that for its own end.
        self._ended = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        """Let the task end soon."""
        self._ended = True
        self.task.cancel()

    async def _run(self) -> None:
        watch = self.watch
        try:
            while not self._ended:
                await asyncio.sleep(self._streams.pace.turn_s())
                try:
                    await self._read()
                    error = None
                except EXPECTED as failure:
                    error = failure
                if self._ended or not self._streams.roster.holds(self.member):
                    return  # its client was closed, which is no news of the worker
                self._tell(watch.lost(error))
                await asyncio.sleep(watch.pause_s())
        except Exception as defect:  # noqa: BLE001  (raised where the changes are read)
            self._streams.news.put_nowait(defect)

    async def _read(self) -> None:
        streams, client, watch = self._streams, self.member.client(), self.watch
        opening = await streams.gate_in()
        words = client.watch(check_every_s=streams.check_every_s)
        try:
            async for status in words:
                self._tell(watch.said(status))
                if opening:
                    streams.gate_out()
                    opening = False
                if status is not HealthStatus.SERVING:
                    continue  # a draining server would let us wait
                try:
                    self._tell(watch.instance((await client.server_info()).instance_id))
                except EXPECTED:
                    continue
        finally:
            if opening:
                streams.gate_out()
            await words.aclose()  # type: ignore[attr-defined]  # an async generator

    def _tell(self, change: FleetChange | None) -> None:
        if change is not None and not self._ended:
            self._streams.news.put_nowait((self.watch, change))
