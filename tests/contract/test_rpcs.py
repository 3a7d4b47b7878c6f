"""What each version answers, and with what words it refuses."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.colours import Both
from tests.contract.conftest import Build, Connect, needs
from tests.contract.rigs import ALIAS, SERVED, Rig, Wish, aside, expected_info
from vllm_cp import (
    ControlError,
    FinishReason,
    HealthStatus,
    InvalidArgument,
    NotFound,
    NotSupported,
    PauseMode,
    PreconditionFailed,
    TooLarge,
    WorkerUnreachable,
)

Version = tuple[int, int]

#: Every call in an order in which each finds what it needs, the version that brought it, and its arguments.
CALLS: list[tuple[str, Version, tuple[object, ...], dict[str, object]]] = [
    ("check", (0, 27), (), {}),
    ("server_info", (0, 27), (), {}),
    ("model_info", (0, 27), (), {}),
    ("kv_event_sources", (0, 27), (), {}),
    ("abort", (0, 27), (["nobody"],), {}),
    ("generate", (0, 27), ("hello",), {}),
    ("pause", (0, 28), (), {"mode": PauseMode.ABORT, "clear_cache": False}),
    ("is_paused", (0, 28), (), {}),
    ("resume", (0, 28), (), {}),
    ("sleep", (0, 28), (), {"level": 1, "mode": PauseMode.WAIT}),
    ("is_sleeping", (0, 28), (), {}),
    ("wake_up", (0, 28), (), {}),
    ("init_weight_transfer_engine", (0, 28), ({},), {}),
    ("start_weight_update", (0, 28), (), {}),
    ("start_draft_weight_update", (0, 28), (), {}),
    ("update_weights", (0, 28), ({},), {}),
    ("finish_weight_update", (0, 28), ("v1",), {}),
    ("update_weight_version", (0, 28), ("v2",), {}),
    ("weight_version", (0, 28), (), {}),
    ("load_lora", (0, 29), ("adapter", "LORA"), {}),
    ("list_loras", (0, 29), (), {}),
    ("unload_lora", (0, 29), ("adapter",), {}),
]
SLEEP_OFF = "sleep mode is not configured; start vLLM with --enable-sleep-mode"
TRANSFER_OFF = "weight transfer is not configured; start vLLM with --weight-transfer-config"
LORA_OFF = "engine was not started with LoRA enabled"
UNCONFIGURED = [
    ("sleep", (0, 28), (), {"level": 1, "mode": PauseMode.ABORT}, SLEEP_OFF),
    ("wake_up", (0, 28), (), {}, SLEEP_OFF),
    ("init_weight_transfer_engine", (0, 28), ({},), {}, TRANSFER_OFF),
    ("start_weight_update", (0, 28), (), {}, TRANSFER_OFF),
    ("start_draft_weight_update", (0, 28), (), {}, TRANSFER_OFF),
    ("update_weights", (0, 28), ({},), {}, TRANSFER_OFF),
    ("finish_weight_update", (0, 28), (), {}, TRANSFER_OFF),
    ("list_loras", (0, 29), (), {}, LORA_OFF),
    ("load_lora", (0, 29), ("adapter", "LORA"), {}, LORA_OFF),
    ("unload_lora", (0, 29), ("adapter",), {}, LORA_OFF),
    ("shutdown", (0, 32), (), {}, "this frontend does not manage the engine process"),
]


def since_of(version: Version) -> str:
    """How NotSupported names a version."""
    return f"{version[0]}.{version[1]}"


async def call(client: Both, rig: Rig, verb: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Make a call of the tables above."""
    filled = [rig.lora_path if arg == "LORA" else arg for arg in args]
    return await getattr(client, verb)(*filled, **kwargs)


