"""What a test can do to a fake worker: the same verbs in this process and in a fleet's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from vllm_cp.models.health import HealthStatus
from vllm_cp.testing._seen import SeenCall

__all__ = ["Controls"]


class Controls:
    """The verbs. Each takes effect before it returns, may be called from any thread, and takes well under a
    millisecond, except where it says that it waits.

    Methods are named as you like: ``IsPaused``, ``Control.IsPaused`` or ``/vllm.Control/IsPaused``.
    """

    @property
    def target(self) -> str:
        """``host:port``, the same before and after a restart."""
        raise NotImplementedError

    def _do(self, verb: str, /, **arguments: Any) -> Any:
        raise NotImplementedError

    @property
    def calls(self) -> list[SeenCall]:
        """Every call so far, oldest first, refused and unanswered ones included. A restart does not forget them."""
        calls: list[SeenCall] = self._do("calls")
        return calls

    def wait_for_call(self, method: str, *, count: int = 1, timeout_s: float = 5.0) -> Sequence[SeenCall]:
        """Block until ``method`` has been called ``count`` times since the worker was made, and return those calls.

        Blocks its thread: in a coroutine use ``await asyncio.to_thread(worker.wait_for_call, "Generate")``.
        Raises TimeoutError after ``timeout_s`` seconds."""
        calls: Sequence[SeenCall] = self._do("wait_for_call", method=method, count=count, timeout_s=timeout_s)
        return calls

    def set(self, *, rank: int | None = None, **facts: Any) -> None:
        """Change what the worker is or says, by name.

        Any field of ``ServerInfo``, ``Parallelism``, ``RlCapabilities`` or ``ModelInfo`` (``total_kv_blocks=0`` and
        ``None`` alike are "unknown" on the wire), and:

        - ``paused``, ``sleeping`` (bool) and ``weight_version`` (str): of all engines, or of one ``rank``, which makes
          ranks disagree
        - ``token_interval_s``: seconds between two generated tokens; 0 generates all at once
        - ``managed`` (bool): whether Shutdown is possible
        - ``lora_path_prefixes``: where adapters may come from; ``()`` is a server that was never configured for it
        - ``kv_sources``: ``KvEventSource`` values; empty is "events off"

        Fields that the worker's version does not have yet stay off the wire. Raises TypeError for a name that does
        not exist and for a value that does not fit."""
        self._do("set", facts=facts, rank=rank)

    def health(self, status: HealthStatus | str, service: str | None = None) -> None:
        """Change the word of the health service; watches hear of it. ``None``: all names move together, as they do
        on the real server; else one of ``""``, ``vllm.Inference`` and ``vllm.Control``."""
        self._do("health", status=HealthStatus(status), service=service)

    def fail(self, method: str, code: grpc.StatusCode | str, detail: str = "", *, times: int | None = None) -> None:
        """Answer ``method`` with a status instead, ``times`` times or until ``heal()`` or a restart."""
        name = code.name if isinstance(code, grpc.StatusCode) else code
        if name == "OK" or name not in grpc.StatusCode.__members__:
            raise ValueError(f"{code!r} is not the name of a gRPC error status; write for example UNAVAILABLE")
        self._do("fail", method=method, code=name, detail=detail, times=times)

    def delay(self, method: str, s: float, *, times: int | None = None) -> None:
        """Answer ``method`` only after ``s`` seconds, ``times`` times or until ``heal()`` or a restart."""
        self._do("delay", method=method, seconds=s, times=times)

    def heal(self, method: str | None = None) -> None:
        """Forget what ``fail`` and ``delay`` said about ``method``, or about all methods."""
        self._do("heal", method=method)

    def hang(self, rank: int | None = None) -> None:
        """Freeze the engines, or one: health stays SERVING and discovery answers, but every round trip to an engine
        and every generation waits, and answers after ``unhang()``."""
        self._do("hang", rank=rank)

    def unhang(self) -> None:
        """Thaw all engines."""
        self._do("unhang")

    def freeze(self) -> None:
        """Freeze the frontend itself: connections are accepted, nothing is answered, watches fall silent."""
        self._do("freeze")

    def thaw(self) -> None:
        """Thaw the frontend; calls that still wait are answered."""
        self._do("thaw")

    def die(self, *, reported: bool, rank: int | None = None) -> None:
        """Lose the engines, or one of them.

        ``reported``: the engine says so before it goes. Health turns NOT_SERVING for good while watches stay open;
        round trips and generations end with INTERNAL "… engine core reported fatal failure"; discovery, Abort and
        ListLoras go on answering. One rank takes them all down.

        Not reported: nobody notices. Health says SERVING for ever and whatever needs the engine hangs until the
        caller's deadline; with more ranks, generations go on on the others, unless they land on the dead one. (The
        real server may also answer such calls with INTERNAL "… transport error …" after the first; script that with
        ``fail``.) Only ``restart()`` helps."""
        self._do("die", reported=reported, rank=rank)

    def drain(self, s: float, *, busy: bool = True) -> None:
        """SIGTERM with a shutdown time-out of ``s`` seconds: NOT_SERVING, watches end OK, generations in flight go on,
        new calls of any kind hang. Then ``stop()``. Returns at once.

        A real worker stops as soon as nothing is in flight; ``busy=False`` does the same, by default the fake behaves
        as if some request ran until the end. (The first Check during a drain may be answered NOT_FOUND by the real
        server; ``fail("Check", "NOT_FOUND", "service not registered", times=1)`` does that.)"""
        self._do("drain", seconds=s, busy=busy)

    def stop(self) -> None:
        """SIGTERM without a drain: calls and watches in flight break off with UNAVAILABLE, and the port refuses.

        (The real server gets NOT_SERVING out to watches first in about half of the cases; call
        ``health("NOT_SERVING")`` before for that.) Waits until the port is closed, some milliseconds."""
        self._do("stop")

    def restart(self, *, instance_id: str | None = None) -> None:
        """A new process on the same port, after a ``stop()`` if it still runs: SERVING, with engines alive and awake,
        no adapters, weights "default", and another instance id (a random one, or ``instance_id``).

        Facts from ``set()`` stay as they are, apart from the state of the engines; scripts of ``fail`` and ``delay``
        are gone. Waits until the port is open, some milliseconds."""
        self._do("restart", instance_id=instance_id)
