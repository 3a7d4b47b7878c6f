"""Bytes that a real server sent: recorded from a real vLLM 0.32.0 on CPU with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_cp import (
    Address,
    FinishReason,
    Generated,
    HealthStatus,
    KvEventSource,
    Parallelism,
    RlCapabilities,
    ServerInfo,
    _wire,
)

RECORDED = json.loads(Path(__file__).with_name("data").joinpath("recorded_0.32.0.json").read_text())["answers"]


@pytest.fixture(params=RECORDED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


EXPECTED = {
    "Health.Check": (_wire.health_status, HealthStatus.SERVING),
    "Control.GetServerInfo": (
        _wire.server_info,
        ServerInfo(
            engine_version="0.32.0",
            api_version="vllm",
            instance_id="1796065483591613442",
            parallelism=Parallelism(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                decode_context_parallel_size=1,
                world_size=1,
                data_parallel_size_local=1,
            ),
            max_model_len=2048,
            kv_block_size=32,
            total_kv_blocks=32768,
            max_running_requests=8,
            max_batched_tokens=2048,
            rl_capabilities=RlCapabilities(),
            effective_attention_block_size=32,
        ),
    ),
    "Control.GetKvEventSources": (
        lambda data: _wire.kv_event_sources(data, "worker-0"),
        (
            KvEventSource(
                transport="zmq",
                endpoint="tcp://*:15557",
                topic="kv@tiny",
                replay_endpoint="tcp://*:15558",
                data_parallel_rank=0,
                encoding="msgpack",
                schema_version=1,
                buffer_steps=10000,
                hwm=100000,
                max_queue_size=100000,
                live=Address(connect_to="tcp://worker-0:15557"),
                replay=Address(connect_to="tcp://worker-0:15558"),
            ),
        ),
    ),
    "Control.IsPaused running": (_wire.paused, False),
    "Control.IsPaused paused": (_wire.paused, True),
    "Control.IsSleeping awake": (_wire.sleeping, False),
    "Control.GetWeightVersion": (_wire.weight_version, "default"),
    "Control.Abort": (_wire.nothing, None),
    # The finish carries a field 9 that later servers send and nobody here knows.
    "Inference.Generate": (
        _wire.generated,
        Generated(text="\ufffd", finish_reason=FinishReason.LENGTH, prompt_tokens=1, output_tokens=1),
    ),
}


def test_a_real_answer_is_read_right(name: str) -> None:
    """What a real server sent becomes the facts that it meant."""
    parse, expected = EXPECTED[name]
    assert parse(bytes.fromhex(RECORDED[name])) == expected