async def test_every_call_is_answered_from_its_version_on(build: Build, connect: Connect, since: Version) -> None:
    """Each call of a configured worker works from the version that brought it, and is NotSupported with that before."""
    rig = build(configured=True)
    client = await connect(rig)
    seen = {}
    for verb, brought, args, kwargs in CALLS:
        if since >= brought:
            seen[verb] = await call(client, rig, verb, args, kwargs)
            continue
        with pytest.raises(NotSupported) as failed:
            await call(client, rig, verb, args, kwargs)
        assert (failed.value.code, failed.value.detail, failed.value.since) == (
            "UNIMPLEMENTED",
            "",
            since_of(brought),
        )
    assert seen["check"] is HealthStatus.SERVING
    assert seen["generate"].finish_reason is FinishReason.LENGTH
    if since >= (0, 28):
        assert (seen["is_paused"], seen["is_sleeping"], seen["weight_version"]) == (True, True, "v2")
    if since >= (0, 29):
        assert [adapter.name for adapter in seen["list_loras"]] == ["adapter"]
        assert seen["load_lora"] == seen["unload_lora"] == seen["list_loras"][0]
        assert seen["load_lora"].source_path == rig.lora_path


async def test_what_is_not_configured_is_refused_with_the_reason(
    build: Build, connect: Connect, since: Version
) -> None:
    """A feature that was not switched on is PreconditionFailed, in the server's own words."""
    rig = build()
    client = await connect(rig)
    for verb, brought, args, kwargs, words in UNCONFIGURED:
        with pytest.raises(PreconditionFailed if since >= brought else NotSupported) as failed:
            await call(client, rig, verb, args, kwargs)
        assert failed.value.detail == (words if since >= brought else "")


@pytest.mark.parametrize("configured", [True, False])
async def test_a_worker_says_what_it_is(
    build: Build, connect: Connect, version: str, since: Version, configured: bool
) -> None:
    """Each fact of a worker arrives, from the version that has it; before, it is unknown and not zero."""
    rig = build(ranks=2, configured=configured)
    client = await connect(rig)
    wish = Wish(version=version, ranks=2, configured=configured)
    assert await client.server_info() == expected_info(since, wish, "first")
    model = await client.model_info()
    assert (model.served_model_name, model.served_model_aliases) == (SERVED, (ALIAS,))
    assert model.model_id
    assert (model.supports_text_input, model.supports_token_ids_input, model.supports_multimodal) == (True, True, False)
    assert model.supports_lora is (True if configured and since >= (0, 29) else None)


async def test_event_sources_are_one_per_rank(build: Build, connect: Connect) -> None:
    """With KV events on there is a source per rank, its wildcard resolved to where we reached the worker."""
    rig = build(ranks=2, configured=True)
    client = await connect(rig)
    first, second = await client.kv_event_sources()
    assert first.endpoint == rig.kv_endpoint
    assert first.connect_to == rig.kv_endpoint.replace("*", "127.0.0.1")
    assert (first.transport, first.encoding, first.topic, first.schema_version) == ("zmq", "msgpack", "kv@m", 1)
    assert (first.buffer_steps, first.hwm, first.max_queue_size) == (10_000, 100_000, 100_000)
    assert (first.data_parallel_rank, second.data_parallel_rank) == (0, 1)
    assert first.replay_endpoint


async def test_events_may_be_off(build: Build, connect: Connect) -> None:
    """A worker without KV events has no sources, which is an answer and no error."""
    client = await connect(build())
    assert await client.kv_event_sources() == ()


async def test_a_too_large_request_is_named(build: Build, connect: Connect, since: Version) -> None:
    """A message above the limit of its version is TooLarge, with both numbers; one below it is taken."""
    client = await connect(build())
    limit = 4 * 1024 * 1024 if since < (0, 28) else 32 * 1024 * 1024
    await client.abort(["x" * (limit - 1024)])
    # Above 32 MiB our own channel would refuse to send; there is nothing to learn of the server.
    if since >= (0, 28):
        return
    with pytest.raises(TooLarge) as failed:
        await client.abort(["x" * (limit + 1)])
    assert failed.value.code == "OUT_OF_RANGE"
    assert failed.value.detail == (
        f"Error, decoded message length too large: found {limit + 6} bytes, the limit is: {limit} bytes"
    )


