"""The daemon on discovery: workers come, go, move and are told apart, while nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.discovery.apiserver import ApiServer, pod
from tests.exporter.test_reload import Running, ready, running, streams, target
from vllm_cp.discovery import DiscoveredTarget, Discoverer, StaticDiscoverer
from vllm_cp.testing import FakeFleet, FakeWorker
from vllm_cp_exporter.config import ExporterConfig
from vllm_cp_exporter.daemon import Daemon
from vllm_cp_exporter.listen import Listen, bind
from vllm_cp_exporter.watch import Watcher


def found(*targets: str, **labels: str) -> str:
    """A file_sd document."""
    return json.dumps([{"targets": list(targets), "labels": labels}])


def replaced(path: Path, text: str) -> None:
    """Write as one should: whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)


def file_sd(*files: str) -> dict[str, object]:
    return {"file_sd": {"files": list(files), "poll_interval": 0.05}}


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    """The facts of each line about an event."""
    return [vars(record).get("fields", {}) for record in caplog.records if record.message == event]


async def test_workers_of_a_file_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Workers of a file are watched as soon as they are in it, and off the next page when they are not."""
    caplog.set_level(logging.INFO)
    targets = tmp_path / "targets.json"
    with FakeWorker() as a, FakeWorker() as b, FakeWorker() as c:
        targets.write_text(found(a.target, pool="chat"))
        async with running(tmp_path, target("c", c), discovery=file_sd("*.json")) as run:
            page = await run.until(ready(a.target, "c"))
            assert page["worker_ready", a.target, "chat"] == 1
            times = page.by("discovery_last_success_timestamp_seconds", "source")
            assert set(times) == {"config", "file_sd"}
            assert all(abs(at - time.time()) < 10 for at in times.values())
            replaced(targets, found(a.target, b.target, pool="chat"))
            await run.until(ready(b.target))
            replaced(targets, found(b.target, pool="chat"))
            await run.until(lambda page: page.series(a.target) == 0)
            assert [streams(fake)[0] for fake in (b, c)] == [None, None]
            assert [len(streams(fake)) for fake in (a, b, c)] == [1, 1, 1]
        assert said(caplog, "targets")[-1] == {"watched": 2, "removed": 1, "removed_names": a.target}


async def test_a_removal_within_the_window_was_planned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that dies and is removed before its fault was counted stopped on purpose; later, it is gone."""
    caplog.set_level(logging.INFO)
    targets = tmp_path / "targets.json"
    with FakeWorker() as a:
        targets.write_text(found(a.target))
        async with running(tmp_path, discovery=file_sd("targets.json")) as run:
            await run.until(ready(a.target))
            a.die(reported=True)
            await run.until(lambda page: page["worker_fault_active", a.target] == 1)
            replaced(targets, "[]")
            await run.until(lambda page: page.series(a.target) == 0)
            assert [line["now"] for line in said(caplog, "fault_ended")] == ["planned"]
            assert not said(caplog, "fault_counted")


