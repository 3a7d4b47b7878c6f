"""``/probe?target=…&module=…``: one worker asked on demand, in the manner of the blackbox_exporter.

What the daemon watches itself is not asked twice: its own proof is good for five seconds. All else is asked inside the
scraper's deadline, at the address that was checked, and only if the target may be asked at all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from prometheus_client import Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Sample

from vllm_cp import ConfigError, Connection, RpcRecord
from vllm_cp.models.ladder import Rung
from vllm_cp_exporter.allow import Allowed, NotAllowed, Unresolved, admit, resolve
from vllm_cp_exporter.collector import PageCollector, clean
from vllm_cp_exporter.config import ExporterConfig, ProbeModule, WorkerConfig
from vllm_cp_exporter.look import Busy, Look, Lookers
from vllm_cp_exporter.negotiate import OPENMETRICS, choose_form
from vllm_cp_exporter.row import Row, gauge
from vllm_cp_exporter.selfmetrics import Own, SelfMetrics
from vllm_cp_exporter.snapshot import Board, Snapshot, WorkerView

__all__ = ["HISTORY_ROWS", "PROBE_ROWS", "Probed", "Prober", "time_allowed"]

#: The scraper's own way back, seconds.
_OFFSET_S = 0.5
#: No scraper waits for longer.
_LONGEST_S = 60.0
#: How old the daemon's own proof may be.
_FRESH_S = 5.0
#: Probes that are under way.
_AT_ONCE = 64
_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """How one probe went."""

    view: WorkerView
    rung: Rung
    took_s: float
    #: Nothing was asked: this is what the daemon knew.
    reused: bool
    #: What was asked.
    calls: tuple[RpcRecord, ...] = ()
    allowed: Allowed | None = None
    #: Why nothing could be asked.
    problem: str = ""

    @property
    def success(self) -> bool:
        """Whether the wanted rung holds, or the highest below it that this worker can prove."""
        rungs = self.view.state.rungs
        return rungs[rungs.provable(self.rung)].holds is True


PROBE_ROWS: tuple[Row[Probed], ...] = (
    gauge("probe_success", "Whether the wanted rung is proved.", lambda probed: float(probed.success)),
    gauge("probe_duration_seconds", "How long the probe took.", lambda probed: probed.took_s),
    gauge(
        "probe_reused",
        "Whether nothing was asked, because the daemon watches this worker and knew.",
        lambda probed: float(probed.reused),
    ),
)
#: Rows of a life that was watched; one look has none.
HISTORY_ROWS = frozenset(
    f"vllm_cp_worker_{name}"
    for name in (
        "faults_total",
        "fault_ends_total",
        "fault_active",
        "fault_start_timestamp_seconds",
        "last_recovery_duration_seconds",
        "restarts_total",
        "discovered_timestamp_seconds",
        "first_ready_timestamp_seconds",
        "startup_seconds",
    )
)


class _Wrong(Exception):
    """The request makes no sense, or is not allowed."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Prober:
    """The page and its channels."""

    def __init__(
        self,
        board: Board,
        metrics: SelfMetrics,
        settings: Callable[[], ExporterConfig],
        workers: Callable[[], Mapping[str, WorkerConfig]],
        *,
        lookers: Lookers | None = None,
        resolve: Callable[[str, int], Any] = resolve,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``settings`` gives those of now; ``workers`` who is watched, by key."""
        self._board = board
        self._metrics = metrics
        self._settings = settings
        self._workers = workers
        self._lookers = lookers or Lookers(metrics.rpc)
        self._resolve = resolve
        self._wall = wall
        self._under_way = 0

    def routes(self) -> list[web.RouteDef]:
        """The one page."""
        return [web.get("/probe", self._page)]

    async def close(self) -> None:
        """Close the channels."""
        await self._lookers.close()

    async def _page(self, request: web.Request) -> web.Response:
        try:
            target, module = _one(request, "target"), _one(request, "module", "")
            seconds = time_allowed(request.headers.get(_HEADER), self._module(module).timeout_s)
            probed = await self._in_turn(target, module, seconds)
        except _Wrong as wrong:
            return web.Response(status=wrong.status, text=f"{_line(str(wrong))}\n")
        form = choose_form(",".join(request.headers.getall("Accept", ())))
        page = _ProbePage(probed)
        if request.query.get("debug") == "true":
            body = generate_latest(page).decode()
            return web.Response(text=_told(probed, module, seconds) + body)
        make = generate_openmetrics if form is OPENMETRICS else generate_latest
        body_bytes: bytes = make(page)
        self._metrics.row_errors(page.errors)
        return web.Response(body=body_bytes, headers={"Content-Type": form.content_type, "Vary": "Accept"})

    def _module(self, name: str) -> ProbeModule:
        """The module of that name; without a name, the one called ``default``, where there is one."""
        modules = self._settings().modules
        if not name:
            return modules.get("default", ProbeModule())
        if name not in modules:
            known = ", ".join(sorted(modules)) or "none"
            raise _Wrong(400, f"unknown module {name[:100]!r}; configured: {known}")
        return modules[name]

    async def _in_turn(self, target: str, module: str, seconds: float) -> Probed:
        if self._under_way >= _AT_ONCE:
            raise _Wrong(503, f"{self._under_way} probes are under way already")
        self._under_way += 1
        try:
            return await self._probe(target, module, seconds)
        finally:
            self._under_way -= 1

    async def _probe(self, target: str, module_name: str, seconds: float) -> Probed:
        began = time.monotonic()
        deadline = began + seconds
        module = self._module(module_name)
        view = self._watched(target)
        if view is not None and self._known(view):
            return Probed(view=view, rung=module.rung, took_s=time.monotonic() - began, reused=True)
        connection = self._connection(target, view, module, own=not module_name)
        base = view or _stranger(connection)
        allowed: Allowed | None = None
        try:
            allowed = await asyncio.wait_for(self._admitted(connection, discovered=view is not None), seconds)
            address = await _answering(allowed, deadline)
            tls = connection.tls is not None
            dialled = replace(
                connection,
                target=address,
                # An address has no name of its own to be checked against.
                server_name=(connection.server_name or allowed.host) if tls else connection.server_name,
                timeout_s=max(0.05, seconds),
            )
            busy = view is not None and view.state.evidence.asked is not None
            look = await self._lookers.look(dialled, module.rung, deadline, round_trips=not busy)
        except NotAllowed as error:
            raise _Wrong(403, str(error)) from None
        except Busy as error:
            raise _Wrong(503, str(error)) from None
        except (Unresolved, asyncio.TimeoutError, ConfigError) as error:
            problem = str(error) or "out of time"
            unseen = _stranger(connection, key=base.key, pool=base.pool)
            took = time.monotonic() - began
            return Probed(view=unseen, rung=module.rung, took_s=took, reused=False, allowed=allowed, problem=problem)
        return Probed(
            view=_seen(base, look),
            rung=module.rung,
            took_s=time.monotonic() - began,
            reused=False,
            calls=look.calls,
            allowed=allowed,
        )

    async def _admitted(self, connection: Connection, *, discovered: bool) -> Allowed:
        allow = self._settings().probe_allow
        return await admit(connection, allow, discovered=discovered, resolve=self._resolve)

    def _watched(self, target: str) -> WorkerView | None:
        """The worker that the daemon watches under this name or at this target."""
        views = self._board.snapshot.workers
        if (view := views.get(target)) is not None:
            return view
        try:
            name = Connection.parse(target).address.name
        except ConfigError as error:
            raise _Wrong(400, str(error)) from None
        return next((view for view in views.values() if view.target == name), None)

    def _known(self, view: WorkerView) -> bool:
        """Whether the daemon's own proof is good enough, or the only one there is."""
        proofs = [view.proofs[check] for check in ("health", "round_trip") if check in view.proofs]
        fresh = bool(proofs) and self._wall() - max(proofs) < _FRESH_S and view.state.evidence.broken is None
        return fresh or not view.target

    def _connection(self, target: str, view: WorkerView | None, asked: ProbeModule, *, own: bool) -> Connection:
        """How to ask: as the module says; with ``own``, as the daemon itself does where it watches the worker."""
        worker = self._workers().get(view.key) if view is not None else None
        if own and worker is not None and worker.connection is not None:
            return worker.connection
        try:
            return Connection(
                target=view.target if view is not None else target,
                tls=asked.tls,
                token_file=asked.token_file,
                insecure_token=asked.insecure_token,
                server_name=asked.server_name,
            )
        except ConfigError as error:
            raise _Wrong(400, str(error)) from None


class _ProbePage:
    """The page of one probe as a prometheus_client collector."""

    def __init__(self, probed: Probed) -> None:
        self._probed = probed
        view = probed.view
        self._rows = PageCollector(Snapshot(workers={view.key: view}), Own())

    @property
    def errors(self) -> Counter[str]:
        """Samples left out, by row."""
        return self._rows.errors

    def collect(self) -> Iterator[Metric]:
        """What came of the probe, then the worker's rows; families without a sample are left out."""
        for row in PROBE_ROWS:
            family = Metric(row.family, row.help, row.kind)
            family.samples = [Sample(row.name, {}, float(number)) for _, number in row.read(self._probed)]  # type: ignore[arg-type]
            yield family
        rows, identity, subjects = next(self._rows.sections())
        for row in rows:
            if row.name not in HISTORY_ROWS:
                family = Metric(row.family, row.help, row.kind)
                for key, subject in subjects:
                    found = self._rows.read(row, (*identity, *row.labels), key, subject, set())
                    family.samples.extend(found or ())
                if family.samples:
                    yield family


def time_allowed(header: str | None, module_s: float) -> float:
    """Seconds for a probe: what the scraper gives, less the way back, and never more than the module's."""
    limit = min(module_s, _LONGEST_S)
    try:
        given = float(header) if header is not None else math.nan
    except ValueError:
        given = math.nan
    if not given > 0:
        return limit
    # A scraper in such a hurry still gets an answer rather than a time-out.
    return min(limit, max(given - _OFFSET_S, given / 2))


async def _answering(allowed: Allowed, deadline: float) -> str:
    """The first of the checked addresses that takes a connection; the first of all where none does."""
    if len(allowed.addresses) == 1:
        return allowed.addresses[0]
    share = max(0.05, (deadline - time.monotonic()) / (len(allowed.addresses) + 1))
    for address in allowed.addresses:
        host, _, port = address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), share)
        except (OSError, asyncio.TimeoutError):
            continue
        writer.close()
        return address
    return allowed.addresses[0]


