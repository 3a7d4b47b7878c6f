"""``/probe``: one worker asked on demand."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.certs import Certs, make_certs
from tests.exporter.asking import watching
from tests.exporter.probing import page, probing
from tests.exporter.views import FACTS, GONE, UP, life, view
from vllm_cp import AsyncControlClient, Connection, PauseMode, Tls
from vllm_cp.models.ladder import Rung
from vllm_cp.testing import FakeWorker, TlsFiles
from vllm_cp_exporter import probe as probe_module
from vllm_cp_exporter.catalog import ROWS
from vllm_cp_exporter.config import ExporterConfig, ProbeModule, WorkerConfig
from vllm_cp_exporter.probe import HISTORY_ROWS, PROBE_ROWS, time_allowed
from vllm_cp_exporter.snapshot import Board

TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs"), names=("worker.example",))


# -- what is on the page --------------------------------------------------------------------


async def test_a_worker_that_nobody_watches() -> None:
    """Success, duration, and the worker's rows as of now; nothing about a life that nobody watched."""
    with FakeWorker() as fake:
        target = fake.target
        async with probing() as ask:
            seen = page(await ask(f"/probe?target={target}"))
    assert seen["probe_success",] == 1
    assert seen["probe_reused",] == 0
    assert 0 < (seen["probe_duration_seconds",] or 0) < 5
    assert seen["worker_ready", target] == 1
    assert seen["worker_kv_blocks", target] == 1024
    assert seen.by("worker_rung", "rung") == {"reachable": 1, "serving": 1, "answering": 1, "admitting": 1}
    names = {sample.name for sample in seen.samples}
    assert not names & HISTORY_ROWS
    assert {row.name for row in ROWS} >= HISTORY_ROWS, "these rows are all in the table"