async def test_a_removal_after_the_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that was counted ends as gone when its worker is removed, and leaves no duration behind."""
    caplog.set_level(logging.DEBUG, logger="vllm_cp_exporter.watch")
    monkeypatch.setattr("vllm_cp_exporter.sources.WINDOW_S", 0.1)
    targets = tmp_path / "targets.json"
    with FakeWorker() as a:
        targets.write_text(found(a.target))
        async with running(tmp_path, discovery=file_sd("targets.json")) as run:
            await run.until(ready(a.target))
            a.die(reported=True)
            await run.until(lambda page: page["worker_faults_total", a.target, "engine_reported"] == 1)
            replaced(targets, "[]")
            page = await run.until(lambda page: page.series(a.target) == 0)
            assert [line["now"] for line in said(caplog, "fault_ended")] == ["gone"]
            assert not page.of("recovery_duration_seconds_count")


async def test_what_is_under_way_at_a_removal_comes_to_nothing(tmp_path: Path) -> None:
    """Answers that arrive after a worker was removed do not bring it back on the page."""
    fleet = 30
    with FakeFleet(fleet) as fakes:
        targets = tmp_path / "targets.json"
        targets.write_text(found(*fakes.targets))
        async with running(tmp_path, discovery=file_sd("targets.json")) as run:
            await run.until(lambda page: len(page.of("worker_ready")) == fleet)
            for count in (0, fleet, 3):
                replaced(targets, found(*fakes.targets[:count]))
                await run.until(lambda page, count=count: len(page.of("worker_ready")) == count)  # type: ignore[misc]
            await run.until(ready(*fakes.targets[:3]))
            assert len((await run.page()).of("worker_ready")) == 3


async def test_pods(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pods are workers by namespace/name; one that is told to be deleted and then dies had no fault."""
    caplog.set_level(logging.INFO)
    with FakeWorker() as a, FakeWorker() as b:
        ports = {fake: int(fake.target.rpartition(":")[2]) for fake in (a, b)}
        async with ApiServer() as api:
            api.put(pod("llama-0", ip="127.0.0.1", port=ports[a]), pod("llama-1", ip="127.0.0.1", port=ports[b]))
            api.put(pod("odd", ip="127.0.0.1", port=None))
            kubeconfig = api.kubeconfig(tmp_path / "kube")
            source = {"namespace": "ml", "pool_label": "app", "kubeconfig": str(kubeconfig)}
            async with running(tmp_path, discovery={"kubernetes": source}) as run:
                page = await run.until(ready("ml/llama-0", "ml/llama-1"))
                assert page["worker_target_info", "llama-0", "ml", "gpu-1", "vllm"] == 1
                assert page["worker_not_ready", "ml/odd", "unreachable"] == 1
                assert "no annotation" in str(said(caplog, "not_asked")[0]["problem"])
                assert run.daemon is not None
                views = run.daemon.board.snapshot.workers
                assert views["ml/llama-0"].state.rules.window_s == 30
                api.mark_deleted("llama-0")
                await until(lambda: run.daemon.board.snapshot.workers["ml/llama-0"].state.evidence.deleted)  # type: ignore[union-attr]
                a.stop()
                await run.until(lambda page: page["worker_not_ready", "ml/llama-0", "draining"] == 1)
                assert (await run.page())["worker_fault_active", "ml/llama-0"] == 0
                api.delete("llama-0")
                await run.until(lambda page: page.series("ml/llama-0") == 0)
                assert streams(b) == [None]
    assert not said(caplog, "fault_opened")


async def until(true) -> None:  # type: ignore[no-untyped-def]
    async def look() -> None:
        while not true():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), 15)


async def test_ready_when_discovery_is(tmp_path: Path) -> None:
    """The daemon is not ready while a source has brought nothing, and says which and why; once ready it stays so."""
    async with ApiServer() as api:
        api.refuse["list"] = 403
        source = {"namespace": "ml", "kubeconfig": str(api.kubeconfig(tmp_path / "kube"))}
        async with running(tmp_path, discovery={"kubernetes": source}) as run:
            assert run.daemon is not None
            why = run.daemon._why_not_ready
            assert why() is not None
            await until(lambda: "grant the verbs list and watch" in (why() or ""))
            assert str(why()).startswith("kubernetes has brought no targets yet: not allowed to list pods")
            del api.refuse["list"]
            await until(lambda: why() is None)
            api.put(pod("late", ip="127.0.0.1", port=9))
            await run.until(lambda page: page.series("ml/late") > 0)
            assert why() is None


