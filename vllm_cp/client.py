"""ControlClient: the synchronous client."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from vllm_cp import _channel, _rpc, _status
from vllm_cp._attempts import Attempts, Desk, RpcHook
from vllm_cp._rpc import Call
from vllm_cp.config import DEFAULT_TARGET, Connection
from vllm_cp.errors import ClientClosed, ControlError
from vllm_cp.models.health import HealthStatus

if TYPE_CHECKING:
    from vllm_cp.models.generated import Generated
    from vllm_cp.models.kv_source import KvEventSource
    from vllm_cp.models.lora import LoraAdapter
    from vllm_cp.models.model import ModelInfo
    from vllm_cp.models.pause import PauseMode
    from vllm_cp.models.server import ServerInfo

__all__ = ["ControlClient"]

T = TypeVar("T")

#: Streams that are being read, and who reads them.
_reading: dict[object, threading.Thread] = {}
_leaving = threading.Event()


class ControlClient:
    """One worker's control plane. Thread-safe; not usable in a forked child; close it, or use ``with``.

    Every unary call sends its deadline (``timeout_s`` seconds, the connection's by default). ``rank`` travels as
    ``x-data-parallel-rank``; of the calls here vLLM heeds it for ``generate`` alone, since 0.28. Reads are asked again
    on UNAVAILABLE inside that deadline, changes never. Failures are ``ControlError`` by meaning: ``vllm_cp.errors``.
    """

    def __init__(self, target: str | Connection = DEFAULT_TARGET, /, *, on_rpc: RpcHook | None = None) -> None:
        """``target`` in any form that ``Connection`` takes; ``on_rpc`` is called after each attempt of each call."""
        self._desk = Desk(target, on_rpc)
        self._channel = _channel.channel(self._desk.connection)
        self._ready: dict[str, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    @property
    def target(self) -> str:
        """The worker, in canonical spelling."""
        return self._desk.target

    def close(self) -> None:
        """Close the channel; calls in flight end, iterators stop. Closing twice is fine."""
        self._desk.closed = True
        if not self._desk.inherited:
            self._channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def check(self, service: str = "", *, timeout_s: float | None = None, rank: int | None = None) -> HealthStatus:
        """What the health service says of ``service``. An unknown name is SERVICE_UNKNOWN, not an error.

        It is the frontend's word about itself: it goes on saying SERVING while an engine is frozen or gone.
        Source: Health.Check, since vLLM 0.27."""
        return self._run(_rpc.check(service), timeout_s, rank)

    def server_info(self, *, timeout_s: float | None = None, rank: int | None = None) -> ServerInfo:
        """Version, identity, parallelism, limits and KV-cache blocks.

        Answered from the frontend's memory, also when the engine is dead.
        Source: Control.GetServerInfo, since vLLM 0.27."""
        return self._run(_rpc.server_info(), timeout_s, rank)

    def model_info(self, *, timeout_s: float | None = None, rank: int | None = None) -> ModelInfo:
        """The model, its names and capabilities.

        Answered from the frontend's memory. Source: Control.GetModelInfo, since vLLM 0.27."""
        return self._run(_rpc.model_info(), timeout_s, rank)

    def kv_event_sources(self, *, timeout_s: float | None = None, rank: int | None = None) -> tuple[KvEventSource, ...]:
        """Where each rank publishes its KV-cache events; empty when events are off.

        ``endpoint`` is as advertised, ``connect_to`` is usable from here, ``reason`` says why there is none.
        Source: Control.GetKvEventSources, since vLLM 0.27."""
        return self._run(_rpc.kv_event_sources(self._desk.address.host), timeout_s, rank)

    def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Abort requests by the ids their clients gave them; over HTTP that is ``cmpl-<X-Request-Id>`` and its like.

        Idempotent. The server does not say how many it found, and ignores ids it does not know. Never retried.
        Source: Control.Abort, since vLLM 0.27."""
        return self._run(_rpc.abort(request_ids), timeout_s, rank)

    def is_paused(self, *, timeout_s: float | None = None, rank: int | None = None) -> bool:
        """Whether generation is paused: a round trip to every engine, so an answer proves that all of them answer.

        Raises RanksDisagree when they are in different states. Source: Control.IsPaused, since vLLM 0.28."""
        return self._run(_rpc.is_paused(), timeout_s, rank)

    def is_sleeping(self, *, timeout_s: float | None = None, rank: int | None = None) -> bool:
        """Whether the worker sleeps; also true while it is only paused. A round trip to every engine.

        Source: Control.IsSleeping, since vLLM 0.28."""
        return self._run(_rpc.is_sleeping(), timeout_s, rank)

    def weight_version(self, *, timeout_s: float | None = None, rank: int | None = None) -> str:
        """The name of the weights in use. A round trip to every engine.

        Source: Control.GetWeightVersion, since vLLM 0.28."""
        return self._run(_rpc.weight_version(), timeout_s, rank)

    def pause(
        self, *, mode: PauseMode, clear_cache: bool, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Stop generation. Both choices are yours: the server's own defaults abort requests and drop the cache.

        With ``PauseMode.WAIT`` the call returns when the last request has finished; one that runs out of time leaves
        the worker paused. Never retried. Source: Control.PauseGeneration, since vLLM 0.28."""
        return self._run(_rpc.pause(mode, clear_cache), timeout_s, rank)

    def resume(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Go on generating. Blocks behind a pending pause. Never retried.

        Source: Control.ResumeGeneration, since vLLM 0.28."""
        return self._run(_rpc.resume(), timeout_s, rank)

    def sleep(self, *, level: int, mode: PauseMode, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Put the worker to sleep: level 1 keeps the weights in host memory, level 2 drops them. Never retried.

        Raises PreconditionFailed when vLLM runs without --enable-sleep-mode. Source: Control.Sleep, since vLLM 0.28."""
        return self._run(_rpc.sleep(level, mode), timeout_s, rank)

    def wake_up(self, tags: Iterable[str] = (), *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Wake the worker, or only the parts named by ``tags`` (``weights``, ``kv_cache``). Never retried.

        Source: Control.WakeUp, since vLLM 0.28."""
        return self._run(_rpc.wake_up(tags), timeout_s, rank)

    def list_loras(self, *, timeout_s: float | None = None, rank: int | None = None) -> tuple[LoraAdapter, ...]:
        """The LoRA adapters loaded now. Source: Control.ListLoras, since vLLM 0.29."""
        return self._run(_rpc.list_loras(), timeout_s, rank)

    def load_lora(
        self, name: str, path: str, *, timeout_s: float | None = None, rank: int | None = None
    ) -> LoraAdapter:
        """Load an adapter from a path on the worker's file system. Never retried.

        Source: Control.LoadLora, since vLLM 0.29."""
        return self._run(_rpc.load_lora(name, path), timeout_s, rank)

    def unload_lora(self, name: str, *, timeout_s: float | None = None, rank: int | None = None) -> LoraAdapter:
        """Unload an adapter. Never retried. Source: Control.UnloadLora, since vLLM 0.29."""
        return self._run(_rpc.unload_lora(name), timeout_s, rank)

    def init_weight_transfer_engine(
        self, init_info: Mapping[str, Any], *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Prepare weight transfer; ``init_info`` travels as JSON. Never retried.

        Source: Control.InitWeightTransferEngine, since vLLM 0.28."""
        return self._run(_rpc.init_weight_transfer_engine(init_info), timeout_s, rank)

    def start_weight_update(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Begin a weight update. Never retried. Source: Control.StartWeightUpdate, since vLLM 0.28."""
        return self._run(_rpc.start_weight_update(), timeout_s, rank)

    def start_draft_weight_update(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Begin a weight update of the draft model. Never retried.

        Source: Control.StartDraftWeightUpdate, since vLLM 0.28."""
        return self._run(_rpc.start_draft_weight_update(), timeout_s, rank)

    def update_weights(
        self, update_info: Mapping[str, Any], *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """Transfer weights; ``update_info`` travels as JSON. Never retried.

        Source: Control.UpdateWeights, since vLLM 0.28."""
        return self._run(_rpc.update_weights(update_info), timeout_s, rank)

    def finish_weight_update(
        self, version: str | None = None, *, timeout_s: float | None = None, rank: int | None = None
    ) -> None:
        """End a weight update, naming the new weights if ``version`` is given. Never retried.

        Source: Control.FinishWeightUpdate, since vLLM 0.28."""
        return self._run(_rpc.finish_weight_update(version), timeout_s, rank)

    def update_weight_version(self, version: str, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Name the weights in use. Never retried. Source: Control.UpdateWeightVersion, since vLLM 0.28."""
        return self._run(_rpc.update_weight_version(version), timeout_s, rank)

    def generate(
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
        return self._run(_rpc.generate(prompt, max_tokens, request_id), timeout_s, rank)

    def shutdown(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        """Ask the frontend to shut itself and its engine down; acknowledged before it happens. Never retried.

        Raises PreconditionFailed when the frontend does not manage its engine.
        Source: Control.Shutdown, since vLLM 0.32."""
        return self._run(_rpc.shutdown(), timeout_s, rank)

    def watch(  # noqa: PLR0912  (one race between a stream and a Check, read top to bottom)
        self, service: str = "", *, check_every_s: float = 5.0
    ) -> Iterator[HealthStatus]:
        """The health of ``service``, now and at each change. Ends when the server ends the stream, raises otherwise.

        A stream that ends after NOT_SERVING is a shutdown or a death. While it is quiet a Check goes out every
        ``check_every_s`` seconds, so a peer that vanished without a word is noticed within four times that.
        Source: Health.Watch, since vLLM 0.27.
        """
        desk = self._desk
        desk.open()
        call = _rpc.watch(service)
        stream = self._channel.unary_stream(call.path, None, None)(
            call.request, metadata=desk.metadata(None, call.method)
        )
        seen: SimpleQueue[bytes | HealthStatus | Exception | None] = SimpleQueue()
        _reading[stream] = _in_background(_pump, stream, seen)
        checking = overtaken = False
        last: HealthStatus | None = None
        try:
            while True:
                try:
                    news = seen.get(timeout=check_every_s)
                except Empty:
                    if not checking:
                        checking = True
                        _in_background(self._check_into, seen, service, 3 * check_every_s)
                    continue
                if news is None:
                    return
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, bytes):
                    status = desk.read(call, news)
                    overtaken = checking
                else:
                    status, stale = news, overtaken
                    checking = overtaken = False
                    if stale:  # the stream spoke while this Check was on its way, and knows better
                        continue
                if status != last:
                    last = status
                    yield status
        except grpc.RpcError as failed:
            if desk.closed or _leaving.is_set():
                return
            raise desk.meaning(call, failed) from failed
        except ClientClosed:
            return
        finally:
            if not desk.inherited:
                _reading.pop(stream, None)
                stream.cancel()  # type: ignore[no-untyped-call]

    def _check_into(
        self, seen: SimpleQueue[bytes | HealthStatus | Exception | None], service: str, timeout_s: float
    ) -> None:
        try:
            seen.put(self.check(service, timeout_s=timeout_s))
        except (ControlError, ClientClosed) as error:
            seen.put(error)

    def _run(self, call: Call[T], timeout_s: float | None, rank: int | None) -> T:
        desk = self._desk
        attempts = Attempts(desk, call, timeout_s)
        metadata = desk.metadata(rank, call.method)
        while True:
            remaining = attempts.begin()
            try:
                answer = self._method(call.path)(call.request, timeout=remaining, metadata=metadata)
            except grpc.RpcError as failed:
                desk.open()
                error = attempts.failure(failed)
                pause = attempts.pause_before_next(error)
                if pause is None:
                    if _status.tls_suspected(error):
                        error = desk.tls_failed(error, _channel.why_tls_fails(desk.connection, attempts.remaining_s))
                    return attempts.settle(error)
            except ValueError:
                desk.open()  # the channel was closed between begin() and the call
                raise
            else:
                return attempts.answer(answer)
            time.sleep(pause)

    def _method(self, path: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        method = self._ready.get(path)
        if method is None:
            method = self._ready[path] = self._channel.unary_unary(path, None, None)
        return method


def _pump(stream: Iterator[bytes], seen: SimpleQueue[bytes | HealthStatus | Exception | None]) -> None:
    try:
        for message in stream:
            seen.put(message)
        seen.put(None)
    except grpc.RpcError as error:
        seen.put(error)


def _in_background(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True, name="vllm-cp-watch")
    thread.start()
    return thread


@atexit.register
def _let_go() -> None:
    """End streams that nobody closed, while their readers can still run.

    The interpreter stops daemon threads wherever they stand. A reader that stood in the stream's lock would hold up
    whoever finalises the stream, and with it the end of the process, for ever.
    """
    _leaving.set()
    for stream, reader in list(_reading.items()):
        if reader.is_alive():  # never in a forked child, whose streams are its parent's
            stream.cancel()  # type: ignore[attr-defined]
            reader.join(1.0)
