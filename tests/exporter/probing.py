"""A server that probes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporter.asking import Answer, Asker, serving
from tests.exporter.pages import Page
from vllm_cp_exporter.config import ExporterConfig, ProbeModule, WorkerConfig
from vllm_cp_exporter.probe import Prober
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board

LOOPBACK = ("127.0.0.0/8",)


@asynccontextmanager
async def probing(
    *,
    allow: tuple[str, ...] = LOOPBACK,
    modules: Mapping[str, ProbeModule] | None = None,
    board: Board | None = None,
    workers: Mapping[str, WorkerConfig] | None = None,
    **words: Any,
) -> AsyncIterator[Asker]:
    """A server that watches nobody and probes whom it may."""
    settings = ExporterConfig(probe_allow=allow, modules=MappingProxyType(dict(modules or {})))
    board = board or Board()
    prober = Prober(board, SelfMetrics(), lambda: settings, lambda: workers or {}, **words)
    async with serving(board, prober=prober) as ask:
        yield ask


def page(answer: Answer) -> Page:
    assert answer.status == 200, answer.text
    return Page(parse_text(answer.text))
