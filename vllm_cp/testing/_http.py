"""FakeHttp: the HTTP side of a fake worker, on a real port inside the test's own process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal, TypeVar
from uuid import uuid4

from vllm_cp.testing._http_group import FakeEngine, FakeGroup
from vllm_cp.testing._http_pages import HttpFacts, Reply, metrics, scaling
from vllm_cp.testing._http_server import HttpServer, Script, SeenRequest
from vllm_cp.testing._ports import HeldPort

__all__ = ["FakeGroup", "FakeHttp", "SeenRequest"]

T = TypeVar("T")

_ENGINE_FACTS = frozenset({"generation_tokens", "running", "waiting", "kv_cache_usage", "status", "info", "error"})


class FakeHttp:
    """A scripted HTTP server of a vLLM worker: health, metrics, fault tolerance, elastic scaling.

    ::

        with FakeHttp(engines=[0]) as server, FaultTolerance(server.url) as client:
            server.fall_ill(info="NCCL time-out")
            assert client.status().engines[0].state is EngineState.UNHEALTHY

    It has a thread of its own and none of your event loop; its verbs are plain calls that take effect before they
    return, and may be made from any thread. Requests that hang hold no thread. ``kind="rust"`` is the Rust frontend:
    metrics in OpenMetrics, no fault tolerance, no scaling.

    Fault tolerance behaves as in vLLM: an unhealthy engine dies when no instruction came in time; an instruction to
    one that is not unhealthy is accepted all the same, and refused in the status; with a ``FakeGroup`` nothing happens
    before every rank's server was told.
    """

    def __init__(
        self,
        *,
        kind: Literal["python", "rust"] = "python",
        engines: Sequence[int] = (0,),
        group: FakeGroup | None = None,
        fault_tolerance: bool = True,
        instructions: Sequence[str] = ("retry",),
        engine_recovery_timeout_s: float = 120.0,
        prefix: Literal["", "/v1"] = "",
        api_key: str | None = None,
        tls: Any = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """
        Args:
            kind: which of the two real servers to be.
            engines: numbers of the engines behind it; with an external load balancer one, the rank.
            group: the ranks that act together; by default this server acts alone.
            fault_tolerance: whether it was started with --enable-fault-tolerance.
            instructions: those that this version knows.
            engine_recovery_timeout_s: how long an unhealthy engine lives.
            prefix: what stands before the control routes in this version.
            api_key: guards what is under /v1, and nothing else.
            tls: files of the server side, ``TlsFiles`` or alike; ``None`` is plaintext.
            host: address to listen on.
            port: port to listen on; 0 takes a free one and keeps it.
        """
        self._rust = kind == "rust"
        self._engines = [FakeEngine(number=number) for number in engines]
        self._group = group
        self._lock = group.lock if group is not None else threading.RLock()
        self._instructions = tuple(instructions)
        self._recovery_s = engine_recovery_timeout_s
        self._key = api_key
        self._scheme = "http" if tls is None else "https"
        self._host = host
        self._port = port
        self._held: HeldPort | None = None
        self._facts = HttpFacts()
        self._server = HttpServer(self._reply, tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._routes: dict[str, tuple[str, Callable[[SeenRequest], Reply]]] = {
            "/health": ("GET", lambda _: Reply(200 if self._facts.healthy else 503, b"", "")),
            "/metrics": ("GET", lambda _: metrics(self._rust, self._facts, self._engines)),
            "/kv_event_sources": ("GET", lambda _: Reply.json(200, self._facts.kv_event_sources)),
        }
        if fault_tolerance and not self._rust:
            self._routes[f"{prefix}/fault_tolerance/status"] = ("GET", self._status)
            self._routes[f"{prefix}/fault_tolerance/apply"] = ("POST", self._apply)
        if not self._rust:
            self._routes[f"{prefix}/is_scaling_elastic_ep"] = ("POST", self._scaling)

    # -- life

    @property
    def url(self) -> str:
        """The base URL, the same before and after a restart."""
        if not self._number:
            raise RuntimeError("this FakeHttp has not started: use it in a with statement, or call start()")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._number}"

    @property
    def calls(self) -> list[SeenRequest]:
        """Every request so far, oldest first, refused and unanswered ones included."""
        return list(self._server.calls)

    def wait_for_call(self, path: str, *, count: int = 1, timeout_s: float = 5.0) -> list[SeenRequest]:
        """Block until ``path`` (``*`` is any, the prefix does not matter) was asked for ``count`` times since the
        server was made, and return those requests.

        Blocks its thread: in a coroutine use ``await asyncio.to_thread(server.wait_for_call, "/health")``.
        Raises TimeoutError after ``timeout_s`` seconds."""
        return self._run(self._server.wait_for_call(path, count, timeout_s))

    def start(self) -> FakeHttp:
        """Open the port; ``with`` does it for you. Raises OSError when the port given is taken."""
        if self._loop is not None:
            raise RuntimeError("this FakeHttp has started already")
        if not self._port:
            self._held = HeldPort(self._host)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-cp-fake-http", daemon=True)
        self._thread.start()
        if self._group is not None:
            self._group.join(self._engines)
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop, if it still runs, and give back its thread and sockets. Closing twice is fine."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._run(self._server.shut())
        if self._group is not None:
            self._group.leave(self._engines)
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        if self._held is not None:
            self._held.release()
            self._held = None

    def __enter__(self) -> FakeHttp:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> FakeHttp:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # -- verbs

    def set(self, *, engine: int | None = None, **facts: Any) -> None:
        """Change what the server says, by name.

        - of every engine, or of one: ``generation_tokens``, ``running``, ``waiting``, ``kv_cache_usage`` (0 to 1), and,
          to script the status directly, ``status``, ``info`` and ``error``
        - of the server: ``healthy``, ``scaling`` (a ``ScalingState``, or ``None``: no such route),
          ``kv_event_sources``, ``process_start`` (Python server), ``weight_updates`` and ``sleep_operations`` in flight
          (Rust frontend)

        Raises TypeError for a name that does not exist, or not on this kind of server."""
        known = {one.name for one in fields(HttpFacts)} | _ENGINE_FACTS
        known -= {"process_start"} if self._rust else {"weight_updates", "sleep_operations"}
        for name in facts:
            if name not in known:
                raise TypeError(f"no fact {name!r} on this kind of server; there are {', '.join(sorted(known))}")
        chosen = self._chosen(engine)

        async def change() -> None:
            with self._lock:
                for name, value in facts.items():
                    for owner in chosen if name in _ENGINE_FACTS else [self._facts]:
                        setattr(owner, name, value)

        self._run(change())

    def fall_ill(self, engine: int | None = None, *, info: str = "engine loop raised an exception") -> None:
        """Make the engines, or one, unhealthy. They die when no instruction saves them in time."""

        async def change() -> None:
            with self._lock:
                for one in self._chosen(engine):
                    one.status, one.info, one.told = "unhealthy", info, None
                    one.illness += 1
                    asyncio.get_running_loop().call_later(self._recovery_s, self._give_up, one, one.illness)

        self._run(change())

    def die(self, engine: int | None = None, *, info: str = "engine process exited") -> None:
        """Lose the engines, or one, for good."""

        async def change() -> None:
            with self._lock:
                for one in self._chosen(engine):
                    one.status, one.info, one.told = "dead", info, None

        self._run(change())

    def fail(self, path: str, status: int, body: object = b"", *, times: int | None = None) -> None:
        """Answer ``path`` (``*`` is any, the prefix does not matter) with a status instead, ``times`` times or until
        ``heal()``. ``body`` is bytes, text, or what JSON can say."""
        if isinstance(body, (bytes, str)):
            reply = Reply(status, body.encode() if isinstance(body, str) else body, "text/plain")
        else:
            reply = Reply.json(status, body)
        self._script(path, Script(reply, times=times))

    def delay(self, path: str, s: float, *, times: int | None = None) -> None:
        """Answer ``path`` only after ``s`` seconds, ``times`` times or until ``heal()``. An hour hangs."""
        self._script(path, Script(delay_s=s, times=times))

    def heal(self, path: str | None = None) -> None:
        """Forget what ``fail`` and ``delay`` said about ``path``, or about all paths."""

        async def change() -> None:
            self._server.forget(path)

        self._run(change())

    def stop(self) -> None:
        """Break all connections and refuse new ones, on the same port."""
        self._run(self._server.shut())

    def restart(self) -> None:
        """A new process on the same port: engines healthy, counters at zero, scripts gone."""

        async def change() -> None:
            await self._server.shut()
            with self._lock:
                for engine in self._engines:
                    fresh = FakeEngine(number=engine.number, illness=engine.illness + 1)
                    for one in fields(FakeEngine):
                        setattr(engine, one.name, getattr(fresh, one.name))
            self._facts.healthy = True
            self._server.forget(None)
            await self._open()

        self._run(change())

    # -- routes

    def _status(self, _: SeenRequest) -> Reply:
        with self._lock:
            engines = [engine.says() for engine in self._engines]
        return Reply.json(200, {"schema_version": 1, "total_engines": len(engines), "engines": engines})

    def _apply(self, request: SeenRequest) -> Reply:
        try:
            said = json.loads(request.body)
        except ValueError:
            return Reply.json(400, {"detail": "Invalid JSON format"})
        if not isinstance(said, dict) or not said.get("instruction") or not isinstance(said.get("params"), dict):
            return Reply.json(400, {"detail": "'instruction' and 'params' are required."})
        if said["instruction"] not in self._instructions:
            return Reply.json(400, {"detail": f"Invalid instruction: '{said['instruction']}'."})
        request_id = str(uuid4())
        if self._group is not None:
            self._group.tell(self._engines, said["instruction"], request_id)
        else:
            alone = FakeGroup()
            alone.join([engine for engine in self._engines if engine.status == "unhealthy"])
            alone.tell(self._engines, said["instruction"], request_id)
        message = "Request accepted; poll the status for updates."
        return Reply.json(202, {"message": message, "request_id": request_id})

    def _scaling(self, _: SeenRequest) -> Reply:
        state = self._facts.scaling
        return self._not_found() if state is None else scaling(state)

    def _not_found(self) -> Reply:
        return Reply(404, b"", "") if self._rust else Reply.json(404, {"detail": "Not Found"})

    def _reply(self, request: SeenRequest) -> Reply:
        guarded = self._key is not None and request.path.startswith("/v1")
        if guarded and request.headers.get("authorization") != f"Bearer {self._key}":
            return Reply.json(401, {"error": "Unauthorized"})
        verb, answer = self._routes.get(request.path, (request.method, lambda _: self._not_found()))
        return answer(request) if verb == request.method else Reply.json(405, {"detail": "Method Not Allowed"})

    # -- on the loop

    async def _open(self) -> None:
        await self._server.open(self._host, self._number)

    def _give_up(self, engine: FakeEngine, illness: int) -> None:
        with self._lock:
            if engine.status == "unhealthy" and engine.illness == illness:
                engine.status, engine.told = "dead", None

    # -- from any thread

    @property
    def _number(self) -> int:
        return self._port or (self._held.number if self._held is not None else 0)

    def _script(self, path: str, script: Script) -> None:
        async def change() -> None:
            self._server.script(path, script)

        self._run(change())

    def _chosen(self, engine: int | None) -> list[FakeEngine]:
        if engine is None:
            return self._engines
        chosen = [one for one in self._engines if one.number == engine]
        if not chosen:
            raise ValueError(f"no engine {engine}: this server has {[one.number for one in self._engines]}")
        return chosen

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("this FakeHttp is not running: use it in a with statement, or call start()")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
