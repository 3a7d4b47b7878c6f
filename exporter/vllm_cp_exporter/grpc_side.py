"""What a worker's control port tells: health as it changes, round trips to its engines, and what it says it is."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import Enum
from typing import Any

from vllm_cp import (
    AsyncControlClient,
    ClientClosed,
    Connection,
    ControlError,
    CredentialsRejected,
    HealthStatus,
    OutOfTime,
    Retry,
    RpcRecord,
    ServerInfo,
    TlsFailed,
    WorkerUnreachable,
)
from vllm_cp.observer import ROUND_TRIP_S, Observer
from vllm_cp_exporter.canary import Canaries
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.observe import read_facts
from vllm_cp_exporter.pace import jittered, rest, wait
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Facts

__all__ = ["GrpcSide"]

log = logging.getLogger("vllm_cp_exporter.watch")

#: After a stream broke, how long a new call may take before the worker counts as unreachable.
_CONFIRM_S = 1.0
#: Between two dials: in the first minute of an outage, and later.
_REDIAL_S = 1.0
_REDIAL_LATER_S = 10.0
_FIRST_MINUTE_S = 60.0
#: In what gRPC says when there was no connection to be had, and not one that broke.
_DIALLED = "failed to connect"
#: How late a look at an answer that is overdue may come.
_SOON_S = 0.01
#: A worker that does not offer its event sources, or not to us, is asked again this rarely.
_SOURCES_AGAIN_S = 600.0


class _End(Enum):
    """How a health stream ended."""

    IN_ORDER = "in order"
    BROKEN = "broken"


class GrpcSide:
    """The gRPC half of watching one worker."""

    def __init__(
        self,
        connection: Connection,
        observer: Observer,
        metrics: SelfMetrics,
        *,
        interval_s: float,
        info_interval_s: float,
        dials: Dials,
        canaries: Canaries,
        attempted: asyncio.Event,
        publish: Callable[[], None],
    ) -> None:
        # Each loop here asks again by itself, and a retry would only hide how long an answer took.
        self._connection = replace(connection, retry=Retry(attempts=1))
        self._observer = observer
        self._metrics = metrics
        self._interval = interval_s
        self._info_interval = info_interval_s
        self._dials = dials
        self._canaries = canaries
        self._attempted = attempted
        self._publish = publish
        #: What the worker says it is; empty while it cannot be asked.
        self.facts = Facts()
        self._facts_due = asyncio.Event()
        self._probe_due = asyncio.Event()
        #: What was said already of that which only people can mend.
        self._told: set[str] = set()
        self._client = self._new_client()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run, all at once, until cancelled."""
        return [self._listen(), self._ask_engines(), self._ask_facts()]

    def change(self, *, interval_s: float, info_interval_s: float, canaries: Canaries) -> None:
        """Go on in another way, on the same connection."""
        self._interval = interval_s
        self._info_interval = info_interval_s
        self._canaries = canaries

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    # -- health ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """The health stream, and a Check before each attempt at it: what a broken stream means, a new call says."""
        down_since: float | None = None
        end: _End | None = None
        redialled = -math.inf
        while True:
            answer = await self._dial(end)
            self._attempted.set()
            end = None
            if isinstance(answer, HealthStatus):
                down_since = None
                end = await self._stream()
            now = time.monotonic()
            if end is not None and now - redialled > _REDIAL_S:
                redialled = now
                continue
            if isinstance(answer, HealthStatus) and end is None:
                # A server without a Watch for us: Checks go on at the pace of all questions.
                await rest(jittered(self._interval))
                continue
            if isinstance(answer, WorkerUnreachable):
                # A channel that could not connect waits before it dials again, for longer than we do.
                await self._renew_client()
            down_since = now if down_since is None else down_since
            await rest(jittered(_REDIAL_S if now - down_since < _FIRST_MINUTE_S else _REDIAL_LATER_S))

    async def _dial(self, after: _End | None) -> HealthStatus | ControlError:
        async with self._dials:
            if after is _End.IN_ORDER:
                # Told only now that the port is really asked: its silence counts from here.
                self._observer.stream_ended()
            began = self._observer.clock.monotonic()
            answer = await self._check(after)
            if after and isinstance(answer, WorkerUnreachable) and _DIALLED not in answer.detail:
                # It went down with the connection of the stream. What a new one says counts.
                answer = await self._check(after)
        self._seen(answer, began)
        self._tell(answer)
        return answer

    async def _check(self, after: _End | None) -> HealthStatus | ControlError:
        try:
            return await self._client.check(timeout_s=_CONFIRM_S if after else None)
        except ControlError as error:
            return error

    async def _stream(self) -> _End | None:
        """Follow the health stream; how it ended, ``None`` when it is not worth dialling again at once."""
        try:
            async for status in self._client.watch(check_every_s=self._interval):
                self._seen(status, None)
        except OutOfTime:
            # The peer vanished without a word: this connection may never notice, so a new one is made.
            await self._renew_client()
            return _End.BROKEN
        except ControlError as error:
            log.debug("stream_ended", extra={"fields": {"worker": self._connection.target, "error": str(error)}})
            self._tell(error)
            # Any other error is a server without a Watch for us: Checks go on at the pace of the dials.
            return _End.BROKEN if isinstance(error, WorkerUnreachable) else None
        return _End.IN_ORDER

    def _seen(self, answer: HealthStatus | ControlError, began: float | None) -> None:
        self._observer.health(answer, began=began)
        if isinstance(answer, HealthStatus):
            self._facts_due.set()
            self._probe_due.set()

    def _tell(self, answer: HealthStatus | ControlError) -> None:
        """A line about what only people can mend: once, and again when it comes back after it was mended."""
        if isinstance(answer, HealthStatus):
            self._told -= {TlsFailed.meaning, CredentialsRejected.meaning}
            return
        pings = "keepalive_s" in answer.hint
        if answer.meaning not in self._told and (pings or isinstance(answer, TlsFailed | CredentialsRejected)):
            self._told.add(answer.meaning)
            log.warning("misconfigured", extra={"fields": {"target": self._connection.target, "error": str(answer)}})

    # -- engines and facts -----------------------------------------------------------------

    async def _ask_engines(self) -> None:
        """Round trips, one at a time: the next one is only asked when the last was answered."""
        while True:
            # Earlier than an interval, never later: it is promised how long a silent engine can go unseen.
            await wait(self._probe_due, min(jittered(self._interval), self._interval))
            try:
                if self._observer.wants_round_trip:
                    await self._round_trip()
                await self._canaries.send_if_due(self._client, self._ranks)
            except ClientClosed:  # replaced under way; the question goes on being unanswered
                continue
            self._publish()

    async def _round_trip(self) -> None:
        began = self._observer.clock.monotonic()
        self._observer.asked()
        limit = self._observer.state.rules.answer_within_s + _SOON_S
        overdue = asyncio.get_running_loop().call_later(limit, self._observer.tick)
        try:
            answer: bool | ControlError = await self._client.is_paused(timeout_s=ROUND_TRIP_S)
        except ControlError as error:
            answer = error
        finally:
            overdue.cancel()
        self._observer.round_trip(answer, began=began)

    @property
    def _ranks(self) -> int | None:
        spread = self.facts.server.parallelism if self.facts.server else None
        return spread.data_parallel_size_local or spread.data_parallel_size if spread else None

    async def _ask_facts(self) -> None:
        """What the worker says it is: at each connection, and now and then."""
        sources_asked = 0.0
        sources_of: str | None = None
        while True:
            await wait(self._facts_due, jittered(self._info_interval))
            if self._observer.state.evidence.health is None:
                continue
            now = time.monotonic()
            denied = self.facts.sources is None and self.facts.sources_problem != ""
            instance = self._observer.state.instance_id
            ask = not denied or instance != sources_of or now - sources_asked > _SOURCES_AGAIN_S
            try:
                facts = await read_facts(self._client, self.facts, ask_sources=ask, on_server=self._server_told)
            except ClientClosed:  # replaced under way
                continue
            if self._observer.state.evidence.broken is None:
                self.facts = facts
            if ask:
                sources_asked, sources_of = now, self._observer.state.instance_id
            self._publish()

    def _server_told(self, answer: ServerInfo | ControlError) -> None:
        instance = self._observer.state.instance_id
        self._observer.server_info(answer)
        if self._observer.state.instance_id != instance:
            # What the one before it could do says nothing of this one.
            self._probe_due.set()

    # -- the client --------------------------------------------------------------------------

    def _new_client(self) -> AsyncControlClient:
        return AsyncControlClient(self._connection, on_rpc=self._rpc)

    async def _renew_client(self) -> None:
        old, self._client = self._client, self._new_client()
        await old.close()

    def _rpc(self, record: RpcRecord) -> None:
        self._metrics.rpc(record)
        if record.method == "Health.Check" and record.code in ("OK", "NOT_FOUND"):
            self._observer.contact()