async def test_openmetrics_for_who_asks() -> None:
    """The page is in the form that was asked for, and ends as it must."""
    with FakeWorker() as fake:
        async with probing() as ask:
            answer = await ask(f"/probe?target={fake.target}", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


async def test_a_worker_that_is_gone_is_a_page_too() -> None:
    """Nobody there: success 0 and a page, in no time."""
    with FakeWorker() as fake:
        target = fake.target
    async with probing() as ask:
        seen = page(await ask(f"/probe?target={target}"))
    assert seen["probe_success",] == 0
    assert seen["worker_not_ready", "unreachable"] == 1
    assert not seen.of("worker_kv_blocks")


async def test_a_name_without_an_address_is_a_page_too() -> None:
    """The target may be asked and cannot be found: a failed probe, not a failed scrape."""

    async def nowhere(_: str, __: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with probing(allow=("*.example",), resolve=nowhere) as ask:
        seen = page(await ask("/probe?target=w.example:1"))
        told = (await ask("/probe?target=w.example:1&debug=true")).text
    assert seen["probe_success",] == 0
    assert "problem: w.example: Name or service not known" in told


async def test_a_worker_that_came_back_is_seen_at_once() -> None:
    """A kept connection that died meanwhile is no verdict: a new one is made before anything is said."""
    with FakeWorker() as fake:
        async with probing() as ask:
            for _ in range(2):
                assert page(await ask(f"/probe?target={fake.target}"))["probe_success",] == 1
                fake.stop()
                fake.restart()
            assert page(await ask(f"/probe?target={fake.target}"))["probe_success",] == 1


# -- time -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "module_s", "seconds"),
    [("10", 20.0, 9.5), ("10", 3.0, 3.0), ("0.6", 10.0, 0.3), (None, 10.0, 10.0), ("soon", 10.0, 10.0),
     ("-1", 10.0, 10.0), ("0", 10.0, 10.0), ("nan", 10.0, 10.0), ("inf", 10.0, 10.0), ("1e9", 3600.0, 60.0)],
)  # fmt: skip
def test_the_time_for_a_probe(header: str | None, module_s: float, seconds: float) -> None:
    """What the scraper gives less half a second, the module's own limit, and a default for nonsense."""
    assert time_allowed(header, module_s) == pytest.approx(seconds)


@pytest.mark.parametrize("silent", ["Health.Check", "GetServerInfo", "IsPaused"])
async def test_a_silent_worker_costs_the_scraper_its_time_and_no_more(silent: str) -> None:
    """Whatever is not answered, the page is there before the scraper gives up, with what is known by then."""
    with FakeWorker() as fake:
        if silent == "IsPaused":
            fake.hang()
        else:
            fake.delay(silent.rpartition(".")[2], 30.0)
        async with probing() as ask:
            began = time.monotonic()
            seen = page(await ask(f"/probe?target={fake.target}", headers={TIMEOUT: "1"}))
            assert time.monotonic() - began < 1
        fake.heal()
        fake.unhang()
    assert seen["probe_success",] == (silent == "GetServerInfo")
    assert bool(seen.of("worker_kv_blocks")) is (silent == "IsPaused")


async def test_a_frozen_engine_is_asked_once() -> None:
    """Each question would queue in it: later probes wait for the answer to the first one, and get it."""
    with FakeWorker() as fake:
        fake.hang()
        async with probing() as ask:
            for _ in range(3):
                assert page(await ask(f"/probe?target={fake.target}", headers={TIMEOUT: "0.6"}))["probe_success",] == 0
            fake.unhang()
            assert page(await ask(f"/probe?target={fake.target}"))["probe_success",] == 1
        asked = [call.method.rpartition("/")[2].rpartition(".")[2] for call in fake.calls]
        assert asked.count("IsPaused") <= 2


async def test_probes_of_one_worker_share_one_look() -> None:
    """Two scrapers at the same time are one question to the worker."""
    with FakeWorker() as fake:
        fake.delay("Check", 0.3)
        async with probing() as ask:
            answers = await asyncio.gather(*(ask(f"/probe?target={fake.target}") for _ in range(5)))
        assert {page(answer)["probe_success",] for answer in answers} == {1}
        assert sum("Check" in call.method for call in fake.calls) == 1


async def test_a_shallow_look_is_not_enough_for_a_deep_question() -> None:
    """Who asks for the engines gets them asked, also while somebody is asking for less."""
    modules = {"reach": ProbeModule(rung=Rung.REACHABLE)}
    with FakeWorker() as fake:
        fake.delay("Check", 0.3, times=1)
        async with probing(modules=modules) as ask:
            first = asyncio.create_task(ask(f"/probe?target={fake.target}&module=reach"))
            await asyncio.to_thread(fake.wait_for_call, "Check")
            assert page(await ask(f"/probe?target={fake.target}"))["probe_success",] == 1
            assert page(await first)["probe_success",] == 1


# -- who may be asked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "target is missing; write /probe?target=HOST:PORT"),
        ("target=", "target is missing"),
        ("target=a&target=b", "target is given 2 times"),
        ("target=http://a:1", "is a URL; write a:1 without http://"),
        ("target=a:b", "port 'b'"),
        ("target=%0aevil", "holds spaces or unprintable characters"),
        ("target=a:1&module=tls", "unknown module 'tls'; configured: mtls, plain"),
        ("target=a:1&module=x&module=y", "module is given 2 times"),
    ],
)
async def test_a_request_that_makes_no_sense(query: str, said: str) -> None:
    """400, and one line that says what to write."""
    async with probing(modules={"mtls": ProbeModule(), "plain": ProbeModule()}) as ask:
        answer = await ask(f"/probe?{query}")
    assert answer.status == 400
    assert said in answer.text
    assert answer.text.count("\n") == 1


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:9",
        "localhost:9",
        "169.254.169.254:80",
        "[::1]:9",
        "unix:/run/docker.sock",
        "dns://8.8.8.8/a:1",
        "a:1",
    ],
)
async def test_nobody_is_asked_unless_allowed(target: str) -> None:
    """By default only discovered targets may be asked: 403, without so much as looking the name up."""

    async def never(_: str, __: int) -> list[str]:
        raise AssertionError("it was looked up")

    async with probing(allow=(), resolve=never) as ask:
        answer = await ask("/probe", params={"target": target})
    assert (answer.status, answer.text.count("\n")) == (403, 1)


