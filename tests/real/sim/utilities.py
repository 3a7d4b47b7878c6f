"""The utility calls a frontend makes on an engine: pause, sleep, LoRA, weights, caches."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import Any

from tests.real.sim.facts import EngineFacts
from tests.real.sim.kv import KvPublisher
from tests.real.sim.protocol import Batch
from tests.real.sim.scheduler import Scheduler


class Utilities:
    """Mixed into ``SimEngine``: a call for ``name`` runs ``utility_name`` and its result is pushed back."""

    facts: EngineFacts
    scheduler: Scheduler
    publisher: KvPublisher | None

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.scheduler = Scheduler(facts)
        self.publisher = None
        self.loras: dict[int, str] = {}  # id -> name
        self.weight_version = facts.weight_version
        self.fail_utility: dict[str, str] = {}  # method -> failure message
        self.mute_utility: set[str] = set()  # methods that never answer

    async def push(self, batches: Iterable[Batch]) -> None:
        """Send batches to the frontend (the engine does)."""
        raise NotImplementedError

    def note(self, kind: str, **values: Any) -> None:
        """Remember what the frontend sent (the engine does)."""
        raise NotImplementedError

    def wake(self) -> None:
        """Let the scheduler look at its queue (the engine does)."""
        raise NotImplementedError

    async def call_utility(self, client: int, call_id: int, method: str, args: list[Any]) -> None:
        """Run one call and push its ``UtilityOutput`` ``[call_id, failure, [type info, value]]``."""
        if method in self.mute_utility:
            return
        if self.facts.utility_delay:
            await asyncio.sleep(self.facts.utility_delay)
        failure, result = self.fail_utility.get(method), None
        if failure is None:
            handler = getattr(self, f"utility_{method}", None)
            if handler is None:
                failure = f"Call to {method} method failed: no such method in the simulator"
            else:
                try:
                    result = handler(*args)
                    if inspect.isawaitable(result):
                        result = await result
                except Exception as error:  # noqa: BLE001 - as the engine core: any failure is the caller's answer
                    failure = f"Call to {method} method failed: {error}"
        envelope = None if failure is not None else [None, result]
        await self.push([Batch(client=client, utility=[call_id, failure, envelope])])

    def utility_get_supported_tasks(self) -> list[str]:
        return list(self.facts.supported_tasks)

    # -- pause and sleep

    async def utility_pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"Invalid pause mode: {mode}")
        scheduler = self.scheduler
        scheduler.paused = mode
        if mode == "abort":
            await self.push(scheduler.abort_all())
        elif mode == "wait":
            while scheduler.running and scheduler.paused == "wait":  # noqa: ASYNC110 - a queue has no event for empty
                await asyncio.sleep(0.005)
        if clear_cache:
            await self._clear_cache()

    async def utility_pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.scheduler.reject_new = mode != "keep"
        await self.utility_pause_scheduler(mode, clear_cache)

    def utility_resume_scheduler(self) -> None:
        self.scheduler.paused, self.scheduler.reject_new = None, False
        self.wake()

    def utility_is_scheduler_paused(self) -> bool:
        return self.scheduler.paused is not None

    async def utility_sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self.utility_pause_scheduler(mode, level >= 1)
        if level >= 1:
            self.scheduler.asleep = {"weights", "kv_cache"}

    def utility_wake_up(self, tags: list[str] | None = None) -> bool | None:
        asleep = self.scheduler.asleep = set() if tags is None else self.scheduler.asleep - set(tags)
        if not asleep:
            self.utility_resume_scheduler()
        # Before 0.31 the engine returned None and the frontend expects that.
        return (not asleep) if self.facts.protocol_version >= (0, 31) else None

    def utility_is_sleeping(self) -> bool:
        return self.scheduler.paused is not None or bool(self.scheduler.asleep)

    # -- LoRA

    def utility_add_lora(self, request: list[Any]) -> bool:
        if self.facts.max_loras <= 0:
            raise RuntimeError("LoRA is not enabled")
        name, lora_id = request[0], request[1]
        self.loras[lora_id] = name
        return True

    def utility_remove_lora(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    def utility_list_loras(self) -> list[int]:
        return sorted(self.loras)

    def utility_pin_lora(self, lora_id: int) -> bool:
        return lora_id in self.loras

    # -- caches

    async def utility_reset_prefix_cache(self, reset_running: bool = False, reset_connector: bool = False) -> bool:
        await self._clear_cache()
        return True

    async def _clear_cache(self) -> None:
        events = self.scheduler.cache.clear()
        if self.publisher:
            await self.publisher.publish(events)

    def utility_reset_mm_cache(self) -> None: ...

    def utility_reset_encoder_cache(self) -> None: ...

    def utility_release_kv_cache_memory(self) -> None: ...

    def utility_get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        size = self.facts.block_size
        return [{"group_idx": 0, "kind": "full_attention", "block_size": size, "sliding_window": None}]

    # -- weights and workers

    def utility_set_weight_version(self, version: str) -> None:
        self.weight_version = version

    def utility_get_weight_version(self) -> str:
        return self.weight_version

    def utility_collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """One result per worker; weight-transfer RPCs arrive this way."""
        self.note("collective_rpc", method=method, args=args, kwargs=kwargs)
        if method in self.fail_utility:
            raise RuntimeError(self.fail_utility[method])
        return [None] * self.facts.workers

    def utility_execute_dummy_batch(self) -> None: ...

    def utility_profile(self, *_args: Any) -> None: ...