async def test_a_source_in_trouble_loses_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that breaks keeps its workers, with their connections."""
    targets = tmp_path / "targets.json"
    with FakeWorker() as a:
        targets.write_text(found(a.target))
        async with running(tmp_path, discovery=file_sd("targets.json")) as run:
            await run.until(ready(a.target))
            replaced(targets, "[{")
            await until(lambda: "it is not JSON" in caplog.text)
            broken = await run.page()
            assert ready(a.target)(broken)
            then = broken["discovery_last_success_timestamp_seconds", "file_sd"]
            replaced(targets, found(a.target, pool="other"))
            page = await run.until(lambda page: page["worker_ready", a.target, "other"] == 1)
            now = page["discovery_last_success_timestamp_seconds", "file_sd"]
            assert now is not None
            assert then is not None
            assert now > then
            assert streams(a) == [None]


async def test_who_is_named_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker of two sources belongs to the first, and one line says so."""
    with FakeWorker() as a, FakeWorker() as b:
        (tmp_path / "targets.json").write_text(found(a.target, b.target, pool="files"))
        async with running(tmp_path, target(a.target, a, pool="mine"), discovery=file_sd("targets.json")) as run:
            page = await run.until(ready(a.target, b.target))
            assert page["worker_ready", a.target, "mine"] == 1
            assert page["worker_ready", b.target, "files"] == 1
        (line,) = said(caplog, "named_twice")
        assert (line["count"], line["first"]) == (1, a.target)


async def test_overrides_of_a_target(tmp_path: Path) -> None:
    """What a source says of one target holds for that target: its own token, while the others have none."""
    (tmp_path / "token").write_text("t0k3n")
    with FakeWorker() as a, FakeWorker() as b:
        groups = [
            {"targets": [a.target], "labels": {"__token_file__": "token", "__worker__": "a"}},
            {"targets": [b.target]},
        ]
        (tmp_path / "targets.json").write_text(json.dumps(groups))
        async with running(tmp_path, discovery=file_sd("targets.json"), defaults={"insecure_token": True}) as run:
            await run.until(ready("a", b.target))
            assert any("t0k3n" in str(call.metadata) for call in a.calls)
            assert not any("t0k3n" in str(call.metadata) for call in b.calls)


async def test_b25_a_file_of_one_worker_is_unusable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker whose files can't be used is marked, with the reason; the others are watched, and a reload mends it."""
    caplog.set_level(logging.INFO)
    with FakeWorker() as a, FakeWorker() as b:
        groups = [{"targets": [a.target], "labels": {"__token_file__": "token"}}, {"targets": [b.target]}]
        (tmp_path / "targets.json").write_text(json.dumps(groups))
        async with running(tmp_path, discovery=file_sd("targets.json"), defaults={"insecure_token": True}) as run:
            page = await run.until(ready(b.target))
            assert page["worker_not_ready", a.target, "unreachable"] == 1
            (line,) = said(caplog, "not_asked")
            assert "cannot read token file" in str(line["problem"])
            (tmp_path / "token").write_text("t0k3n")
            assert await run.reload() is None
            await run.until(ready(a.target))
            assert streams(b) == [None]


async def test_b24_a_name_behind_which_instances_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name that leads to other instances in turns is reported, and not shown as a worker that always restarts."""
    caplog.set_level(logging.WARNING)
    with FakeWorker() as fake:
        fake.restart(instance_id="i0")
        async with running(tmp_path, target("a", fake)) as run:
            await run.until(ready("a"))
            for number in range(1, 6):
                name = f"i{number % 3}"
                fake.restart(instance_id=name)
                await run.until(lambda page, name=name: page["worker_instance_info", name] == 1)  # type: ignore[misc]
            page = await run.page()
            assert page["worker_shared_name", "a"] == 1
            assert page["worker_restarts_total", "a"] == 2
    (line,) = said(caplog, "shared_name")
    assert "3 instances answer in turns" in str(line["detail"])


# -- sources made for the purpose -------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A source that brings what it is told to, when it is told to."""

    name: str = "given"
    window_s: float = 5.0
    discoverer: StaticDiscoverer = field(default_factory=lambda: StaticDiscoverer([]), compare=False)

    def build(self) -> Discoverer:
        return self.discoverer


