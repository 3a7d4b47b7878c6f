"""The infrastructure itself: the genuine frontend takes our simulated engines for real ones, and they fail as told.

Spoken with a bare channel (raw.py), so nothing of the code under test has a part in it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import zmq

from tests.real.fetch import VERSIONS
from tests.real.ports import accepts
from tests.real.raw import CHECK, IS_PAUSED, NOT_SERVING, SERVER_INFO, SERVING, WATCH, ask, channel_to, code_of
from tests.real.stack import CommandFailed, EngineFacts, Stack, StackFactory
from tests.real.waiting import eventually


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stack_of_every_version_serves_within_two_seconds(stack: StackFactory, version: str) -> None:
    """A frontend of each version serves with our engines in under two seconds, and tells their facts."""
    s = stack(version, engines=2, facts=EngineFacts(instance_id="the-instance"))
    assert s.ready_after < 2.0
    with channel_to(s) as channel:
        assert ask(channel, CHECK) == SERVING
        info = ask(channel, SERVER_INFO)
    assert b"the-instance" in info
    assert version.encode() in info


def test_announced_death_of_one_of_two_ranks_ends_serving(stack: StackFactory) -> None:
    """When one of two ranks announces its death, a Watch hears NOT_SERVING within a second by the engine's clock."""
    s = stack(engines=2)
    with channel_to(s) as channel:
        watch: Any = channel.unary_stream(WATCH, bytes, bytes)(b"", timeout=5.0)
        assert next(watch) == SERVING
        moment = s.die(0)
        assert next(watch) == NOT_SERVING
        latency = time.monotonic() - moment.monotonic
        assert 0 < latency < 1.0
        assert ask(channel, CHECK) == NOT_SERVING
        watch.cancel()
    assert s.moment("die", 0) == moment
    assert abs(moment.wall - time.time()) < 5.0
    assert {rank: status["state"] for rank, status in s.status().items()} == {0: "dead", 1: "joined"}


def test_a_hung_engine_leaves_the_frontend_serving(stack: StackFactory) -> None:
    """A hung engine is not noticed by health, only by a call that needs it; unhung, it answers again."""
    s = stack()
    with channel_to(s) as channel:
        ask(channel, IS_PAUSED)
        s.hang(0)
        assert code_of(channel, IS_PAUSED, timeout=0.3) in (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        )
        assert ask(channel, CHECK) == SERVING
        s.unhang(0)
        ask(channel, IS_PAUSED)
    assert [m.kind for m in s.moments] == ["start", "hang", "unhang"]
    assert s.moment("hang").monotonic < s.moment("unhang").monotonic


@pytest.mark.parametrize("death", ["abrupt", "corrupt"])
def test_other_deaths_reach_the_frontend_as_they_would(stack: StackFactory, death: str) -> None:
    """A silent death goes unnoticed by health; nonsense from an engine ends serving."""
    s = stack()
    with channel_to(s) as channel:
        s.die(0, death)
        if death == "corrupt":
            eventually(lambda: ask(channel, CHECK) == NOT_SERVING, 5.0, "NOT_SERVING")
        else:
            assert code_of(channel, IS_PAUSED, timeout=0.3) is not grpc.StatusCode.OK
            assert ask(channel, CHECK) == SERVING


def test_facts_can_differ_by_rank(stack: StackFactory) -> None:
    """The frontend sums the KV blocks of ranks that differ: 1000 + 500 on field 4 of GetServerInfo."""
    s = stack(engines=2, facts=EngineFacts(num_gpu_blocks=1000), per_rank={1: {"num_gpu_blocks": 500}})
    with channel_to(s) as channel:
        info = ask(channel, SERVER_INFO)
    assert varint(1500) in info


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80, value >> 7])


def test_sigterm_ends_the_frontend_with_zero(stack: StackFactory) -> None:
    """SIGTERM without a drain ends the frontend with exit code 0, and its ports refuse."""
    s = stack()
    s.terminate()
    assert s.wait_exit(5.0) == 0
    assert not accepts(s.grpc_port)


def test_restart_keeps_the_ports_and_changes_the_instance(stack: StackFactory) -> None:
    """After a kill the stack comes back on the same ports under a new instance id, maybe of another version."""
    s = stack("0.28.0", facts=EngineFacts(instance_id="before"))
    target, pid = s.target, s.pid
    s.kill()
    assert s.wait_exit() == -9
    s.restart(instance_id="after", version="0.33.0", num_gpu_blocks=77)
    assert (s.target, s.pid) != (target, pid)
    assert s.target == target
    with channel_to(s) as channel:
        info = ask(channel, SERVER_INFO)
    assert b"after" in info
    assert b"before" not in info