def _stranger(connection: Connection, *, key: str | None = None, pool: str = "default") -> WorkerView:
    """A worker of which nothing is known."""
    from vllm_cp.observer import Observer

    name = connection.address.name
    return WorkerView(key=key or name, pool=pool, target=name, state=Observer().state)


def _seen(base: WorkerView, look: Look) -> WorkerView:
    """The worker as this look found it, and as nothing else did."""
    observer = look.observer
    return WorkerView(
        key=base.key,
        pool=base.pool,
        target=base.target,
        http_url=base.http_url,
        namespace=base.namespace,
        pod=base.pod,
        node=base.node,
        state=observer.state,
        facts=look.facts,
        proofs=dict(observer.proofs),
        round_trip_s=observer.round_trip_s,
    )


def _one(request: web.Request, name: str, default: str | None = None) -> str:
    """The one value of a parameter."""
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise _Wrong(400, f"{name} is given {len(values)} times; give it once")
    if values and values[0]:
        return values[0]
    if default is None:
        raise _Wrong(400, f"{name} is missing; write /probe?target=HOST:PORT")
    return default


def _told(probed: Probed, module: str, seconds: float) -> str:
    """What was asked and answered, for people. There is no secret in it: calls are told by name and status."""
    allowed = probed.allowed
    lines = [
        f"target: {probed.view.target}",
        f"worker: {probed.view.key}",
        f"module: {module or '(none)'}",
        f"rung: {probed.rung.value}",
        f"deadline: {seconds:g} s",
        f"allowed: {allowed.by if allowed else 'discovered'}",
        f"addresses: {', '.join(allowed.addresses) if allowed else '-'}",
        f"reused: {'yes, the daemon watches this worker' if probed.reused else 'no'}",
        *([f"problem: {probed.problem}"] if probed.problem else []),
        *(f"asked: {call.method} {call.code} {call.elapsed_s:.4f} s {call.detail}".rstrip() for call in probed.calls),
        *_ladder(probed.view),
        f"result: {'success' if probed.success else 'failure'} in {probed.took_s:.4f} s",
    ]
    return "".join(f"{_line(line)}\n" for line in lines) + "\n"


def _ladder(view: WorkerView) -> Iterable[str]:
    for rung, held in view.state.rungs:
        holds = {True: "yes", False: "no", None: "not known"}[held.holds]
        yield f"rung {rung.value}: {holds} {held.why or (held.proof and f'by {held.proof}')}".rstrip()


def _line(text: str) -> str:
    return clean(" ".join(text.split()))