async def test_a_rank_is_meant_by_generations_only(build: Build, connect: Connect, since: Version) -> None:
    """From 0.28 a generation goes to the rank it names and an unknown rank is refused; nothing else looks at it."""
    client = await connect(build(ranks=2))
    for rank in (0, 1):
        assert (await client.generate("x", rank=rank)).finish_reason is FinishReason.LENGTH
    await client.server_info(rank=7)
    await client.abort(["nobody"], rank=7)
    if since < (0, 28):
        await client.generate("x", rank=7)
        return
    assert await client.is_paused(rank=7) is False
    with pytest.raises(InvalidArgument) as failed:
        await client.generate("x", rank=7)
    assert failed.value.detail == (
        "engine-core error: data parallel rank 7 is not connected to this frontend; connected ranks: [0, 1]"
    )


async def test_a_prompt_has_to_fit(build: Build, connect: Connect, since: Version) -> None:
    """A prompt that leaves no room for a token is InvalidArgument that says how long it was."""
    client = await connect(build())
    for length in (3001, 3100):
        with pytest.raises(InvalidArgument, match=f"maximum context length is 3001 tokens.*{length} input tokens"):
            await client.generate("x" * length)
    assert (await client.generate("x" * 3000)).prompt_tokens == 3000
    with pytest.raises(InvalidArgument, match="empty prompt_token_ids"):
        await client.generate("")
    with pytest.raises(InvalidArgument, match="at least one prompt token ID"):
        await client.generate([])


@needs(0, 29)
async def test_adapters_are_known_by_name(build: Build, connect: Connect) -> None:
    """A name is loaded once, and only what is loaded can be unloaded; paths come from allowed places."""
    rig = build(configured=True)
    client = await connect(rig)
    first = await client.load_lora("adapter", rig.lora_path)
    with pytest.raises(ControlError, match="LoRA adapter `adapter` is already loaded") as again:
        await client.load_lora("adapter", rig.lora_path)
    assert again.value.code == "ALREADY_EXISTS"
    with pytest.raises(NotFound, match="LoRA adapter `other` is not loaded"):
        await client.unload_lora("other")
    with pytest.raises(InvalidArgument, match="outside the configured allowed prefixes"):
        await client.load_lora("other", "/")
    second = await client.load_lora("hub", "org/name")
    assert second.lora_id > first.lora_id
    assert [adapter.name for adapter in await client.list_loras()] == ["adapter", "hub"]


@needs(0, 28)
async def test_weights_need_a_name(build: Build, connect: Connect) -> None:
    """Weights are called "default" until they are named, and the name is never empty."""
    client = await connect(build(configured=True))
    assert await client.weight_version() == "default"
    for verb in ("update_weight_version", "finish_weight_update"):
        with pytest.raises(InvalidArgument, match="weight_version must not be empty"):
            await getattr(client, verb)("")
    await client.finish_weight_update()
    assert await client.weight_version() == "default"


@needs(0, 32)
async def test_a_frontend_that_owns_its_engine_can_be_shut_down(build: Build, connect: Connect) -> None:
    """Shutdown is acknowledged, and then the worker goes."""
    client = await connect(build(managed=True))
    await client.shutdown()
    for _ in range(100):
        try:
            await client.check(timeout_s=0.5)
        except WorkerUnreachable:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the worker is still there")


async def test_unknown_methods_are_unimplemented_without_a_word(build: Build) -> None:
    """Whatever is no method of a worker is UNIMPLEMENTED with empty details: no reflection, no health list."""
    rig = build()

    def ask() -> None:
        with grpc.insecure_channel(rig.target) as channel:
            for path in (
                "/vllm.Control/Nope",
                "/vllm.Nope/Nope",
                "/grpc.health.v1.Health/List",
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            ):
                with pytest.raises(grpc.RpcError) as failed:
                    channel.unary_unary(path, None, None)(b"", timeout=3)
                assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "")
            with pytest.raises(grpc.RpcError) as garbage:
                channel.unary_unary("/vllm.Control/Abort", None, None)(b"\xff\xff\xff", timeout=3)
            assert garbage.value.code() is grpc.StatusCode.INTERNAL
            assert garbage.value.details() == "failed to decode Protobuf message: invalid varint"

    await aside(ask)
