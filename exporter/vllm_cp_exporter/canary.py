"""Canaries: a one-token generation as proof that a worker generates. Opt-in, and only where it disturbs nobody."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from vllm_cp import AsyncControlClient, ControlError, OutOfTime
from vllm_cp.models.generated import Generated
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.observer import CANARY, Observer
from vllm_cp_exporter.config import Canary

__all__ = ["Canaries"]


class Canaries:
    """When to send one, to which rank, and what to do when it is not answered.

    One at a time, one per instance unless told ``always``, one rank per round; never to a worker that is suspended or
    stopping, and only to one that is idle by its own /metrics: without that page none is sent.
    """

    def __init__(
        self, mode: Canary, observer: Observer, page: Callable[[], EngineMetrics | None], timeout_s: float
    ) -> None:
        """``page`` is the worker's /metrics as read lately, ``None`` when it was not."""
        self._mode = mode
        self._observer = observer
        self._page = page
        self._timeout_s = timeout_s
        self._sent = 0

    async def send_if_due(self, client: AsyncControlClient, ranks: int | None) -> None:
        """Called right after a look at the worker, so that its state is fresh. ``ranks``: behind this frontend."""
        if not self._due():
            return
        rank = self._sent % ranks if ranks is not None and ranks > 1 else None
        request_id = f"vllm-cp-canary-{uuid.uuid4().hex}"
        self._sent += 1
        answer: Generated | ControlError
        try:
            answer = await client.generate(CANARY, request_id=request_id, rank=rank, timeout_s=self._timeout_s)
        except ControlError as error:
            answer = error
            if isinstance(error, OutOfTime):
                await _abort(client, request_id)
        self._observer.canary(answer)

    def _due(self) -> bool:
        if self._mode is Canary.OFF:
            return False
        page = self._page()
        idle = page is not None and page.running == 0 and page.waiting == 0
        once = self._mode is Canary.ONCE
        return idle and (self._observer.wants_canary if once else self._observer.admits_canary)


async def _abort(client: AsyncControlClient, request_id: str) -> None:
    try:
        await client.abort([request_id])
    except ControlError:
        return  # the passed deadline aborts it too
