"""Requests, steps and statistics of one engine.  It owns no socket: it returns the batches to send."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.real.sim.facts import EngineFacts
from tests.real.sim.kv import BlockCache, KvEvent
from tests.real.sim.protocol import ABORTED, ERROR, LENGTH, Batch, Output

PAUSED_ERROR = ["engine_paused", "Generation is paused. Please retry after it resumes.", True]


@dataclass(kw_only=True)
class Request:
    """A generation request inside the engine."""

    request_id: str
    client: int
    prompt: list[int]
    max_tokens: int
    lora: tuple[int, str] | None
    rng: random.Random
    generated: list[int] = field(default_factory=list)
    running: bool = False
    first_token_at: float = 0.0
    cached_tokens: int = 0

    @property
    def held(self) -> int:
        """Tokens of KV cache the request occupies."""
        return len(self.prompt) + len(self.generated) if self.running else 0

    def prefill_stats(self) -> dict[str, int]:
        """How much of the prompt was computed and how much was found cached."""
        total = len(self.prompt)
        cached = min(self.cached_tokens, max(total - 1, 0))
        return {
            "num_prompt_tokens": total,
            "num_computed_tokens": total - cached,
            "num_cached_tokens": cached,
            "num_local_cached_tokens": cached,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": total - cached,
        }


class Scheduler:
    """The queue of one engine, and the switches that hold it back."""

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.requests: dict[str, Request] = {}
        self.counters = {"added": 0, "aborted": 0, "finished": 0, "tokens": 0, "utility": 0}
        self.paused: str | None = None  # None or the pause mode: abort, wait, keep
        self.reject_new = False
        self.asleep: set[str] = set()  # of "weights", "kv_cache"
        self.fail_next = 0  # so many new requests end at once with an engine error
        self.cache = BlockCache(facts.block_size, facts.num_gpu_blocks)
        self._prefix = {"requests": 0, "queries": 0, "hits": 0}
        self._steps = 0

    @property
    def running(self) -> int:
        """Requests admitted and not finished."""
        return sum(request.running for request in self.requests.values())

    def add(self, body: list[Any]) -> Batch | None:
        """Queue the request of an ADD message, or answer it at once."""
        request_id, prompt, sampling, lora = body[0], body[1] or [], body[3], body[6]
        client = body[11] if len(body) > 11 else 0
        if self.fail_next > 0:
            self.fail_next -= 1
            return self._finished(client, [request_id], ERROR)
        if self.reject_new:
            return self._finished(client, [request_id], ERROR, PAUSED_ERROR)
        self.counters["added"] += 1
        self.requests[request_id] = Request(
            request_id=request_id,
            client=client,
            prompt=list(prompt),
            max_tokens=(sampling or {}).get("max_tokens") or 16,
            lora=(lora[1], lora[0]) if lora else None,  # a LoRARequest is an array: name, integer id, path, ...
            rng=random.Random(f"{self.facts.seed}/{request_id}"),
        )
        return None

    def abort(self, request_ids: Iterable[str]) -> list[Batch]:
        """Drop requests on the frontend's word.

        As vLLM: an aborted request produces no further output, only its id in ``finished_requests`` of the next batch.
        """
        dropped = self._drop(request_ids)
        return [Batch(client=client, finished=ids, stats=self._stats()) for client, ids in dropped.items()]

    def abort_all(self) -> list[Batch]:
        """End every request as aborted, as a pause does."""
        dropped = self._drop(list(self.requests))
        return [self._finished(client, ids, ABORTED) for client, ids in dropped.items()]

    def _drop(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        dropped: dict[int, list[str]] = {}
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request:
                self.counters["aborted"] += 1
                dropped.setdefault(request.client, []).append(request_id)
        return dropped

    def _finished(self, client: int, ids: list[str], reason: int, error: list[Any] | None = None) -> Batch:
        outputs: list[Output] = []
        for request_id in ids:
            output: Output = [request_id, [], None, None, None, reason]
            if error is not None and self.facts.protocol_version >= (0, 33):
                code, message, retryable = error
                output += [None] * 7 + [0, None, None, None, None]
                output.append({"code": code, "message": message, "retryable": retryable})
            outputs.append(output)
        return Batch(client=client, outputs=outputs, finished=ids)

    def step(self) -> tuple[list[Batch], list[KvEvent]]:
        """One scheduler step: admit, prefill, decode one chunk, report."""
        now = time.monotonic()
        events: list[KvEvent] = []
        batches: dict[int, Batch] = {}
        self._steps += 1
        if self.paused != "keep" and not self.asleep:
            events += self._admit(now)
            for request in list(self.requests.values()):
                if request.running and now >= request.first_token_at:
                    batch = batches.setdefault(request.client, Batch(client=request.client))
                    events += self._decode(request, batch)
        for batch in batches.values():
            batch.stats = self._stats()
        return list(batches.values()), events

    def _admit(self, now: float) -> list[KvEvent]:
        """Start waiting requests while there is room."""
        events: list[KvEvent] = []
        running = self.running
        for request in self.requests.values():
            if request.running:
                continue
            if self.paused is not None or running >= self.facts.max_num_seqs:
                break
            request.running = True
            running += 1
            stored, request.cached_tokens = self.cache.store(request.prompt, request.lora)
            events += stored
            request.first_token_at = now + self.facts.prefill_delay
            self._prefix["requests"] += 1
            self._prefix["queries"] += len(request.prompt)
            self._prefix["hits"] += request.cached_tokens
        return events

    def _decode(self, request: Request, batch: Batch) -> list[KvEvent]:
        """Append a running request's next tokens to ``batch``."""
        first = not request.generated
        count = min(self.facts.tokens_per_step, request.max_tokens - len(request.generated))
        low, high = self.facts.token_range
        tokens = [request.rng.randrange(low, high) for _ in range(count)]
        request.generated += tokens
        self.counters["tokens"] += count
        done = len(request.generated) >= request.max_tokens
        output: Output = [request.request_id, tokens]
        if done or first:
            output += [None, None, None, LENGTH if done else None]
        if first:
            output += [None, None, None, None, None, request.prefill_stats()]
        batch.outputs.append(output)
        if not done:
            return []
        del self.requests[request.request_id]
        self.counters["finished"] += 1
        batch.finished = [*(batch.finished or []), request.request_id]
        return self.cache.store(request.prompt + request.generated, request.lora)[0]

    def _stats(self) -> dict[str, Any]:
        """``SchedulerStats``; taking it resets the prefix-cache counters, which are per report."""
        held = sum(request.held for request in self.requests.values())
        prefix, self._prefix = self._prefix, {"requests": 0, "queries": 0, "hits": 0}
        return {
            "num_running_reqs": self.running,
            "num_waiting_reqs": len(self.requests) - self.running,
            "num_skipped_waiting_reqs": 0,
            "num_kv_fetch_reqs_by_stage": {},
            "step_counter": self._steps,
            "current_wave": 0,
            "kv_cache_usage": min(1.0, held / max(self.facts.capacity, 1)),
            "iteration_details": None,
            "prefix_cache_stats": {
                "reset": False,
                **prefix,
                "preempted_requests": 0,
                "preempted_queries": 0,
                "preempted_hits": 0,
                "hits_by_source": {},
            },
            "connector_prefix_cache_stats": None,
            "kv_cache_eviction_events": [],
            "spec_decoding_stats": None,
            "kv_connector_stats": None,
            "ec_connector_stats": None,
            "waiting_lora_adapters": {},
            "running_lora_adapters": {},
            "cudagraph_stats": None,
            "perf_stats": None,
        }
