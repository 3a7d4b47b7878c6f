"""The same worker twice, the fake and the genuine one: they take the same verbs and tell when each was done."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.real.fetch import is_fetched
from tests.real.stack import EngineFacts, Moment, Stack
from tests.recovery.pace import IN_CI
from vllm_cp import ControlClient, ControlError, RlCapabilities, ServerInfo
from vllm_cp.testing import FakeHttp, FakeWorker

OLD, NEW = "0.27.0", "0.33.0"
#: Where a rig is wanted: the fake, the genuine one, and either of the oldest version.
FAKE, REAL, FAKE_OLD, REAL_OLD = f"fake-{NEW}", f"real-{NEW}", f"fake-{OLD}", f"real-{OLD}"


def on(*kinds: str) -> pytest.MarkDecorator:
    """Tell the story on these; ``build`` then starts the one whose turn it is."""
    marked = [pytest.param(kind, marks=[pytest.mark.real] if kind.startswith("real") else []) for kind in kinds]
    return pytest.mark.parametrize("build", marked, indirect=True)


def require(version: str) -> None:
    """Skip when the binary is not there; fail instead where a skip would go unseen."""
    if is_fetched(version):
        return
    word = f"no vllm-rs {version} here; fetch it with: python -m tests.real.fetch {version}"
    if IN_CI or os.environ.get("VLLM_CP_REQUIRE_REAL") == "1":
        pytest.fail(word, pytrace=False)
    pytest.skip(word)


class Rig(Protocol):
    """A worker that things happen to. Every verb blocks; call it with ``asyncio.to_thread`` where a loop runs."""

    target: str
    http_url: str

    def die(self, rank: int) -> Moment:
        """A rank reports its own death."""

    def lose(self, rank: int) -> Moment:
        """A rank is killed hard; nobody says so."""

    def hang(self) -> Moment:
        """Every engine stops answering."""

    def unhang(self) -> Moment:
        """And goes on."""

    def kill(self) -> Moment:
        """SIGKILL to the frontend."""

    def terminate(self) -> Moment:
        """SIGTERM, without a drain."""

    def drain(self, seconds: float) -> Moment:
        """SIGTERM, with a drain that takes so long because something still runs."""

    def restart(self) -> Moment:
        """A new frontend on the same port with engines of a new instance; the moment when it serves."""

    def late(self, seconds: float) -> None:
        """Round trips take that much longer; what runs goes on."""

    def traffic(self) -> Any:
        """A context in which tokens are generated all the time, as the worker's own page says."""

    def weight_sync(self, seconds: float) -> Any:
        """A context that begins when a weight update of that length is under way: no engine answers, and the page
        says why. The block may end later."""


class FakeRig:
    """FakeWorker, and FakeHttp for its page."""

    def __init__(self, worker: FakeWorker, http: FakeHttp) -> None:
        self.worker = worker
        self.http = http
        self.target = worker.target
        self.http_url = http.url
        self._restarts = 0

    def die(self, rank: int) -> Moment:
        moment = Moment(kind="die", rank=rank)
        self.worker.die(reported=True, rank=rank)
        return moment

    def lose(self, rank: int) -> Moment:
        moment = Moment(kind="lose", rank=rank)
        self.worker.die(reported=False, rank=rank)
        return moment

    def hang(self) -> Moment:
        moment = Moment(kind="hang")
        self.worker.hang()
        return moment

    def unhang(self) -> Moment:
        moment = Moment(kind="unhang")
        self.worker.unhang()
        return moment

    def kill(self) -> Moment:
        moment = Moment(kind="kill")
        self.worker.stop()
        return moment

    terminate = kill

    def drain(self, seconds: float) -> Moment:
        moment = Moment(kind="drain")
        self.worker.drain(seconds)
        return moment

    def restart(self) -> Moment:
        self._restarts += 1
        self.worker.restart(instance_id=f"fake#{self._restarts}")
        self.http.restart()
        return Moment(kind="served")

    def late(self, seconds: float) -> None:
        self.worker.heal("IsPaused")
        if seconds:
            self.worker.delay("IsPaused", seconds)

    @contextmanager
    def traffic(self) -> Iterator[None]:
        over = threading.Event()

        def go_on() -> None:
            tokens = 0
            while not over.wait(0.02):
                tokens += 2
                self.http.set(generation_tokens=tokens, running=1)

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def weight_sync(self, seconds: float) -> Iterator[None]:
        def end() -> None:
            self.http.set(weight_updates=0)
            self.worker.unhang()

        timer = threading.Timer(seconds, end)
        self.http.set(weight_updates=1)
        self.worker.hang()
        timer.start()
        try:
            yield
        finally:
            timer.join()


