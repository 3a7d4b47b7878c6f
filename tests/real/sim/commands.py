"""What can be done to a fleet, by name: the same table serves a thread next door and a control port.

Every command takes an optional ``rank`` (default: all ranks here) and returns one answer per rank.

| command      | arguments and answer                                                              |
|--------------|-----------------------------------------------------------------------------------|
| status       | state, counters, in-flight ids, the INIT message                                  |
| received     | everything the frontend sent (add, abort, utility, ...)                           |
| die          | ``mode``: sentinel (default), abrupt, corrupt; answers the moment                 |
| hang, unhang | stop and resume answering; answers the moment                                     |
| rejoin       | a fresh engine runs the handshake again (``timeout`` seconds)                     |
| pace         | ``token_interval``, ``tokens_per_step``, ``prefill_delay``                        |
| utility      | ``fail``: {method: message}, ``mute``: [methods], ``delay``: seconds, ``clear``   |
| set          | ``weight_version``, ``paused``, ``asleep``, ``fail_next``                         |
| publish      | ``events``: raw KV events, or ``tokens``: store their blocks; answers the seq     |
| drop         | ``count``: keep the next batches off PUB (replay has them)                        |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.real.sim.engine import SimEngine
from tests.real.sim.fleet import Fleet
from tests.real.sim.kv import KvPublisher

Answer = Any
PACE = ("token_interval", "tokens_per_step", "prefill_delay")


class Commands:
    """The table above over one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def run(self, name: str, rank: int | None = None, **arguments: Any) -> list[Answer]:
        """Run one command on ``rank``, or on every rank here; raises what the command raises."""
        handler = getattr(self, f"do_{name}", None)
        if handler is None:
            raise ValueError(f"unknown command {name}")
        ranks = list(self.fleet.engines) if rank is None else [rank]
        return [await handler(self.fleet.engines[each], **arguments) for each in ranks]

    async def do_status(self, engine: SimEngine) -> Answer:
        return engine.status()

    async def do_received(self, engine: SimEngine) -> Answer:
        return list(engine.received)

    async def do_die(self, engine: SimEngine, mode: str = "sentinel") -> Answer:
        return (await engine.die(mode)).as_dict()

    async def do_hang(self, engine: SimEngine) -> Answer:
        return engine.hang().as_dict()

    async def do_unhang(self, engine: SimEngine) -> Answer:
        return engine.unhang().as_dict()

    async def do_rejoin(self, engine: SimEngine, timeout: float = 10.0) -> Answer:
        return (await self.fleet.rejoin(engine.rank, timeout)).status()

    async def do_pace(self, engine: SimEngine, **pace: float) -> Answer:
        for name, value in pace.items():
            if name not in PACE:
                raise ValueError(f"cannot pace {name}; one of {', '.join(PACE)}")
            setattr(engine.facts, name, value)

    async def do_utility(
        self,
        engine: SimEngine,
        fail: Mapping[str, str] | None = None,
        mute: Iterable[str] = (),
        delay: float | None = None,
        clear: bool = False,
    ) -> Answer:
        if clear:
            engine.fail_utility.clear()
            engine.mute_utility.clear()
            engine.facts.utility_delay = 0.0
        engine.fail_utility.update(fail or {})
        engine.mute_utility.update(mute)
        if delay is not None:
            engine.facts.utility_delay = delay

    async def do_set(self, engine: SimEngine, **values: Any) -> Answer:
        for name, value in values.items():
            if name == "weight_version":
                engine.weight_version = value
            elif name == "asleep":
                engine.scheduler.asleep = set(value)
            elif name in ("paused", "fail_next"):
                setattr(engine.scheduler, name, value)
            else:
                raise ValueError(f"cannot set {name}")
        engine.wake()

    async def do_publish(
        self, engine: SimEngine, events: Sequence[Any] | None = None, tokens: Sequence[int] | None = None
    ) -> Answer:
        publisher = self._publisher(engine)
        if events is None:
            events, _ = engine.scheduler.cache.store(list(tokens or []))
        return await publisher.publish(events) if events else None

    async def do_drop(self, engine: SimEngine, count: int) -> Answer:
        self._publisher(engine).drop_next += count

    @staticmethod
    def _publisher(engine: SimEngine) -> KvPublisher:
        if engine.publisher is None:
            raise RuntimeError(f"rank {engine.rank} publishes no KV events")
        return engine.publisher
