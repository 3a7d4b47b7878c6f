"""Views taken apart: every part of them by its path, and the same view with another part in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

from tests.exporter.views import FACTS, GONE, KV, MODEL, SERVER, UP, WALL, life, lives, view
from vllm_cp import Parallelism, RlCapabilities
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp_exporter.catalog import CHECKS
from vllm_cp_exporter.snapshot import Facts, WorkerView


def paths(thing: Any, before: str = "") -> Iterator[str]:
    """Every part, whole ones before what is in them: ``state``, ``state.rungs``, ``state.rungs.warm``, …."""
    for field in fields(thing):
        path = f"{before}{field.name}"
        yield path
        part = getattr(thing, field.name)
        if is_dataclass(part):
            yield from paths(part, f"{path}.")


def part(thing: Any, path: str) -> Any:
    """The part at a path."""
    return reduce(getattr, path.split("."), thing)


def has(thing: Any, path: str) -> bool:
    """Whether there is such a part: an absent fault has no start."""
    return reduce(lambda at, name: getattr(at, name, None), path.split(".")[:-1], thing) is not None


def changed(thing: Any, path: str, value: Any) -> Any:
    """The same thing with that part; all others are the same objects as before."""
    name, _, rest = path.partition(".")
    return replace(thing, **{name: changed(getattr(thing, name), rest, value) if rest else value})


def corpus() -> list[WorkerView]:
    """Workers that differ in everything that a row may show."""
    again = {**UP, "instance_id": "second"}
    engines = tuple(EngineHealth(engine=rank, state=state) for rank, state in enumerate(EngineState))
    states = [
        *lives(),
        life(GONE, {}, {}, UP, {"canaries": True, "canary": True}),
        life(UP, GONE, *[{}] * 9, again, *[again] * 10, GONE),
        life(UP, GONE, *[{}] * 3, UP, *[UP] * 10, GONE, *[{}] * 9, again, *[again] * 10),
        life(UP, {"engines": engines}),
    ]
    views = [view(state) for state in states]
    server = replace(
        SERVER,
        instance_id="second",
        engine_version="0.28.0",
        parallelism=Parallelism(tensor_parallel_size=8, data_parallel_rank=3),
        total_kv_blocks=7,
        kv_block_size=None,
        max_model_len=1,
        max_running_requests=2,
        max_batched_tokens=3,
        max_loras=None,
        effective_attention_block_size=5,
        rl_capabilities=RlCapabilities(weight_transfer_enabled=True),
        proto_version=None,
    )
    model = replace(
        MODEL,
        model_id="m",
        served_model_name="n",
        served_model_aliases=(),
        supports_text_input=True,
        supports_token_ids_input=True,
        supports_lora=True,
        supports_multimodal=True,
        reasoning_parser="r",
        tool_call_parser="t",
    )
    everything: dict[str, Any] = {
        "target": "",
        "http_url": "http://a",
        "namespace": "ml",
        "pod": "a-0",
        "node": "n1",
        "proofs": MappingProxyType(dict.fromkeys(CHECKS, WALL)),
        "round_trip_s": 0.25,
        "gives_up_at": MappingProxyType({0: WALL, 3: WALL + 1}),
        "kv": KV,
    }
    return [
        *views,
        view(states[1], facts=FACTS),
        view(states[-1], key="b", pool="embed", facts=Facts(server=server, model=model, sources=()), **everything),
        view(states[1], facts=Facts(server=server, sources_problem="not supported")),
    ]
