"""A fake vLLM frontend without a transport: its state, what can happen to it, and how it answers a call.

Everything here runs on one event loop. Transports (``Host``) hand it calls and open and close ports for it; a further
one, for HTTP say, is a further file and changes nothing here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vllm_cp.models.health import HealthStatus
from vllm_cp.testing._bell import Bell, Refusal
from vllm_cp.testing._calls import Call, Host
from vllm_cp.testing._engine import PARTS, Engines
from vllm_cp.testing._facts import Facts, new_instance_id
from vllm_cp.testing._health import SERVICES
from vllm_cp.testing._routes import canonical, measure, request_of, route
from vllm_cp.testing._seen import SeenCall, short_name

__all__ = ["Frontend"]

T = TypeVar("T")


@dataclass(slots=True)
class _Script:
    """A scripted misbehaviour of one method."""

    method: str
    times: int | None
    delay_s: float = 0.0
    refusal: Refusal | None = None


class Frontend:
    """One fake worker."""

    def __init__(self, facts: Facts, ranks: int) -> None:
        self.facts = facts
        self.hosts: list[Host] = []
        self.calls: list[SeenCall] = []
        self._count = ranks
        self._arrivals = Bell()
        self._closing = asyncio.Lock()
        self._serving: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Future[Any]] = set()
        self._fresh()

    def _fresh(self) -> None:
        self.bell = Bell()
        self.engines = Engines(self.bell, self._count)
        self.statuses = dict.fromkeys(SERVICES, HealthStatus.SERVING)
        self._scripts: list[_Script] = []
        self.frozen = False
        self.draining = False

    # -- answering

    async def serve(self, call: Call) -> None:
        """Answer one call: returns for OK, raises Refusal for any other status."""
        method = short_name(call.path)
        seen = SeenCall(
            method=method,
            metadata=call.metadata,
            deadline_s=call.deadline_s,
            request=request_of(call),
            at_s=time.monotonic(),
        )
        self.calls.append(seen)
        self._arrivals.ring()
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(call, method)
            seen.code = "OK"
        except Refusal as refusal:
            seen.code = refusal.code
            raise
        except asyncio.CancelledError:
            seen.code = "CANCELLED"
            raise
        except Exception as error:  # a mistake in here must not look like a worker that hangs
            seen.code = "UNKNOWN"
            raise Refusal("UNKNOWN", f"the fake worker failed: {error!r}") from error
        finally:
            self._serving.discard(task)
            self.bell.ring()

    async def _serve(self, call: Call, method: str) -> None:
        await self.bell.until(lambda: not self.frozen)
        for script in [s for s in self._scripts if s.method == method]:
            if script.times is not None:
                script.times -= 1
                if script.times <= 0:
                    self._scripts.remove(script)
            if script.delay_s:
                await self.bell.until(lambda: False, timeout_s=script.delay_s)
            if script.refusal is not None:
                raise Refusal(script.refusal.code, script.refusal.detail)
        await self.bell.until(lambda: not self.draining)
        measure(call, self.facts.version)
        await route(call.path, self.facts.version)(self, call)

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run beside the calls; whoever starts it cancels it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- what can happen to it; the verbs of ``Controls``, which documents them

    async def set(self, facts: dict[str, Any], rank: int | None = None) -> None:
        facts = dict(facts)
        chosen = self.engines.chosen(rank)
        ours = {name: facts.pop(name) for name in ("paused", "sleeping", "weight_version") if name in facts}
        if rank is not None and facts:
            raise TypeError(f"rank= goes with paused, sleeping and weight_version, not with {sorted(facts)}")
        self.facts.set(facts)
        for engine in chosen:
            if "paused" in ours:
                engine.paused = "abort" if ours["paused"] else None
                engine.refuses = bool(ours["paused"]) and self.facts.version >= (0, 33)
            if "sleeping" in ours:
                engine.asleep = PARTS if ours["sleeping"] else frozenset()
                engine.paused = "abort" if ours["sleeping"] else None
            engine.weight_version = ours.get("weight_version", engine.weight_version)
        self.bell.ring()

    async def health(self, status: HealthStatus, service: str | None = None) -> None:
        if service is not None and service not in SERVICES:
            raise ValueError(f"no health name {service!r}; one of {SERVICES}")
        for name in SERVICES if service is None else (service,):
            self.statuses[name] = status
        self.bell.ring()

    async def fail(self, method: str, code: str, detail: str, times: int | None) -> None:
        self._scripts.append(_Script(canonical(method), times, refusal=Refusal(code, detail)))

    async def delay(self, method: str, seconds: float, times: int | None) -> None:
        self._scripts.append(_Script(canonical(method), times, delay_s=seconds))

    async def heal(self, method: str | None = None) -> None:
        name = None if method is None else canonical(method)
        self._scripts = [s for s in self._scripts if name not in (None, s.method)]

    async def hang(self, rank: int | None = None) -> None:
        for engine in self.engines.chosen(rank):
            engine.hung = True
        self.bell.ring()

    async def unhang(self) -> None:
        self.engines.thaw()

    async def freeze(self) -> None:
        self.frozen = True

    async def thaw(self) -> None:
        self.frozen = False
        self.bell.ring()

    async def die(self, reported: bool, rank: int | None = None) -> None:
        chosen = self.engines.chosen(rank)
        if reported:
            self.engines.fatal = True
            await self.health(HealthStatus.NOT_SERVING)
        for engine in chosen:
            engine.dead = True
        self.bell.ring()

    async def drain(self, seconds: float, busy: bool) -> None:
        self.draining = True
        await self.health(HealthStatus.NOT_SERVING)
        self.in_background(self._drain(self.bell, seconds, busy))

    async def _drain(self, bell: Bell, seconds: float, busy: bool) -> None:
        try:
            await bell.until(lambda: not busy and not self.engines.busy, timeout_s=seconds)
        except Refusal:
            return
        await self.stop()

    def stop_soon(self) -> None:
        """Stop once the call that asked for it has been answered."""

        async def stop() -> None:
            await asyncio.sleep(0.01)
            await self.stop()

        self.in_background(stop())

    async def start(self) -> None:
        for host in self.hosts:
            await host.open()

    async def stop(self) -> None:
        self.bell.stopped = True
        self.bell.ring()
        async with self._closing:
            # Let the calls in flight hear of it before the sockets go.
            if self._serving:
                await asyncio.wait(self._serving, timeout=1.0)
            for host in self.hosts:
                await host.close()

    async def restart(self, instance_id: str | None = None) -> None:
        await self.stop()
        self._fresh()
        self.facts.info = replace(self.facts.info, instance_id=instance_id or new_instance_id())
        await self.start()

    async def wait_for_call(self, method: str, count: int, timeout_s: float) -> Sequence[SeenCall]:
        name = canonical(method)

        def found() -> list[SeenCall]:
            return [call for call in self.calls if call.method == name]

        if not await self._arrivals.until(lambda: len(found()) >= count, timeout_s):
            raise TimeoutError(f"{len(found())} calls of {method} within {timeout_s} s, not {count}")
        return found()