@dataclass(frozen=True)
class Broken(Given):
    """One that fails in a way it must not."""

    failures: list[int] = field(default_factory=list, compare=False)

    def build(self) -> Discoverer:
        source = self

        class Failing(StaticDiscoverer):
            async def stream(self):  # type: ignore[no-untyped-def]
                source.failures.append(1)
                yield source.discoverer.look()
                raise RuntimeError("a defect")

        return Failing([])


async def test_what_was_remembered_waits_for_discovery(tmp_path: Path) -> None:
    """What the state file knows of a worker is kept until discovery has said who is there, and dropped then."""
    path = tmp_path / "state.json"
    with FakeWorker() as a, FakeWorker() as b:
        source = Given()
        told = ExporterConfig(sources=(source,), state_file=path, probe_interval_s=0.1)  # type: ignore[arg-type]
        source.discoverer.replace([f"a={a.target}", f"b={b.target}"])
        async with daemon(told) as running_one:
            await running_one.until(ready("a", "b"))
        late = Given(name="late", discoverer=StaticDiscoverer([]))
        slow = _Slow(StaticDiscoverer([f"a={a.target}"]))
        object.__setattr__(late, "discoverer", slow)
        told = ExporterConfig(sources=(late,), state_file=path, probe_interval_s=0.1)  # type: ignore[arg-type]
        async with daemon(told):
            pass
        assert set(json.loads(path.read_text())["workers"]) == {"a", "b"}, "nobody was discovered yet"
        slow.go.set()
        async with daemon(told) as running_one:
            await running_one.until(ready("a"))
        assert set(json.loads(path.read_text())["workers"]) == {"a"}


class _Slow:
    """Brings its first set when it is let go."""

    def __init__(self, inner: StaticDiscoverer) -> None:
        self._inner = inner
        self.go = asyncio.Event()
        self.name = "late"
        self.status = inner.status

    async def stream(self):  # type: ignore[no-untyped-def]
        await self.go.wait()
        yield self._inner.look()
        await asyncio.Event().wait()


class daemon:  # noqa: N801  (used like a function)
    """A daemon with settings that no file can say."""

    def __init__(self, told: ExporterConfig) -> None:
        self._sockets = bind(Listen("127.0.0.1", 0))
        self._daemon = Daemon(told, self._sockets)

    async def __aenter__(self) -> Running:
        run = Running(Path("none"))
        run.daemon = await self._daemon.__aenter__()
        run.url = f"http://127.0.0.1:{self._sockets[0].getsockname()[1]}"
        return run

    async def __aexit__(self, *error: object) -> None:
        await self._daemon.__aexit__(*error)


async def test_a_source_with_a_defect_is_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A source that breaks down costs a line and a pause; its workers stay, and it is read again."""
    monkeypatch.setattr("vllm_cp_exporter.discovering._AGAIN_S", 0.05)
    with FakeWorker() as a:
        source = Broken(discoverer=StaticDiscoverer([f"a={a.target}"]))
        async with daemon(ExporterConfig(sources=(source,), probe_interval_s=0.1)) as run:  # type: ignore[arg-type]
            await run.until(ready("a"))
            await until(lambda: len(source.failures) >= 3)
            assert streams(a) == [None]
    assert {record.message for record in caplog.records if record.levelname == "ERROR"} == {"source_failed"}


async def test_many_workers_that_come_at_once_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are discovered in one go are not all asked in the same instant."""
    starts: list[float] = []

    async def note(self: Watcher) -> None:
        starts.append(time.monotonic())
        await asyncio.Event().wait()

    monkeypatch.setattr(Watcher, "run", note)
    source = Given()
    async with daemon(ExporterConfig(sources=(source,), probe_interval_s=0.8)) as run:  # type: ignore[arg-type]
        await run.until(lambda page: page.by("discovery_last_success_timestamp_seconds", "source").keys() >= {"given"})
        source.discoverer.replace(DiscoveredTarget(key=f"w{n}", target="127.0.0.1:9") for n in range(40))
        await until(lambda: len(starts) == 40)
        assert starts[-1] - starts[0] > 0.5