@pytest.mark.parametrize("mode", ["thread", "process", "managed"])
def test_every_mode_restarts_with_all_its_ports(stack: StackFactory, mode: str) -> None:
    """Two ranks with KV events come back on the same ports whatever they live in, under an instance id of their own."""
    s = stack(engines=2, mode=mode, kv_events=True)
    assert s.publish(1, tokens=[1] * 16) == 0
    assert s.publish(1, tokens=[2] * 16) == 1
    s.restart()
    assert s.publish(1, tokens=[1] * 16) == 0
    with channel_to(s) as channel:
        assert b"sim-instance#1" in ask(channel, SERVER_INFO)


def test_utility_calls_fail_and_hang_as_told(stack: StackFactory) -> None:
    """A utility call fails with the words it is given, or never answers, until that is cleared."""
    s = stack()
    with channel_to(s) as channel:
        s.utility(fail={"is_scheduler_paused": "out of luck"})
        assert code_of(channel, IS_PAUSED, 2.0) is grpc.StatusCode.INTERNAL
        s.utility(clear=True, mute=["is_scheduler_paused"])
        assert code_of(channel, IS_PAUSED, 0.2) is not grpc.StatusCode.INTERNAL
        s.utility(clear=True)
        ask(channel, IS_PAUSED)
    asked = [seen["method"] for seen in s.received() if seen["kind"] == "utility"]
    assert asked.count("is_scheduler_paused") == 3
    with pytest.raises(CommandFailed, match="cannot pace colour"):
        s.pace(colour=1)


def test_a_completion_comes_at_the_pace_told(stack: StackFactory) -> None:
    """A completion over HTTP gets as many tokens as it asks for, and no sooner than the pace allows."""
    s = stack()
    s.pace(token_interval=0.02, tokens_per_step=2)
    body = {"model": str(s.model), "prompt": "twelve bytes", "max_tokens": 10, "ignore_eos": True}
    request = urllib.request.Request(
        f"{s.http_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    before = time.monotonic()
    with urllib.request.urlopen(request, timeout=5.0) as response:
        usage = json.load(response)["usage"]
    assert time.monotonic() - before >= 5 * 0.02
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 10)
    assert s.status()[0]["counters"]["finished"] == 1


def test_a_frozen_frontend_answers_once_thawed(stack: StackFactory) -> None:
    """A frontend that is frozen by SIGSTOP answers nothing until it is thawed."""
    s = stack()
    with channel_to(s) as channel:
        ask(channel, CHECK)
        s.freeze_frontend()
        assert code_of(channel, CHECK, timeout=0.2) is grpc.StatusCode.DEADLINE_EXCEEDED
        s.thaw_frontend()
        assert ask(channel, CHECK) == SERVING


def test_an_engine_process_killed_hard_is_not_noticed(stack: StackFactory) -> None:
    """SIGKILL of one engine process leaves an unmanaged frontend SERVING for ever, while its calls hang or fail."""
    s = stack(engines=2, mode="process")
    assert len(set(s.engine_pids.values())) == 2
    with channel_to(s) as channel:
        ask(channel, IS_PAUSED)
        s.kill_engine(0)
        assert {rank: status["state"] for rank, status in s.status().items()} == {0: "gone", 1: "joined"}
        assert code_of(channel, IS_PAUSED, timeout=0.5) is not grpc.StatusCode.OK
        assert ask(channel, CHECK) == SERVING
    with pytest.raises(CommandFailed):
        s.die(0)


def test_an_engine_process_takes_commands_and_can_be_frozen(stack: StackFactory) -> None:
    """An engine process dies on command as one in a thread does, by a comparable clock; frozen, it only waits."""
    s = stack(mode="process")
    with channel_to(s) as channel:
        s.freeze_engine(0)
        code_of(channel, IS_PAUSED, timeout=0.2)
        s.thaw_engine(0)
        ask(channel, IS_PAUSED)
        before = time.monotonic()
        moment = s.die(0)
        assert before < moment.monotonic < time.monotonic()
        eventually(lambda: ask(channel, CHECK) == NOT_SERVING, 2.0, "NOT_SERVING")


