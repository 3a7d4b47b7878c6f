"""AsyncControlClient: the asyncio client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from vllm_cp import _channel, _rpc, _status
from vllm_cp._attempts import Attempts, Desk, RpcHook
from vllm_cp._rpc import Call
from vllm_cp.config import DEFAULT_TARGET, Connection
from vllm_cp.errors import ClientClosed
from vllm_cp.models.generated import Generated
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.kv_source import KvEventSource
from vllm_cp.models.lora import LoraAdapter
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.pause import PauseMode
from vllm_cp.models.server import ServerInfo

__all__ = ["AsyncControlClient"]

T = TypeVar("T")

#: What gRPC needs to see the end of a stream that was given up, seconds.
_FAREWELL_S = 0.02


class AsyncControlClient:
    """One worker's control plane for asyncio: the same names and signatures as ``ControlClient``.

    The client may be made anywhere and used from several event loops, one after another (two ``asyncio.run`` calls)
    or side by side: each loop gets its own channel, and ``close`` ends what is in flight on the loop it runs on. Not
    usable in a forked child. Close it, or use ``async with``.
    """

    def __init__(self, target: str | Connection = DEFAULT_TARGET, /, *, on_rpc: RpcHook | None = None) -> None:
        """``target`` in any form that ``Connection`` takes; ``on_rpc`` is called after each attempt of each call."""
        self._desk = Desk(target, on_rpc)
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    @property
    def target(self) -> str:
        """The worker, in canonical spelling."""
        return self._desk.target

    async def close(self) -> None:
        """Close the channel; calls in flight end, iterators stop. Closing twice is fine."""
        self._desk.closed = True
        lines, self._lines = self._lines, WeakKeyDictionary()
        line = lines.pop(asyncio.get_running_loop(), None)
        if line is not None and not self._desk.inherited:
            await line.channel.close(None)

    async def __aenter__(self) -> AsyncControlClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def check(
        self, service: str = "", *, timeout_s: float | None = None, rank: int | None = None
    ) -> HealthStatus:
        """What the health service says of ``service``. An unknown name is SERVICE_UNKNOWN, not an error.

        It is the frontend's word about itself: it goes on saying SERVING while an engine is frozen or gone.
        Source: Health.Check, since vLLM 0.27."""
        return await self._run(_rpc.check(service), timeout_s, rank)

    async def server_info(self, *, timeout_s: float | None = None, rank: int | None = None) -> ServerInfo:
        """Version, identity, parallelism, limits and KV-cache blocks.

        Answered from the frontend's memory, also when the engine is dead.
        Source: Control.GetServerInfo, since vLLM 0.27."""
        return await self._run(_rpc.server_info(), timeout_s, rank)

    async def model_info(self, *, timeout_s: float | None = None, rank: int | None = None) -> ModelInfo:
        """The model, its names and capabilities.

        Answered from the frontend's memory. Source: Control.GetModelInfo, since vLLM 0.27."""
        return await self._run(_rpc.model_info(), timeout_s, rank)

    async def kv_event_sources(
        self, *, timeout_s: float | None = None, rank: int | None = None
    ) -> tuple[KvEventSource, ...]:
        """Where each rank publishes its KV-cache events; empty when events are off.

        ``endpoint`` is as advertised, ``connect_to`` is usable from here, ``reason`` says why there is none.
        Source: Control.GetKvEventSources, since vLLM 0.27."""
        return await self._run(_rpc.kv_event_sources(self._desk.address.host), timeout_s, rank)

    async def abort(
        self, request_ids: Iterable[str], *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Abort requests by the ids their clients gave them; over HTTP that is ``cmpl-<X-Request-Id>`` and its like.

        Idempotent. The server does not say how many it found, and ignores ids it does not know. Never retried.
        Source: Control.Abort, since vLLM 0.27."""
        return await self._run(_rpc.abort(request_ids), timeout_s, rank)

    async def is_paused(self, *, timeout_s: float | None = None, rank: int | None = None) -> bool:
        """Whether generation is paused: a round trip to every engine, so an answer proves that all of them answer.

        Raises RanksDisagree when they are in different states. Source: Control.IsPaused, since vLLM 0.28."""
        return await self._run(_rpc.is_paused(), timeout_s, rank)

    async def is_sleeping(self, *, timeout_s: float | None = None, rank: int | None = None) -> bool:
        """Whether the worker sleeps; also true while it is only paused. A round trip to every engine.

        Source: Control.IsSleeping, since vLLM 0.28."""
        return await self._run(_rpc.is_sleeping(), timeout_s, rank)

    async def weight_version(self, *, timeout_s: float | None = None, rank: int | None = None) -> str:
        """The name of the weights in use. A round trip to every engine.

        Source: Control.GetWeightVersion, since vLLM 0.28."""
        return await self._run(_rpc.weight_version(), timeout_s, rank)

    async def pause(
        self, *, mode: PauseMode, clear_cache: bool, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Stop generation. Both choices are yours: the server's own defaults abort requests and drop the cache.

        With ``PauseMode.WAIT`` the call returns when the last request has finished; one that runs out of time leaves
        the worker paused. Never retried. Source: Control.PauseGeneration, since vLLM 0.28."""
        return await self._run(_rpc.pause(mode, clear_cache), timeout_s, rank)

    async def resume(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Go on generating. Blocks behind a pending pause. Never retried.

        Source: Control.ResumeGeneration, since vLLM 0.28."""
        return await self._run(_rpc.resume(), timeout_s, rank)

    async def sleep(
        self, *, level: int, mode: PauseMode, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Put the worker to sleep: level 1 keeps the weights in host memory, level 2 drops them. Never retried.

        Raises PreconditionFailed when vLLM runs without --enable-sleep-mode. Source: Control.Sleep, since vLLM 0.28."""
        return await self._run(_rpc.sleep(level, mode), timeout_s, rank)

    async def wake_up(
        self, tags: Iterable[str] = (), *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Wake the worker, or only the parts named by ``tags`` (``weights``, ``kv_cache``). Never retried.

        Source: Control.WakeUp, since vLLM 0.28."""
        return await self._run(_rpc.wake_up(tags), timeout_s, rank)

    async def list_loras(self, *, timeout_s: float | None = None, rank: int | None = None) -> tuple[LoraAdapter, ...]:
        """The LoRA adapters loaded now. Source: Control.ListLoras, since vLLM 0.29."""
        return await self._run(_rpc.list_loras(), timeout_s, rank)

    async def load_lora(
        self, name: str, path: str, *, timeout_s: float | None = None, rank: int | None = None
    ) -> LoraAdapter:
        """Load an adapter from a path on the worker's file system. Never retried.

        Source: Control.LoadLora, since vLLM 0.29."""
        return await self._run(_rpc.load_lora(name, path), timeout_s, rank)

    async def unload_lora(self, name: str, *, timeout_s: float | None = None, rank: int | None = None) -> LoraAdapter:
        """Unload an adapter. Never retried. Source: Control.UnloadLora, since vLLM 0.29."""
        return await self._run(_rpc.unload_lora(name), timeout_s, rank)

    async def init_weight_transfer_engine(
        self, init_info: Mapping[str, Any], *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Prepare weight transfer; ``init_info`` travels as JSON. Never retried.

        Source: Control.InitWeightTransferEngine, since vLLM 0.28."""
        return await self._run(_rpc.init_weight_transfer_engine(init_info), timeout_s, rank)

    async def start_weight_update(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Begin a weight update. Never retried. Source: Control.StartWeightUpdate, since vLLM 0.28."""
        return await self._run(_rpc.start_weight_update(), timeout_s, rank)

    async def start_draft_weight_update(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Begin a weight update of the draft model. Never retried.

        Source: Control.StartDraftWeightUpdate, since vLLM 0.28."""
        return await self._run(_rpc.start_draft_weight_update(), timeout_s, rank)

    async def update_weights(
        self, update_info: Mapping[str, Any], *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Transfer weights; ``update_info`` travels as JSON. Never retried.

        Source: Control.UpdateWeights, since vLLM 0.28."""
        return await self._run(_rpc.update_weights(update_info), timeout_s, rank)

    async def finish_weight_update(
        self, version: str | None = None, *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """End a weight update, naming the new weights if ``version`` is given. Never retried.

        Source: Control.FinishWeightUpdate, since vLLM 0.28."""
        return await self._run(_rpc.finish_weight_update(version), timeout_s, rank)

    async def update_weight_version(
        self, version: str, *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Name the weights in use. Never retried. Source: Control.UpdateWeightVersion, since vLLM 0.28."""
        return await self._run(_rpc.update_weight_version(version), timeout_s, rank)

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 1,
        request_id: str | None = None,
        timeout_s: float | None = None,
        rank: int | None = None,
    ) -> Generated:
        """A short generation, the proof that a worker really serves. ``prompt`` is text or token ids. Never retried.

        A passed deadline aborts it on the worker. Source: Inference.Generate, since vLLM 0.27."""
        return await self._run(_rpc.generate(prompt, max_tokens, request_id), timeout_s, rank)

    async def shutdown(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Ask the frontend to shut itself and its engine down; acknowledged before it happens. Never retried.

        Raises PreconditionFailed when the frontend does not manage its engine.
        Source: Control.Shutdown, since vLLM 0.32."""
        return await self._run(_rpc.shutdown(), timeout_s, rank)

    async def watch(  # noqa: PLR0912  (one race between a stream and a Check, read top to bottom)
        self, service: str = "", *, check_every_s: float = 5.0
    ) -> AsyncIterator[HealthStatus]:
        """The health of ``service``, now and at each change. Ends when the server ends the stream, raises otherwise.

        A stream that ends after NOT_SERVING is a shutdown or a death. While it is quiet a Check goes out every
        ``check_every_s`` seconds, so a peer that vanished without a word is noticed within four times that.
        Source: Health.Watch, since vLLM 0.27.
        """
        desk = self._desk
        desk.open()
        call = _rpc.watch(service)
        line = self._line()
        stream = line.channel.unary_stream(call.path, None, None)(
            call.request, metadata=desk.metadata(None, call.method)
        )
        reading = asyncio.ensure_future(stream.read())
        checking: asyncio.Future[HealthStatus] | None = None
        overtaken = False
        last: HealthStatus | None = None
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {reading} if checking is None else {reading, checking}
                done, _ = await asyncio.wait(
                    waiting, timeout=_together(check_every_s), return_when=asyncio.FIRST_COMPLETED
                )
                if reading in done:
                    message = reading.result()
                    if not isinstance(message, bytes):  # grpc.aio.EOF
                        return
                    status = desk.read(call, message)
                    reading = asyncio.ensure_future(stream.read())
                    overtaken = checking is not None
                elif checking is not None and checking in done:
                    status, stale = checking.result(), overtaken
                    checking, overtaken = None, False
                    if stale:  # the stream spoke while this Check was on its way, and knows better
                        continue
                else:
                    checking = checking or asyncio.ensure_future(self.check(service, timeout_s=3 * check_every_s))
                    continue
                if status != last:
                    last = status
                    yield status
        except grpc.RpcError as failed:
            if desk.closed:
                return
            raise desk.meaning(call, failed) from failed
        except ClientClosed:
            return
        except asyncio.CancelledError:
            # Closing the channel cancels the read, which is not our caller being cancelled.
            if desk.closed and reading.cancelled() and not _cancelling():
                return
            raise
        finally:
            ended = stream.done() or desk.closed
            stream.cancel()
            left = [task for task in (reading, checking) if task is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if not ended:
                # gRPC sees the end of a call that was given up a moment later, and complains aloud when the event loop
                # is closed by then. It has nothing to wait for.
                await asyncio.sleep(_FAREWELL_S)

    async def _run(self, call: Call[T], timeout_s: float | None, rank: int | None) -> T:
        desk = self._desk
        attempts = Attempts(desk, call, timeout_s)
        metadata = desk.metadata(rank, call.method)
        while True:
            remaining = attempts.begin()
            flight = self._line().method(call.path)(call.request, timeout=remaining, metadata=metadata)
            try:
                answer = await flight
            except grpc.RpcError as failed:
                desk.open()
                error = attempts.failure(failed)
                pause = attempts.pause_before_next(error)
                if pause is None:
                    if _status.tls_suspected(error):
                        limit = attempts.remaining_s
                        why = await asyncio.to_thread(_channel.why_tls_fails, desk.connection, limit)
                        error = desk.tls_failed(error, why)
                    return attempts.settle(error)
            except asyncio.CancelledError:
                # Closing the channel cancels what is in flight, which is not our caller being cancelled.
                if desk.closed and flight.cancelled() and not _cancelling():
                    desk.open()
                raise
            else:
                return attempts.answer(answer)
            await asyncio.sleep(pause)

    def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            # A channel keeps its loop alive, so the channels of loops that are over are dropped by hand.
            for over in [known for known in self._lines if known.is_closed()]:
                del self._lines[over]
            line = self._lines[loop] = _Line(_channel.aio_channel(self._desk.connection))
        return line


class _Line:
    """The channel of one event loop."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._ready: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    def method(self, path: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
        method = self._ready.get(path)
        if method is None:
            method = self._ready[path] = self.channel.unary_unary(path, None, None)
        return method


def _together(seconds: float) -> float:
    """How long to wait in place of ``seconds``: a little less, up to a moment that the watches of others wait for too.

    To wake up for one question costs a process more than the question does, and a fleet is many watches."""
    step = min(0.1, seconds / 10)
    if not 0 < step < math.inf:
        return seconds
    now = asyncio.get_running_loop().time()
    return max(0.0, math.floor((now + seconds) / step) * step - now)


def _cancelling() -> bool:
    """Whether somebody asked the running task itself to stop; Python 3.10 cannot tell, and says no."""
    task = asyncio.current_task()
    asked = getattr(task, "cancelling", None)
    return asked is not None and asked() > 0
