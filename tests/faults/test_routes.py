"""What each call asks and what it makes of the answer, in both colours."""

from __future__ import annotations

import json

import pytest

from tests.faults.conftest import Connect
from vllm_cp import errors as e
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.probe import EngineState
from vllm_cp.models.rpc import RpcRecord
from vllm_cp.models.scaling import ScalingState
from vllm_cp.testing._http import FakeHttp

SCALING = {"error": "The model is currently scaling. Please try again later."}


async def test_status_says_the_state_of_each_engine(connect: Connect) -> None:
    """The status lists each engine with its state, what went wrong and what became of the last instruction."""
    with FakeHttp(engines=[2, 3]) as server:
        server.fall_ill(3, info="NCCL time-out")
        status = await connect(server.url).status()
    assert (status.schema_version, status.total_engines) == (1, 2)
    well, ill = status.engines
    assert (well.engine, well.state, well.info, well.error) == (2, EngineState.HEALTHY, None, None)
    assert (ill.engine, ill.state, ill.info) == (3, EngineState.UNHEALTHY, "NCCL time-out")
    assert status.of(EngineState.UNHEALTHY) == (ill,)


async def test_apply_sends_the_instruction_as_it_is(server: FakeHttp, connect: Connect) -> None:
    """An instruction and its params go out unchanged, and the server's id of it comes back."""
    client = connect(server.url)
    server.fail("/fault_tolerance/apply", 202, {"message": "ok", "request_id": "r-1"})
    assert await client.apply("scale_down", {"removed_dp_ranks": [1]}) == "r-1"
    seen = server.calls[-1]
    assert (seen.method, seen.headers["content-type"]) == ("POST", "application/json")
    assert json.loads(seen.body) == {"instruction": "scale_down", "params": {"removed_dp_ranks": [1]}}


async def test_retry_heals_and_leaves_its_id_in_the_status(server: FakeHttp, connect: Connect) -> None:
    """After a retry that worked the engine is healthy, and the status names the instruction."""
    client = connect(server.url)
    server.fall_ill()
    request_id = await client.apply("retry")
    (engine,) = (await client.status()).engines
    assert engine.state is EngineState.HEALTHY
    assert engine.last_request_id == request_id
    assert engine.error is None


async def test_retry_of_a_healthy_engine_is_accepted_and_refused_in_the_status(
    server: FakeHttp, connect: Connect
) -> None:
    """Telling an engine that is well raises nothing: the refusal shows in the status, under our id."""
    client = connect(server.url)
    request_id = await client.apply("retry")
    (engine,) = (await client.status()).engines
    assert engine.last_request_id == request_id
    assert engine.error is not None
    assert "not unhealthy" in engine.error


async def test_an_unknown_instruction_is_an_invalid_argument(server: FakeHttp, connect: Connect) -> None:
    """The server's 400 and its words reach the caller."""
    with pytest.raises(e.InvalidArgument, match="Invalid instruction: 'dance'") as caught:
        await connect(server.url).apply("dance")
    assert (caught.value.method, caught.value.code) == ("POST /fault_tolerance/apply", "HTTP 400")


async def test_params_that_json_cannot_say_are_refused_before_anything_is_sent(
    server: FakeHttp, connect: Connect
) -> None:
    """NaN is no JSON: nothing goes out."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        await connect(server.url).apply("retry", {"timeout": float("nan")})
    assert server.calls == []


async def test_an_acceptance_without_an_id_is_still_an_acceptance(server: FakeHttp, connect: Connect) -> None:
    """Whoever was told once must not be told again because the answer lacks an id."""
    server.fail("/fault_tolerance/apply", 200, {"message": "Instruction executed successfully."})
    assert await connect(server.url).apply("retry") is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"is_scaling_elastic_ep": False}, ScalingState(scaling=False)),
        (
            {"is_scaling_elastic_ep": True, "phase": "committing", "epoch": 7, "error": None,
             "requested_data_parallel_size": 8},
            ScalingState(scaling=True, phase="committing", epoch="7", requested_data_parallel_size=8),
        ),
        (
            {"is_scaling_elastic_ep": False, "phase": "failed", "epoch": "e-1", "error": "commit failed"},
            ScalingState(scaling=False, phase="failed", epoch="e-1", error="commit failed"),
        ),
    ],
)  # fmt: skip
async def test_scaling_reads_old_and_new_answers(
    server: FakeHttp, connect: Connect, said: dict[str, object], expected: ScalingState
) -> None:
    """Older servers say only whether; newer ones say which step, which change and what went wrong."""
    server.fail("/is_scaling_elastic_ep", 200, said)
    assert await connect(server.url).scaling() == expected
    assert server.calls[-1].method == "POST"


async def test_a_server_that_commits_a_change_of_size_is_scaling_and_not_dead(
    server: FakeHttp, connect: Connect
) -> None:
    """While it commits, the server answers 503 to everything: scaling() understands, the others say why they can't."""
    client = connect(server.url)
    server.fail("*", 503, SCALING)
    assert await client.scaling() == ScalingState(scaling=True)
    for call in (client.health, client.status, client.read_page):
        with pytest.raises(e.NotAdmitting, match="currently scaling"):
            await call()


