"""FakeHttp is held to what the real servers answered, and to what their source says of fault tolerance."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.faults.conftest import DATA
from vllm_cp.faults import FaultTolerance
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.probe import EngineState
from vllm_cp.testing._http import FakeGroup, FakeHttp

ROUTES = (
    "GET /metrics", "GET /health", "GET /fault_tolerance/status", "GET /v1/fault_tolerance/status", "GET /is_paused",
)  # fmt: skip


def ask(url: str, verb: str = "GET", body: bytes | None = None) -> tuple[int, Any, bytes]:
    """Status, headers and body, by a client that is none of ours."""
    request = urllib.request.Request(url, method=verb, data=body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["python", "rust"])
def test_routes_answer_as_on_the_real_server(kind: str, route: str) -> None:
    """Status, kind of content and short bodies are those recorded from a vLLM without fault tolerance."""
    recorded = json.loads((DATA / f"http_{kind}_endpoints.json").read_text())[route]
    verb, path = route.split()
    with FakeHttp(kind=kind, fault_tolerance=False) as server:  # type: ignore[arg-type]
        status, headers, body = ask(server.url + path, verb)
    assert status == recorded["status"]
    assert headers.get("content-type") == recorded["headers"].get("content-type")
    if not recorded["body"].endswith("bytes"):
        assert body.decode() == recorded["body"]


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_samples_have_the_names_and_labels_of_the_real_page(kind: str) -> None:
    """Every sample of the fake's page is one of the real page's, labels in the same order."""
    real = (DATA / f"metrics_{kind}_0.32.0.txt").read_text()

    def shapes(page: str) -> set[str]:
        lines = [line for line in page.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0].replace('"fake"', '"tiny"') for line in lines}

    def declared(page: str) -> set[str]:
        return {line for line in page.splitlines() if line.startswith("# TYPE")}

    with FakeHttp(kind=kind) as server:  # type: ignore[arg-type]
        page = ask(f"{server.url}/metrics")[2].decode()
    assert shapes(page) <= shapes(real)
    assert declared(page) <= declared(real)
    assert page.endswith("# EOF\n") == (kind == "rust")


def test_kv_event_sources_are_said_as_recorded() -> None:
    """What is set is what is said, in the real server's form."""
    recorded = json.loads((DATA / "kv_event_sources.json").read_text())
    with FakeHttp() as server:
        assert json.loads(ask(f"{server.url}/kv_event_sources")[2]) == {}
        server.set(kv_event_sources=recorded)
        assert json.loads(ask(f"{server.url}/kv_event_sources")[2]) == recorded


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"{}", b'{"instruction": "retry"}', b'{"instruction": "retry", "params": []}',
             b'{"instruction": "dance", "params": {}}'],
)  # fmt: skip
def test_a_bad_instruction_is_a_400(server: FakeHttp, body: bytes) -> None:
    """Bad JSON, a bad body and an unknown instruction are refused at once."""
    status, _, said = ask(f"{server.url}/fault_tolerance/apply", "POST", body)
    assert status == 400
    assert json.loads(said)["detail"]


def test_a_good_instruction_is_a_202(server: FakeHttp) -> None:
    """Accepted, with an id; whether it works is for the status to say."""
    body = b'{"instruction": "retry", "params": {}}'
    status, _, said = ask(f"{server.url}/fault_tolerance/apply", "POST", body)
    assert status == 202
    assert json.loads(said).keys() == {"message", "request_id"}


def test_the_wrong_verb_is_a_405(server: FakeHttp) -> None:
    """As FastAPI does."""
    assert ask(f"{server.url}/is_scaling_elastic_ep")[0] == 405


def test_an_unhealthy_engine_dies_when_nobody_comes() -> None:
    """It waits for its recovery time-out, and then it is dead for good, whatever it is told."""
    with FakeHttp(engine_recovery_timeout_s=0.05) as server, FaultTolerance(server.url) as client:
        server.fall_ill()
        until(client, EngineState.DEAD)
        client.apply("retry")
        assert client.status().engines[0].state is EngineState.DEAD