def test_a_managed_engine_killed_hard_takes_the_frontend_along(stack: StackFactory) -> None:
    """A frontend that manages its engine ends with 1 within seconds of the engine's SIGKILL."""
    s = stack(mode="managed", facts=EngineFacts(instance_id="managed"))
    with channel_to(s) as channel:
        assert b"managed" in ask(channel, SERVER_INFO)
    assert s.engine_pids[0] != s.pid
    s.kill_engine(0)
    assert s.wait_exit(10.0) == 1


def test_a_managed_engine_left_behind_is_ended_with_the_stack(stack: StackFactory) -> None:
    """A killed frontend orphans its managed engine, and stopping the stack ends that too."""
    s = stack(mode="managed")
    engine = s.engine_pids[0]
    s.kill()
    s.wait_exit()
    assert s.status()[0]["state"] == "joined"
    s.stop()
    eventually(lambda: not runs(engine), 5.0, "the engine to end")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_kv_events_are_published_and_replayed(stack: StackFactory) -> None:
    """KV events arrive live with their sequence number; a dropped batch is had from the replay socket."""
    s = stack(kv_events=True)
    context = zmq.Context()
    try:
        sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for sock in (sub, replay):
            sock.linger = 0
            sock.rcvtimeo = 5000
        sub.subscribe(b"")
        sub.connect(s.kv_endpoint())
        replay.connect(s.kv_replay())
        # A subscription takes effect a moment after connect: publish until the first batch comes through.
        tokens = iter(range(10_000))
        eventually(lambda: s.publish(tokens=[next(tokens)] * 16) is not None and sub.poll(20), 5.0, "a first batch")
        first = int.from_bytes(sub.recv_multipart()[1], "big")
        s.drop(1)
        missed = s.publish(tokens=[1, 2, 3, 4] * 4)
        assert missed is not None
        assert missed > first
        last = s.publish(tokens=[5, 6, 7, 8] * 4)
        seen = []
        while last not in seen:
            seen.append(int.from_bytes(sub.recv_multipart()[1], "big"))
        assert missed not in seen
        replay.send_multipart([b"", missed.to_bytes(8, "big")])
        _, _, seq, payload = replay.recv_multipart()
        assert int.from_bytes(seq, "big") == missed
        _, events, rank = msgspec.msgpack.decode(payload)
        assert (events[0]["type"], rank) == ("BlockStored", 0)
    finally:
        context.destroy(linger=0)


def test_a_frontend_whose_engines_are_not_ready_refuses(stack: StackFactory) -> None:
    """Both ports refuse while an engine still loads its model, and serve once it is ready."""
    s = stack(facts=EngineFacts(ready_delay=0.5), wait=False)
    assert not accepts(s.grpc_port)
    s.wait_ready()
    assert s.ready_after > 0.5
    assert accepts(s.http_port)


def test_a_frontend_that_ends_at_once_says_why(stack: StackFactory) -> None:
    """A frontend that does not start fails the stack at once, with its own words."""
    with pytest.raises(RuntimeError, match=r"(?s)the frontend ended with 1.*no-such-file"):
        stack(frontend_args=["--ssl-certfile", "no-such-file"])


def test_a_moe_frontend_coordinates_two_ranks(stack: StackFactory) -> None:
    """For a mixture-of-experts model the ranks join by the frontend's coordinator."""
    s = stack(engines=2, model="moe")
    assert "coordinator_input" in s.status()[0]["init"]["addresses"]
    with channel_to(s) as channel:
        assert ask(channel, CHECK) == SERVING


async def test_a_stack_can_be_used_in_an_event_loop(stack: StackFactory) -> None:
    """An asynchronous test starts a stack, breaks its engine and hears of it without blocking its loop."""
    (await asyncio.to_thread(stack)).stop()  # skips when there is no binary
    async with Stack("0.33.0") as s, grpc.aio.insecure_channel(s.target) as channel:
        watch = channel.unary_stream(WATCH, bytes, bytes)(b"", timeout=5.0)
        assert await watch.read() == SERVING
        await asyncio.to_thread(s.die, 0)
        assert await watch.read() == NOT_SERVING
        watch.cancel()


def test_a_stack_cleans_up_after_itself(stack: StackFactory) -> None:
    """A stopped stack leaves no thread, no listener and no directory, and its log stays readable."""
    stack("0.33.0").stop()  # also skips when there is no binary
    threads = threading.active_count()
    with Stack("0.33.0") as s:
        directory, port = s.directory, s.grpc_port
        assert directory.exists()
    assert not directory.exists()
    assert not accepts(port)
    assert threading.active_count() == threads
    assert "gRPC server" in s.log