@pytest.mark.parametrize("kind", ["python", "rust"])
async def test_health_is_the_word_of_either_server(connect: Connect, kind: str) -> None:
    """200 is SERVING and 503 is NOT_SERVING, which is an answer and no error."""
    with FakeHttp(kind=kind) as server:  # type: ignore[arg-type]
        client = connect(server.url)
        assert await client.health() is HealthStatus.SERVING
        server.set(healthy=False)
        assert await client.health() is HealthStatus.NOT_SERVING


async def test_another_status_of_health_is_an_error(server: FakeHttp, connect: Connect) -> None:
    """A 500 is not the server's word about its health."""
    server.fail("/health", 500, "boom")
    with pytest.raises(e.EngineFailed, match="boom"):
        await connect(server.url).health()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_the_path_form_is_found_once_and_remembered(connect: Connect, prefix: str) -> None:
    """Versions differ in whether the routes are under /v1: the first call finds out, the next ones know."""
    with FakeHttp(prefix=prefix) as server:  # type: ignore[arg-type]
        client = connect(server.url)
        for _ in range(3):
            await client.status()
        asked = [call.path for call in server.calls]
    found = f"{prefix}/fault_tolerance/status"
    assert asked == (["/fault_tolerance/status"] if prefix else []) + [found] * 3


async def test_apply_finds_the_form_too_and_tells_once(connect: Connect) -> None:
    """A route that does not exist has done nothing, so even a change goes on to the other form; it is told once."""
    with FakeHttp(prefix="/v1") as server:
        server.fall_ill()
        await connect(server.url).apply("retry")
        assert [(call.path, call.status) for call in server.calls] == [
            ("/fault_tolerance/apply", 404),
            ("/v1/fault_tolerance/apply", 202),
        ]


async def test_a_worker_that_came_back_with_the_other_form_is_found_again(connect: Connect) -> None:
    """An upgrade behind the same address may move the routes: the remembered form is tried first, then the other."""
    with FakeHttp(prefix="/v1") as old:
        port = int(old.url.rpartition(":")[2])
        client = connect(old.url)
        await client.status()
    with FakeHttp(port=port):
        assert len((await client.status()).engines) == 1


@pytest.mark.parametrize("kind", ["rust", "python"])
async def test_no_fault_tolerance_says_what_to_do(connect: Connect, kind: str) -> None:
    """404 in both forms is NotSupported, with the two reasons there can be."""
    with FakeHttp(kind=kind, fault_tolerance=False) as server:  # type: ignore[arg-type]
        client = connect(server.url)
        for call in (client.status(), client.apply("retry")):
            with pytest.raises(e.NotSupported) as caught:
                await call
            assert "--enable-fault-tolerance" in caught.value.hint
            assert "Rust frontend" in caught.value.hint
        assert {call.path.removeprefix("/v1") for call in server.calls} == {
            "/fault_tolerance/status",
            "/fault_tolerance/apply",
        }