def test_an_old_illness_does_not_kill_a_healed_engine() -> None:
    """The clock of an illness ends with it: a second one has the whole time again."""
    with FakeHttp(engine_recovery_timeout_s=0.2) as server, FaultTolerance(server.url) as client:
        server.fall_ill()
        client.apply("retry")
        with FakeHttp(engine_recovery_timeout_s=0.25) as clock, FaultTolerance(clock.url) as other:
            clock.fall_ill()
            until(other, EngineState.DEAD)
        assert client.status().engines[0].state is EngineState.HEALTHY


def test_nobody_in_a_group_gets_well_before_all_were_told() -> None:
    """The instruction is carried out together: the last one told heals all, under the id each was given."""
    group = FakeGroup()
    with (
        FakeHttp(engines=[0], group=group) as a,
        FakeHttp(engines=[1], group=group) as b,
        FaultTolerance(a.url) as one,
        FaultTolerance(b.url) as two,
    ):
        a.fall_ill()
        b.fall_ill()
        first = one.apply("retry")
        assert one.status().engines[0].state is EngineState.UNHEALTHY
        second = two.apply("retry")
        states = [client.status().engines[0] for client in (one, two)]
    assert [(s.state, s.last_request_id) for s in states] == [
        (EngineState.HEALTHY, first),
        (EngineState.HEALTHY, second),
    ]


def test_a_dead_rank_holds_its_group() -> None:
    """With a rank missing the collective is never complete, and the rest dies when its time is up."""
    group = FakeGroup()
    with (
        FakeHttp(engines=[0], group=group, engine_recovery_timeout_s=0.05) as a,
        FakeHttp(engines=[1], group=group) as b,
        FaultTolerance(a.url) as client,
    ):
        b.die()
        a.fall_ill()
        client.apply("retry")
        until(client, EngineState.DEAD)


def test_a_restart_keeps_the_port_and_forgets_the_rest() -> None:
    """A new process at the same address: healthy, with counters at zero."""
    with FakeHttp() as server, FaultTolerance(server.url) as client:
        url = server.url
        server.set(generation_tokens=5, healthy=False)
        server.die()
        server.stop()
        server.restart()
        assert server.url == url
        assert client.status().engines[0].state is EngineState.HEALTHY
        assert client.health() is HealthStatus.SERVING
        assert b'model_name="fake"} 0.0' in ask(f"{url}/metrics")[2]


def test_scripts_run_out(server: FakeHttp) -> None:
    """A failure for two times is one for two times, whatever the prefix it is asked under."""
    server.fail("/v1/health", 500, times=2)
    assert [ask(f"{server.url}/health")[0] for _ in range(3)] == [500, 500, 200]


def test_waiting_for_a_call(server: FakeHttp) -> None:
    """A test can wait for a request instead of sleeping, and learns when none comes."""
    asking = threading.Thread(target=ask, args=(f"{server.url}/health",))
    asking.start()
    assert server.wait_for_call("/health")[0].method == "GET"
    asking.join()
    with pytest.raises(TimeoutError, match="/metrics was asked for 0 times"):
        server.wait_for_call("/metrics", timeout_s=0.01)


@pytest.mark.parametrize(
    ("kind", "fact"), [("python", "weight_updates"), ("rust", "process_start"), ("python", "nonsense")]
)
def test_a_fact_that_is_not_there_cannot_be_set(kind: str, fact: str) -> None:
    """Setting what the page of that server does not have would test nothing."""
    with FakeHttp(kind=kind) as server, pytest.raises(TypeError, match=fact):  # type: ignore[arg-type]
        server.set(**{fact: 1})


def test_a_fake_that_does_not_run_says_so() -> None:
    """Before its start and after its end."""
    fake = FakeHttp()
    for use in (lambda: fake.url, fake.fall_ill, lambda: fake.set(running=1)):
        with pytest.raises(RuntimeError, match="FakeHttp"):
            use()
    with fake:
        assert fake.url
        with pytest.raises(RuntimeError, match="started already"):
            fake.start()
        with pytest.raises(ValueError, match="no engine 7"):
            fake.die(7)
    fake.close()


def until(client: FaultTolerance, state: EngineState) -> None:
    """Poll until the first engine is in that state."""
    for _ in range(2000):
        if client.status().engines[0].state is state:
            return
    raise AssertionError(f"never {state}")