# -- modules --------------------------------------------------------------------------------


async def test_a_certificate_is_checked_against_the_name(certs: Certs) -> None:
    """The address is dialled, and the certificate has to be the name's as written; a module may say another one."""

    async def here(_: str, __: int) -> list[str]:
        return ["127.0.0.1"]

    tls = Tls(ca_file=certs.ca)
    modules = {"tls": ProbeModule(tls=tls), "named": ProbeModule(tls=tls, server_name="worker.example")}
    with FakeWorker(tls=TlsFiles(cert=certs.server_cert, key=certs.server_key)) as fake:
        port = fake.target.rpartition(":")[2]
        async with probing(modules=modules, resolve=here) as ask:
            right = page(await ask(f"/probe?target=worker.example:{port}&module=tls"))
            wrong = page(await ask(f"/probe?target=other.example:{port}&module=tls"))
            named = page(await ask(f"/probe?target=other.example:{port}&module=named"))
    assert [seen["probe_success",] for seen in (right, wrong, named)] == [1, 0, 1]


async def test_a_module_says_which_rung() -> None:
    """A paused worker answers and does not admit; by default it has to admit. The default may be another."""
    modules = {"answers": ProbeModule(rung=Rung.ANSWERING), "reach": ProbeModule(rung=Rung.REACHABLE)}
    with FakeWorker() as fake:
        async with AsyncControlClient(fake.target) as client:
            await client.pause(mode=PauseMode.KEEP, clear_cache=False)
        before = len(fake.calls)
        async with probing(modules=modules) as ask:
            found = {name: page(await ask(f"/probe?target={fake.target}&module={name}")) for name in ("", *modules)}
        assert {name: seen["probe_success",] for name, seen in found.items()} == {"": 0, "answers": 1, "reach": 1}
        assert sum("IsPaused" in call.method for call in fake.calls[before:]) == 2, "reach asks no engine"
        async with probing(modules={"default": modules["answers"]}) as ask:
            assert page(await ask(f"/probe?target={fake.target}"))["probe_success",] == 1


async def test_an_old_worker_is_judged_by_what_it_can_prove() -> None:
    """vLLM 0.27 has no round trip: the highest rung it can prove below the wanted one counts."""
    with FakeWorker(version="0.27.0") as fake:
        async with probing() as ask:
            seen = page(await ask(f"/probe?target={fake.target}"))
    assert seen["probe_success",] == 1
    assert seen.by("worker_rung", "rung") == {"reachable": 1, "serving": 1}


async def test_debug_tells_everything_but_secrets(tmp_path: Path) -> None:
    """What was asked and answered, as plain text; the token is sent and not told."""
    token = tmp_path / "token"
    token.write_text("s3cr3t-token")
    module = ProbeModule(token_file=token, insecure_token=True)
    with FakeWorker() as fake:
        async with probing(modules={"token": module}) as ask:
            answer = await ask(f"/probe?target={fake.target}&module=token&debug=true")
        assert any("s3cr3t" in str(call.metadata) for call in fake.calls)
    assert answer.headers["Content-Type"].startswith("text/plain")
    for said in ("module: token", "rung: admitting", "asked: Health.Check OK", "asked: Control.GetServerInfo OK",
                 "rung admitting: yes by round trip", "result: success", "vllm_cp_probe_success 1.0"):  # fmt: skip
        assert said in answer.text, said
    assert "s3cr3t" not in answer.text