async def test_no_scaling_is_not_supported(connect: Connect) -> None:
    """The Rust frontend can't be scaled, and says so by having no such route."""
    with FakeHttp(kind="rust") as server, pytest.raises(e.NotSupported, match="elastic expert parallelism"):
        await connect(server.url).scaling()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, e.InvalidArgument), (401, e.CredentialsRejected), (403, e.CredentialsRejected), (404, e.NotSupported),
        (405, e.NotSupported), (408, e.OutOfTime), (409, e.PreconditionFailed), (413, e.TooLarge), (418, e.Refused),
        (422, e.InvalidArgument), (429, e.Refused), (431, e.TooLarge), (500, e.EngineFailed), (501, e.NotSupported),
        (502, e.EngineFailed), (503, e.EngineFailed), (504, e.OutOfTime), (599, e.EngineFailed), (999, e.EngineFailed),
    ],
)  # fmt: skip
async def test_statuses_have_meanings(
    server: FakeHttp, connect: Connect, status: int, kind: type[e.ControlError]
) -> None:
    """Every status is an error by meaning, with the server's words and the request in it."""
    server.fail("/fault_tolerance/status", status, {"detail": "so it is"})
    with pytest.raises(e.ControlError) as caught:
        await connect(server.url).status()
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.detail) == (f"HTTP {status}", "so it is")
    assert caught.value.target == server.url


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"detail": "Not so"}, "Not so"),
        ({"error": {"message": "Not so", "type": "x"}}, "Not so"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": [{"msg": "field required"}]}, '[{"msg": "field required"}]'),
        ("plain words", "plain words"),
        ("", ""),
        (b"\xff\xfe", "��"),
        ("x" * 5000, "x" * 300 + "…"),
        ("[" * 2000, "[" * 300 + "…"),
    ],
)
async def test_the_servers_words_are_found(server: FakeHttp, connect: Connect, body: object, said: str) -> None:
    """FastAPI, vLLM and plain text say errors in different places; what is said is shown, within reason."""
    server.fail("/fault_tolerance/status", 418, body)
    with pytest.raises(e.Refused) as caught:
        await connect(server.url).status()
    assert caught.value.detail == said


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("<html>hello</html>", "no JSON"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (b"\xff", "no JSON"),
        ("[]", "no JSON object"),
        ({}, "no list of engines"),
        ({"engines": {"0": "healthy"}}, "no list of engines"),
        ({"engines": [{"status": "healthy"}]}, "an engine without a number"),
        ({"engines": [{"id": True, "status": "healthy"}]}, "an engine without a number"),
        ({"engines": ["healthy"]}, "an engine without a number"),
        ({"schema_version": 2, "engines": []}, "schema_version 2"),
    ],
)
async def test_an_answer_that_is_none_is_said_to_be_none(
    server: FakeHttp, connect: Connect, body: object, why: str
) -> None:
    """A page that is no status, or one of a format of the future, is an error that says so and what to do."""
    server.fail("/fault_tolerance/status", 200, body)
    with pytest.raises(e.EngineFailed, match=why) as caught:
        await connect(server.url).status()
    assert caught.value.hint


async def test_what_is_unknown_in_a_status_is_kept_apart(server: FakeHttp, connect: Connect) -> None:
    """A state of the future is UNKNOWN with the word kept; facts may be objects; what is not said is None."""
    said = [{"id": 0, "status": "diagnosing", "mask": [1]}, {"id": 1, "status": "dead", "fault_info": {"type": "OOM"}}]
    server.fail("/fault_tolerance/status", 200, {"engines": said})
    status = await connect(server.url).status()
    assert (status.schema_version, status.total_engines) == (None, None)
    assert (status.engines[0].state, status.engines[0].info) == (EngineState.UNKNOWN, "status diagnosing")
    assert (status.engines[1].state, status.engines[1].info) == (EngineState.DEAD, '{"type": "OOM"}')


async def test_scaling_without_its_one_fact_is_no_answer(server: FakeHttp, connect: Connect) -> None:
    """ "Not said" is not "no"."""
    server.fail("/is_scaling_elastic_ep", 200, {"phase": "idle"})
    with pytest.raises(e.EngineFailed, match="is_scaling_elastic_ep"):
        await connect(server.url).scaling()


async def test_each_attempt_is_recorded(connect: Connect) -> None:
    """The hook hears of each attempt, under one name whatever the path form."""
    seen: list[RpcRecord] = []
    with FakeHttp(prefix="/v1") as server:
        await connect(server.url, on_rpc=seen.append).status()
        target = server.url
    assert [(one.method, one.code, one.attempt) for one in seen] == [
        ("GET /fault_tolerance/status", "HTTP 404", 1),
        ("GET /fault_tolerance/status", "OK", 2),
    ]
    assert {one.target for one in seen} == {target}
    assert all(one.elapsed_s > 0 for one in seen)