class RealRig:
    """The genuine frontend with simulated engines."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.target = stack.target
        self.http_url = stack.http_url

    def die(self, rank: int) -> Moment:
        return self.stack.die(rank)

    def lose(self, rank: int) -> Moment:
        if not self.stack.engine_pids:
            return self.stack.die(rank, mode="abrupt")
        self.stack.kill_engine(rank)
        return self.stack.moment("kill-engine")

    def hang(self) -> Moment:
        return self.stack.hang()

    def unhang(self) -> Moment:
        return self.stack.unhang()

    def kill(self) -> Moment:
        self.stack.kill()
        return self.stack.moment("kill")

    def terminate(self) -> Moment:
        self.stack.terminate()
        return self.stack.moment("terminate")

    def drain(self, seconds: float) -> Moment:
        # Something has to run, or there is nothing to wait for: a token takes 10 ms.
        generation = threading.Thread(target=self._generate, args=(int(seconds * 100),))
        generation.start()
        self._until_running()
        return self.terminate()

    def restart(self) -> Moment:
        self.stack.restart()
        begun, took = self.stack.moment("start"), self.stack.ready_after
        return Moment(kind="served", monotonic=begun.monotonic + took, wall=begun.wall + took)

    def late(self, seconds: float) -> None:
        self.stack.utility(delay=seconds)

    @contextmanager
    def traffic(self) -> Iterator[None]:
        thread = threading.Thread(target=self._generate, args=(3500, "traffic"))
        thread.start()
        self._until_running()
        try:
            yield
        finally:
            with ControlClient(self.target) as client:
                client.abort(["traffic"])
            thread.join()

    @contextmanager
    def weight_sync(self, seconds: float) -> Iterator[None]:
        def update() -> None:
            # Over HTTP, since 0.33 counts no operation that was asked for over gRPC.
            url, body = f"{self.http_url}/update_weights", b'{"update_info": {}}'
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=seconds + 10).close()

        self.late(seconds)
        thread = threading.Thread(target=update)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            self.late(0.0)

    def _generate(self, tokens: int, request_id: str | None = None) -> None:
        try:
            with ControlClient(self.target) as client:
                client.generate("hello", max_tokens=tokens, timeout_s=120.0, request_id=request_id)
        except ControlError:
            return  # cut short, as planned

    def _until_running(self) -> None:
        deadline = time.monotonic() + 5.0
        while not any(status["counters"]["tokens"] for status in self.stack.status().values()):
            if time.monotonic() > deadline:
                raise TimeoutError("the engine generates nothing")
            time.sleep(0.01)


@contextmanager
def fake(version: str, *, ranks: int = 1, drains: bool = False, processes: bool = False) -> Iterator[FakeRig]:
    """A started fake; what a real one needs to be told at its start, it does anyway."""
    info = ServerInfo(
        instance_id="fake#0",
        rl_capabilities=RlCapabilities(sleep_mode_enabled=True, weight_transfer_enabled=True),
    )
    with FakeWorker(version=version, ranks=ranks, info=info) as worker, FakeHttp(kind="rust") as http:
        yield FakeRig(worker, http)


@contextmanager
def real(
    version: str, model: Path, directory: Path, *, ranks: int = 1, drains: bool = False, processes: bool = False
) -> Iterator[RealRig]:
    """A started frontend. ``drains``: it has a shutdown time-out. ``processes``: each engine in one of its own."""
    require(version)
    facts = EngineFacts(enable_sleep_mode=True, weight_transfer_backend="nccl")
    arguments = ["--shutdown-timeout", "10"] if drains else []
    stack = Stack(
        version,
        engines=ranks,
        facts=facts,
        mode="process" if processes else "thread",
        frontend_args=arguments,
        env={"VLLM_SERVER_DEV_MODE": "1"},  # has the routes for weight updates
        model=model,
        directory=directory,
    )
    with ExitStack() as after:
        after.callback(stack.stop)
        yield RealRig(stack.start())
