"""Answers: what each field becomes, what zero means in it, and what is not understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.raw import field, message, packed, unknown
from vllm_cp import (
    Address,
    FinishReason,
    Generated,
    HealthStatus,
    KvEventSource,
    LoraAdapter,
    ModelInfo,
    Parallelism,
    RlCapabilities,
    ServerInfo,
    _wire,
)

U32, U64 = 2**32 - 1, 2**64 - 1
SMALL, BIG = st.integers(0, U32), st.integers(0, U64)
TEXT = st.text(max_size=10)

#: Field number and name of every plain field, and what a zero in it means.
SERVER_TEXTS = {1: "engine_version", 2: "api_version"}
SERVER_OPTIONAL_TEXTS = {3: "instance_id", 12: "proto_version"}
SERVER_SMALL = {5: "max_model_len", 6: "kv_block_size", 10: "max_loras"}
SERVER_BIG = {
    7: "total_kv_blocks",
    8: "max_running_requests",
    9: "max_batched_tokens",
    14: "effective_attention_block_size",
}
PARALLELISM = {
    1: "tensor_parallel_size",
    2: "pipeline_parallel_size",
    3: "data_parallel_size",
    5: "decode_context_parallel_size",
    6: "world_size",
    7: "data_parallel_size_local",
}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys([*SERVER_TEXTS, *SERVER_OPTIONAL_TEXTS], TEXT),
            **dict.fromkeys(SERVER_SMALL, SMALL),
            **dict.fromkeys(SERVER_BIG, BIG),
        },
    ),
    st.randoms(use_true_random=False),
)
def test_server_info(fields: dict[int, Any], order: Any) -> None:
    """Any fields in any order become the facts of that name; zero and empty are unknown, and the rest stays default."""
    numbers = list(fields)
    order.shuffle(numbers)
    data = b"".join(field(number, fields[number]) for number in numbers)
    expected = {
        **{name: fields[n] for n, name in SERVER_TEXTS.items() if n in fields},
        **{
            name: fields[n] or None
            for names in (SERVER_OPTIONAL_TEXTS, SERVER_SMALL, SERVER_BIG)
            for n, name in names.items()
            if n in fields
        },
    }
    assert _wire.server_info(data) == ServerInfo(**expected)


@pytest.mark.parametrize(("number", "name"), {**SERVER_SMALL, **SERVER_BIG}.items())
def test_a_zero_of_a_size_or_limit_is_unknown(number: int, name: str) -> None:
    """A placeholder zero is None, written or left out; the largest number is itself and never negative."""
    largest = U32 if number in SERVER_SMALL else U64
    assert getattr(_wire.server_info(b""), name) is None
    assert getattr(_wire.server_info(field(number, 0)), name) is None
    assert getattr(_wire.server_info(field(number, 1)), name) == 1
    assert getattr(_wire.server_info(field(number, largest)), name) == largest


def test_all_blocks_there_can_be() -> None:
    """A total of 2^64-1 blocks is that number, and is not multiplied by anything."""
    data = message({4: message({3: 4}), 6: 16, 7: U64})
    info = _wire.server_info(data)
    assert info.total_kv_blocks == 18446744073709551615
    assert info.parallelism is not None
    assert info.parallelism.data_parallel_size == 4


def test_hybrid_models_show_both_sizes() -> None:
    """A scheduler block of 4 with an attention block of 256 is shown as both, and nothing is derived from them."""
    info = _wire.server_info(message({6: 4, 7: 1000, 14: 256}))
    assert (info.kv_block_size, info.effective_attention_block_size, info.total_kv_blocks) == (4, 256, 1000)


def test_parallelism_that_was_not_sent_is_none() -> None:
    """No parallelism and an empty one differ: the first is unknown, the second knows that its rank is 0."""
    assert _wire.server_info(b"").parallelism is None
    assert _wire.server_info(field(4, b"")).parallelism == Parallelism(data_parallel_rank=0)


@given(st.fixed_dictionaries({}, optional={**dict.fromkeys(PARALLELISM, SMALL), 4: SMALL}))
def test_parallelism(fields: dict[int, int]) -> None:
    """Every size of zero is unknown; the rank alone may really be zero."""
    parallelism = _wire.server_info(field(4, message(dict(fields)))).parallelism
    sizes = {name: fields.get(number) or None for number, name in PARALLELISM.items()}
    assert parallelism == Parallelism(**sizes, data_parallel_rank=fields.get(4, 0))


def test_rl_capabilities() -> None:
    """A message that was not sent is None; a sent one has its flags, and a backend only where one is named."""
    assert _wire.server_info(b"").rl_capabilities is None
    assert _wire.server_info(field(11, b"")).rl_capabilities == RlCapabilities()
    data = field(11, message({1: 1, 2: "nccl", 3: 1, 4: 1}))
    assert _wire.server_info(data).rl_capabilities == RlCapabilities(
        weight_transfer_enabled=True,
        weight_transfer_backend="nccl",
        sleep_mode_enabled=True,
        draft_weight_updates_enabled=True,
    )


def test_model_info() -> None:
    """Every field of the model, by its number."""
    data = message({1: "/models/tiny", 2: "tiny"}) + field(3, "a") + field(3, "b")
    data += message({20: 1, 21: 1, 22: 1, 23: 1, 24: "qwen3", 25: "hermes"})
    assert _wire.model_info(data) == ModelInfo(
        model_id="/models/tiny",
        served_model_name="tiny",
        served_model_aliases=("a", "b"),
        supports_text_input=True,
        supports_token_ids_input=True,
        supports_lora=True,
        supports_multimodal=True,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
    )


def test_an_empty_model_info() -> None:
    """What was not said: flags are off, parsers are none, and LoRA is unknown, because older servers cannot say no."""
    info = _wire.model_info(b"")
    assert info == ModelInfo()
    assert info.supports_lora is None
    assert _wire.model_info(field(22, 0)).supports_lora is None


def test_kv_event_sources() -> None:
    """One source per rank, every field by its number, each with the address that can be used."""
    source = message(
        {
            1: "zmq",
            2: "tcp://*:5557",
            3: "kv@tiny",
            4: "tcp://*:5558",
            5: 0,
            6: "msgpack",
            7: 1,
            8: 10000,
            9: 100000,
            10: 300,
        }
    )
    (got,) = _wire.kv_event_sources(field(1, source), "::1")
    assert got == KvEventSource(
        transport="zmq",
        endpoint="tcp://*:5557",
        topic="kv@tiny",
        replay_endpoint="tcp://*:5558",
        data_parallel_rank=0,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10000,
        hwm=100000,
        max_queue_size=300,
        live=Address(connect_to="tcp://[::1]:5557"),
        replay=Address(connect_to="tcp://[::1]:5558"),
    )


def test_an_empty_source() -> None:
    """What a source did not say: no rank is all ranks, a zero mark is no limit, sizes are unknown, no replay."""
    (got,) = _wire.kv_event_sources(field(1, b""), "worker-0")
    assert (got.data_parallel_rank, got.hwm, got.replay_endpoint) == (None, 0, None)
    assert (got.schema_version, got.buffer_steps, got.max_queue_size) == (None, None, None)
    assert got.live.reason == got.replay.reason == "the server advertises no address"
    (zeros,) = _wire.kv_event_sources(field(1, message({5: 0, 7: 0, 8: 0, 9: 0, 10: 0})), "worker-0")
    assert (zeros.data_parallel_rank, zeros.hwm, zeros.buffer_steps) == (0, 0, None)
    assert _wire.kv_event_sources(b"", "worker-0") == ()


@given(st.lists(st.tuples(st.none() | SMALL, TEXT, SMALL, TEXT), max_size=5))
def test_any_sources(sources: list[tuple[int | None, str, int, str]]) -> None:
    """However many sources with whatever in them: as many come out, in order, verbatim."""
    data = b"".join(
        field(1, message({1: transport, 2: endpoint, 5: rank, 9: hwm})) for rank, endpoint, hwm, transport in sources
    )
    got = _wire.kv_event_sources(data, "worker-0")
    assert [(s.data_parallel_rank, s.endpoint, s.hwm, s.transport) for s in got] == sources


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (0, HealthStatus.UNKNOWN),
        (1, HealthStatus.SERVING),
        (2, HealthStatus.NOT_SERVING),
        (3, HealthStatus.SERVICE_UNKNOWN),
        (4, HealthStatus.UNKNOWN),
        (99, HealthStatus.UNKNOWN),
    ],
)
def test_health(number: int, status: HealthStatus) -> None:
    """Each status by its number; one that nobody knows is unknown, not an error."""
    assert _wire.health_status(field(1, number)) is status
    assert _wire.health_status(b"") is HealthStatus.UNKNOWN


def test_single_values() -> None:
    """Paused, sleeping and the weight version are one field each; a false that was not sent is a no."""
    assert _wire.paused(b"") is False
    assert _wire.paused(field(1, 1)) is True
    assert _wire.sleeping(b"") is False
    assert _wire.sleeping(field(1, 1)) is True
    assert _wire.weight_version(b"") == ""
    assert _wire.weight_version(field(1, "v2")) == "v2"
    assert _wire.nothing(b"") is None  # type: ignore[func-returns-value]


@given(st.integers(-(2**63), 2**63 - 1), TEXT, TEXT)
def test_adapters(number: int, name: str, path: str) -> None:
    """An adapter is the same in all three answers that carry one."""
    adapter = message({1: number, 2: name, 3: path})
    expected = LoraAdapter(lora_id=number, name=name, source_path=path)
    assert _wire.loaded_lora(field(1, adapter)) == expected
    assert _wire.unloaded_lora(field(1, adapter)) == expected
    assert _wire.loras(field(1, adapter) * 2) == (expected, expected)
    assert _wire.loras(b"") == ()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (0, FinishReason.NOT_FINISHED),
        (1, FinishReason.LENGTH),
        (2, FinishReason.STOP),
        (3, FinishReason.ABORTED),
        (4, FinishReason.UNKNOWN),
    ],
)
def test_generated(number: int, reason: FinishReason) -> None:
    """A finished generation: text, tokens (packed or not), counts, and why it ended."""
    finish = message({1: 2, 2: number})
    for ids in (field(4, packed([300, 7])), field(4, 300) + field(4, 7)):
        data = field(1, message({1: 5})) + field(2, message({2: "hé"}) + ids + field(8, finish))
        assert _wire.generated(data) == Generated(
            text="hé", token_ids=(300, 7), finish_reason=reason, prompt_tokens=5, output_tokens=2
        )


def test_an_unfinished_generation() -> None:
    """Without a finish nothing is known of its length, and nothing finished."""
    assert _wire.generated(b"") == Generated()
    assert Generated().output_tokens is None
    assert _wire.generated(field(2, field(8, b""))).output_tokens == 0


PARSERS: list[Callable[[bytes], Any]] = [
    _wire.health_status,
    _wire.server_info,
    _wire.model_info,
    lambda data: _wire.kv_event_sources(data, "worker-0"),
    _wire.paused,
    _wire.sleeping,
    _wire.weight_version,
    _wire.loras,
    _wire.loaded_lora,
    _wire.unloaded_lora,
    _wire.generated,
]


@pytest.mark.parametrize("parse", PARSERS)
def test_fields_of_the_future_are_skipped(parse: Callable[[bytes], Any]) -> None:
    """A newer server's fields, of every wire type, change nothing in what is known."""
    assert parse(unknown(200)) == parse(b"")
    assert parse(unknown(200) + field(1, b"") + unknown(300)) == parse(field(1, b""))


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x05ab",  # ends inside a field
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a number too long
        b"\x07",  # a wire type that does not exist
        b"\x00\x01",  # field number zero
        b"<html><body>404</body></html>",
    ],
)
def test_what_is_no_message_is_said_to_be_none(parse: Callable[[bytes], Any], data: bytes) -> None:
    """Bytes that are no message are one kind of error, whoever sent them."""
    with pytest.raises(_wire.UndecodableError):
        parse(data)


@given(st.binary(max_size=40), st.sampled_from(PARSERS))
def test_any_bytes_are_an_answer_or_undecodable(data: bytes, parse: Callable[[bytes], Any]) -> None:
    """Whatever comes over the wire, nothing else is raised."""
    try:
        parse(data)
    except _wire.UndecodableError:
        return