async def test_a_token_file_that_is_gone_is_a_failed_probe(tmp_path: Path) -> None:
    """What is wrong on our side is a failed probe with the reason, not a failed page."""
    token = tmp_path / "token"
    token.write_text("t")
    module = ProbeModule(token_file=token, insecure_token=True)
    token.unlink()
    with FakeWorker() as fake:
        async with probing(modules={"token": module}) as ask:
            answer = await ask(f"/probe?target={fake.target}&module=token&debug=true")
    assert "result: failure" in answer.text or answer.status == 400
    assert str(token) in answer.text


# -- workers that are watched ---------------------------------------------------------------


async def test_what_the_daemon_knows_is_not_asked_again() -> None:
    """While its own proof is fresh, /probe gives that one, under the worker's name or its target; nothing is asked."""
    with FakeWorker() as fake:
        worker = WorkerConfig(key="ml/a", pool="chat", connection=Connection.parse(fake.target))
        async with watching(ExporterConfig(workers=(worker,))) as ask:
            await ask.until("/metrics", lambda answer: 'worker_ready{pool="chat",worker="ml/a"} 1.0' in answer.text)
            before = len(fake.calls)
            for target in ("ml/a", fake.target):
                seen = page(await ask("/probe", params={"target": target}))
                assert (seen["probe_success",], seen["probe_reused",]) == (1, 1)
                assert seen["worker_kv_blocks", "ml/a", "chat"] == 1024
            assert "reused: yes" in (await ask("/probe?target=ml/a&debug=true")).text
            assert len(fake.calls) - before <= 1, "the watcher's own"


async def test_a_stale_proof_is_made_anew() -> None:
    """When the daemon's own proof is old the worker is asked, the way the daemon reaches it, under its own name."""
    with FakeWorker() as fake:
        board = Board()
        board.publish(view(key="ml/a", target=fake.target, facts=FACTS))
        config = WorkerConfig(key="ml/a", connection=Connection.parse(fake.target))
        async with probing(allow=(), board=board, workers={"ml/a": config}) as ask:
            seen = page(await ask("/probe?target=ml/a"))
            assert (seen["probe_success",], seen["probe_reused",]) == (1, 0)
            assert seen["worker_kv_blocks", "ml/a", "chat"] == 1024
            assert any("IsPaused" in call.method for call in fake.calls)
            # While the watcher's own question waits in the engine, no second one is sent.
            before = len(fake.calls)
            board.publish(view(life(UP, {"asked": True}), key="ml/a", target=fake.target))
            seen = page(await ask("/probe?target=ml/a"))
            assert not any("IsPaused" in call.method for call in fake.calls[before:])


async def test_a_worker_that_is_down_is_asked_again() -> None:
    """A proof from before the fall is none."""
    board = Board()
    now = time.time()
    board.publish(view(life(UP, GONE), key="a", target="127.0.0.1:9", proofs=MappingProxyType({"health": now})))
    async with probing(allow=(), board=board) as ask:
        seen = page(await ask("/probe?target=a"))
    assert (seen["probe_success",], seen["probe_reused",]) == (0, 0)


async def test_a_worker_watched_over_http_only() -> None:
    """There is no control port to ask: what is watched is what there is."""
    board = Board()
    board.publish(view(key="h", target="", http_url="http://h:8000"))
    async with probing(allow=(), board=board) as ask:
        assert page(await ask("/probe?target=h"))["probe_reused",] == 1


async def test_so_many_probes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More probes than the daemon can carry are told to come back: 503."""
    monkeypatch.setattr(probe_module, "_AT_ONCE", 1)
    with FakeWorker() as fake:
        fake.delay("Check", 1.0, times=1)
        async with probing() as ask:
            first = asyncio.create_task(ask(f"/probe?target={fake.target}"))
            await asyncio.to_thread(fake.wait_for_call, "Check")
            assert (await ask(f"/probe?target={fake.target}")).status == 503
            assert page(await first)["probe_success",] == 1


def test_the_rows_are_the_probes_own() -> None:
    """No row of /probe has the name of a row of /metrics."""
    assert not {row.name for row in PROBE_ROWS} & {row.name for row in ROWS}
