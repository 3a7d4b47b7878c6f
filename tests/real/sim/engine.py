"""One simulated engine core: it joins a frontend, receives, steps, sends, and fails on command."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import zmq
import zmq.asyncio

from tests.real.sim.facts import EngineFacts
from tests.real.sim.kv import KvPublisher
from tests.real.sim.moments import Moment
from tests.real.sim.protocol import ABORT, ADD, DEAD_SENTINEL, START_DP_WAVE, UTILITY, Batch, pack, unpack
from tests.real.sim.utilities import Utilities

log = logging.getLogger(__name__)

DEATHS = ("sentinel", "abrupt", "corrupt")


class SimEngine(Utilities):
    """One engine core; ``moments`` collects what was done to it (shared by a fleet)."""

    def __init__(
        self, handshake: str, rank: int, fleet_size: int, facts: EngineFacts, moments: list[Moment] | None = None
    ) -> None:
        super().__init__(facts)
        self.handshake = handshake
        self.rank = rank
        self.fleet_size = fleet_size
        self.moments = moments if moments is not None else []
        self.identity = rank.to_bytes(2, "little")
        self.init: dict[str, Any] = {}  # the decoded INIT message
        self.state = "new"  # new, hello, joined, hung, dead
        self.received: deque[dict[str, Any]] = deque(maxlen=10_000)  # what the frontend sent
        # One context per engine, so that one can go without the others; every socket is listed, because one left open
        # would make terminating the context block for ever.
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._inputs: list[zmq.asyncio.Socket] = []
        self._outputs: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()  # utility calls under way
        self._awake = asyncio.Event()
        self._unhung = asyncio.Event()
        self._unhung.set()

    # -- joining

    async def join(self, timeout: float = 600.0) -> None:
        """Run the start-up handshake; returns once the engine is ready to serve."""
        await asyncio.wait_for(self._join(), timeout)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        sock = self._context.socket(kind)
        self._sockets.append(sock)
        return sock

    def _dealer(self, address: str) -> zmq.asyncio.Socket:
        sock = self._socket(zmq.DEALER)
        sock.set(zmq.IDENTITY, self.identity)
        sock.connect(address)
        return sock

    async def _join(self) -> None:
        handshake = self._dealer(self.handshake)
        status: dict[str, Any] = {"local": False, "headless": True}
        linger = 0  # to a frontend that never came nothing is owed
        try:
            await handshake.send(pack({"status": "HELLO"} | status))
            self.state = "hello"
            self.init = unpack(await handshake.recv())
            linger = 1000
            if self.facts.ready_delay:
                await asyncio.sleep(self.facts.ready_delay)
            await self._open_data_sockets(self.init["addresses"])
            done = {"status": "READY"} | status
            if self.fleet_size > 1:
                done["parallel_config_hash"] = "simulated"
            await handshake.send(pack(done))
        finally:
            handshake.close(linger=linger)
        self.state = "joined"
        self._tasks = [asyncio.create_task(self._receive(sock)) for sock in self._inputs]
        self._tasks.append(asyncio.create_task(self._step_for_ever()))
        log.info("rank %d joined", self.rank)

    async def _open_data_sockets(self, addresses: dict[str, Any]) -> None:
        if self.facts.kv_events and self.facts.kv_events.publisher == "zmq":
            self.publisher = KvPublisher(self._context, self.facts.kv_events, self.rank)
        ready = pack(self.facts.ready_response(self.rank, self.fleet_size))
        for address in addresses["inputs"]:
            sock = self._dealer(address)
            await sock.send(ready)
            self._inputs.append(sock)
        for address in addresses["outputs"]:
            sock = self._socket(zmq.PUSH)
            sock.connect(address)
            self._outputs.append(sock)
        coordinator = addresses.get("coordinator_input")
        if coordinator:
            sub = self._socket(zmq.XSUB)
            sub.set(zmq.IDENTITY, self.identity)
            sub.connect(coordinator)
            await sub.send(b"\x01")
            while (await sub.recv_multipart())[0] != b"READY":
                pass
            self._inputs.append(sub)

    # -- receiving

    async def _receive(self, sock: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sock.recv_multipart()
            await self._unhung.wait()  # a hung engine leaves messages unhandled
            try:
                await self._handle(frames)
            except Exception:
                log.exception("rank %d: could not handle a message", self.rank)

    async def _handle(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if kind == b"READY":
            return
        body = unpack(frames[1])
        if kind == ADD:
            self.note("add", request_id=body[0])
            answer = self.scheduler.add(body)
            if answer:
                await self.push([answer])
            else:
                self.wake()
        elif kind == ABORT:
            self.note("abort", request_ids=body)
            await self.push(self.scheduler.abort(body))
        elif kind == UTILITY:
            client, call_id, method, args = body
            self.note("utility", method=method, args=args)
            self.scheduler.counters["utility"] += 1
            # A task of its own: a slow or waiting call must not block the rest.
            call = asyncio.create_task(self.call_utility(client, call_id, method, args or []))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        elif kind == START_DP_WAVE:
            self.note("start_dp_wave", body=body)
        else:
            log.warning("rank %d: unknown request type %r", self.rank, kind)

    def note(self, kind: str, **values: Any) -> None:
        """Remember what the frontend sent, with the time."""
        self.received.append({"monotonic": time.monotonic(), "wall": time.time(), "kind": kind, **values})

    # -- stepping and sending

    def wake(self) -> None:
        """Let the step loop look at the queue."""
        self._awake.set()

    async def _step_for_ever(self) -> None:
        while True:
            await self._awake.wait()
            await asyncio.sleep(self.facts.token_interval)
            await self._unhung.wait()
            batches, events = self.scheduler.step()
            if events and self.publisher:
                await self.publisher.publish(events)
            await self.push(batches)
            if not self.scheduler.requests:
                self._awake.clear()

    async def push(self, batches: Iterable[Batch]) -> None:
        """Send each batch to its frontend client."""
        for batch in batches:
            await self.send_raw(batch.encode(self.rank, time.monotonic()), batch.client)

    async def send_raw(self, payload: bytes, client: int = 0) -> None:
        """Send any bytes as an output message."""
        if self.state == "dead" or client >= len(self._outputs):
            return
        await self._outputs[client].send(payload)

    # -- failing on command

    def _record(self, kind: str, detail: str = "") -> Moment:
        moment = Moment(kind=kind, rank=self.rank, detail=detail)
        self.moments.append(moment)
        return moment

    async def die(self, mode: str = "sentinel") -> Moment:
        """Die, and say when.

        ``sentinel``: as a real engine core after a fatal error: announce ENGINE_CORE_DEAD, then close.
        ``abrupt``: close every socket without a word, which is what the frontend sees after SIGKILL.
        ``corrupt``: push bytes that are not a valid output, and stay connected.
        """
        if mode not in DEATHS:
            raise ValueError(f"no such death: {mode}; one of {', '.join(DEATHS)}")
        moment = self._record("die", mode)
        if mode == "corrupt":
            await self.send_raw(b"\xc1 not msgpack")
            return moment
        if mode == "sentinel":
            for client in range(len(self._outputs)):
                await self.send_raw(DEAD_SENTINEL, client)
        await self.close(linger=4000 if mode == "sentinel" else 0)
        return moment

    def hang(self) -> Moment:
        """Stop answering anything; sockets stay open."""
        if self.state != "joined":
            raise RuntimeError(f"rank {self.rank} is {self.state}, only a joined engine can hang")
        moment = self._record("hang")
        self.state = "hung"
        self._unhung.clear()
        return moment

    def unhang(self) -> Moment:
        """Answer again, what was left unhandled first."""
        if self.state != "hung":
            raise RuntimeError(f"rank {self.rank} is {self.state}, not hung")
        moment = self._record("unhang")
        self.state = "joined"
        self._unhung.set()
        return moment

    async def close(self, linger: int = 0) -> None:
        """Close every socket; output messages get ``linger`` milliseconds to leave."""
        if self.state == "dead":
            return
        self.state = "dead"
        tasks = [*self._tasks, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self.scheduler.requests.clear()
        if self.publisher:
            self.publisher.close()
        for sock in self._sockets:
            sock.close(linger=linger if sock in self._outputs else 0)
        self._sockets, self._inputs, self._outputs = [], [], []
        # Terminating the context waits for lingering messages: do it off the loop.
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    def status(self) -> dict[str, Any]:
        """What a test may want to look at, fit for JSON."""
        scheduler = self.scheduler
        return {
            "rank": self.rank,
            "state": self.state,
            "counters": dict(scheduler.counters),
            "in_flight": list(scheduler.requests),
            "paused": scheduler.paused,
            "asleep": sorted(scheduler.asleep),
            "weight_version": self.weight_version,
            "loras": sorted(self.loras),
            "kv_next_seq": self.publisher.next_seq if self.publisher else None,
            "cached_blocks": len(scheduler.cache),
            "init": self.init,
        }
