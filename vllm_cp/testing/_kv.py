"""FakeKvPublisher: the KV-event publisher of one rank, with the cache whose changes it publishes."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_cp.models.kv_source import Address, KvEventSource
from vllm_cp.testing._kv_cache import FakeKvCache, HashKind
from vllm_cp.testing._ports import HeldPort

if TYPE_CHECKING:
    import zmq

__all__ = ["FakeKvPublisher", "HashKind", "KvLayout"]

T = TypeVar("T")

_END_OF_REPLAY = (2**64 - 1).to_bytes(8, "big")
#: How long an address may stay taken after its last owner closed it, seconds.
_REBIND_S = 5.0


class KvLayout(str, Enum):
    """How batches are laid out in msgpack."""

    #: The batch an array, events maps: vLLM since mid-2026.
    MAP = "map"
    #: The batch an array, events arrays in field order: vLLM before.
    ARRAY = "array"
    #: The batch a map, events maps.
    BATCH_MAP = "batch_map"


class FakeKvPublisher:
    """A scripted KV-event publisher: live events, replay, and the truth to compare with.

    ::

        with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
            with ControlClient(worker.target) as client, Subscriber(client.kv_event_sources()) as events:
                kv.wait_subscribed()
                kv.store(range(64))     # four blocks of 16 tokens
                kv.drop(1)
                kv.evict(1)             # the subscriber will have to ask for this one

    The sockets belong to a thread of its own; every verb is a plain call that returns when it is done, with the number
    of the batch where there is one. ``cache`` is what a perfect subscriber would know.
    """

    def __init__(
        self,
        *,
        rank: int | None = 0,
        stamp: int | None = None,
        topic: str = "",
        replay: bool = True,
        buffer_steps: int = 10_000,
        block_size: int = 16,
        capacity: int | None = None,
        hashes: HashKind = HashKind.UNSIGNED,
        layout: KvLayout = KvLayout.MAP,
        replay_topic: bool = True,
        host: str = "127.0.0.1",
        endpoint: str | None = None,
        connect: bool = False,
    ) -> None:
        """
        Args:
            rank: as advertised; ``None`` is one publisher for all ranks.
            stamp: the rank stamped into batches, where it differs.
            topic: of the live messages.
            replay: whether there is a replay socket.
            buffer_steps: batches kept for replay.
            block_size: tokens per block.
            capacity: blocks in the cache, after which the oldest are evicted; ``None`` has no limit.
            hashes, layout: what batches look like.
            replay_topic: replies carry a topic frame; older servers leave it out.
            host: loopback address to bind to, advertised as a wildcard.
            endpoint: an address of your own instead, advertised as it is.
            connect: connect to ``endpoint`` rather than bind, as vLLM does with a plain host.

        Raises ConfigError without the extra ``kv``.
        """
        import vllm_cp.kv  # noqa: F401  (says what to install)

        self.cache = FakeKvCache(block_size, capacity, hashes)
        self.next_seq = 0
        #: Start numbers of the replay requests so far.
        self.replay_requests: list[int] = []
        self._rank, self._stamp = rank, rank if stamp is None else stamp
        self._topic = topic.encode()
        self._layout = layout
        self._replay_topic = replay_topic
        self._connect = connect
        self._held = [HeldPort(host) for _ in range((endpoint is None) + replay)]
        bracketed, wildcard = (f"[{host}]", "[::]") if ":" in host else (host, "*")
        ports = [held.number for held in self._held]
        self._live_address = endpoint or f"tcp://{bracketed}:{ports[0]}"
        self._replay_address = f"tcp://{bracketed}:{ports[-1]}" if replay else None
        self._source = KvEventSource(
            transport="zmq",
            endpoint=endpoint or f"tcp://{wildcard}:{ports[0]}",
            replay_endpoint=f"tcp://{wildcard}:{ports[-1]}" if replay else None,
            topic=topic,
            data_parallel_rank=rank,
            encoding="msgpack",
            schema_version=1,
            buffer_steps=buffer_steps,
            hwm=100_000,
            max_queue_size=100_000,
            live=Address(connect_to=self._live_address, publisher_connects=connect),
            replay=Address(connect_to=self._replay_address),
        )
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._drop = 0
        self._deaf = False
        self._subscribers = 0
        self._changed = threading.Condition()
        self._orders: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None

    # -- for subscribers

    @property
    def source(self) -> KvEventSource:
        """What GetKvEventSources says of it; for ``FakeWorker(kv_sources=[...])``, or for a subscriber at once."""
        return self._source

    @property
    def subscribers(self) -> int:
        """Subscriptions that have reached it and hold."""
        return self._subscribers

    def wait_subscribed(self, count: int = 1, timeout_s: float = 5.0) -> None:
        """Until so many subscriptions hold: what is published before that is not heard. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._subscribers >= count, timeout_s):
                raise TimeoutError(f"{self._subscribers} of {count} subscriptions after {timeout_s} s")

    # -- the cache and its events

    def store(self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None) -> int | None:
        """Cache the full blocks of a prompt, evicting where there is no room; ``None`` when all were cached already."""
        return self._do(lambda: self._publish_if(self.cache.store(tokens, lora=lora, salt=salt)))

    def evict(self, count: int = 1) -> int | None:
        """Evict the oldest blocks."""
        return self._do(lambda: self._publish_if(self.cache.evict(count)))

    def clear(self) -> int:
        """Empty the cache."""
        return self._do(lambda: self._publish(self.cache.clear()))

    def publish(self, *events: Any) -> int:
        """Publish events as they are, maps or arrays; the cache does not follow."""
        return self._do(lambda: self._publish(events))

    # -- what goes wrong

    def drop(self, count: int) -> None:
        """Keep the next batches off the live socket; a replay still has them."""
        self._do(lambda: setattr(self, "_drop", self._drop + count))

    def poison(self, *frames: bytes) -> None:
        """Send these frames on the live socket as they are. Without any: a batch of garbage, also in the replay."""

        def send() -> None:
            if frames:
                self._send(frames)
            else:
                self._send_batch(b"\xc1 not msgpack")

        self._do(send)

    def forget(self, keep: int = 0) -> None:
        """Lose the history: a replay has only the last ``keep`` batches."""
        self._do(lambda: [self._buffer.popleft() for _ in range(max(0, len(self._buffer) - keep))])

    def deafen(self, deaf: bool = True) -> None:
        """Answer no replay request, or answer them again."""
        self._do(lambda: setattr(self, "_deaf", deaf))

    def stop(self) -> None:
        """The publisher dies; its addresses stay held."""
        self._do(self._close)

    def restart(self) -> None:
        """A new process at the same addresses: numbers from 0, an empty cache and no history."""

        def restart() -> None:
            self._close()
            self.next_seq = 0
            self.cache.clear()
            self._buffer.clear()
            self._drop = 0
            self._open()

        self._do(restart)

    # -- life

    def start(self) -> FakeKvPublisher:
        """Open the sockets; ``with`` does it for you."""
        if self._thread is not None:
            raise RuntimeError("this FakeKvPublisher has started already")
        self._thread = threading.Thread(target=self._run, name="vllm-cp-fake-kv", daemon=True)
        self._thread.start()
        try:
            self._do(self._open)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Give back every thread, socket and port. Twice is fine."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping = True
            self._waker.send(b"!")
            thread.join()
        self._waker.close()
        self._woken.close()
        for held in self._held:
            held.release()

    def __enter__(self) -> FakeKvPublisher:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- in the thread

    def _do(self, deed: Callable[[], T]) -> T:
        if self._thread is None:
            raise RuntimeError("this FakeKvPublisher is not running: use it in a with statement, or call start()")
        done: Future[T] = Future()
        self._orders.put((deed, done))
        self._waker.send(b"!")
        return done.result()

    def _run(self) -> None:
        import zmq

        with zmq.Context() as self._context:
            while not self._stopping:
                poller = zmq.Poller()
                poller.register(self._woken.fileno(), zmq.POLLIN)
                for sock in (self._pub, self._router):
                    if sock is not None:
                        poller.register(sock, zmq.POLLIN)
                self._turn(dict(poller.poll()))
            self._close()

    def _turn(self, ready: Mapping[Any, int]) -> None:
        if self._pub is not None and self._pub in ready:
            self._heed_subscribers(self._pub)
        if self._router is not None and self._router in ready:
            self._answer(self._router)
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        while not self._orders.empty():
            deed, done = self._orders.get()
            try:
                done.set_result(deed())
            except Exception as error:  # noqa: BLE001  (the caller raises it)
                done.set_exception(error)

    def _open(self) -> None:
        import zmq

        assert self._context is not None
        # XPUB is PUB that also says who subscribes.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.set(zmq.XPUB_VERBOSER, 1)
        self._pub.set(zmq.SNDHWM, 100_000)
        self._open_at(self._pub, self._live_address, connect=self._connect)
        if self._replay_address is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set(zmq.SNDHWM, 0)
            self._open_at(self._router, self._replay_address, connect=False)

    @staticmethod
    def _open_at(sock: zmq.Socket[bytes], address: str, *, connect: bool) -> None:
        import zmq

        sock.set(zmq.LINGER, 0)
        sock.set(zmq.IPV6, 1)
        deadline = time.monotonic() + _REBIND_S
        while True:
            try:
                (sock.connect if connect else sock.bind)(address)
            except zmq.ZMQError as error:
                # A socket that was closed lets go of its address a moment later.
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            else:
                return

    def _close(self) -> None:
        for sock in (self._pub, self._router):
            if sock is not None:
                sock.close(0)
        self._pub = self._router = None
        with self._changed:
            self._subscribers = 0
            self._changed.notify_all()

    def _heed_subscribers(self, pub: zmq.Socket[bytes]) -> None:
        message = pub.recv()
        with self._changed:
            self._subscribers += 1 if message[:1] == b"\1" else -1
            self._changed.notify_all()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3:
            return  # malformed: the real one says nothing either
        client, _, start = frames
        first = int.from_bytes(start, "big")
        self.replay_requests.append(first)
        if self._deaf:
            return
        for seq, payload in self._buffer:
            if seq >= first:
                topic = [self._topic] if self._replay_topic else []
                router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), payload])
        router.send_multipart([client, b"", *([b""] if self._replay_topic else []), _END_OF_REPLAY, b""])

    def _publish_if(self, events: Sequence[Mapping[str, Any]]) -> int | None:
        return self._publish(events) if events else None

    def _publish(self, events: Sequence[Any]) -> int:
        import msgspec

        laid = [list(event.values()) if self._is_array(event) else event for event in events]
        batch: Any = [time.time(), laid, self._stamp]
        if self._layout is KvLayout.BATCH_MAP:
            batch = dict(zip(("ts", "events", "data_parallel_rank"), batch, strict=True))
        return self._send_batch(msgspec.msgpack.encode(batch))

    def _is_array(self, event: Any) -> bool:
        return self._layout is KvLayout.ARRAY and isinstance(event, Mapping)

    def _send_batch(self, payload: bytes) -> int:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self._buffer.append((seq, payload))
        if self._drop:
            self._drop -= 1
        else:
            self._send([self._topic, seq.to_bytes(8, "big"), payload])
        return seq

    def _send(self, frames: Sequence[bytes]) -> None:
        if self._pub is not None:  # a dead one publishes nothing, and nobody hears of it
            self._pub.send_multipart(frames)
