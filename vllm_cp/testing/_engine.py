"""The engines behind a fake frontend: one per data-parallel rank, and what runs on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from vllm_cp.testing._bell import Bell, Refusal

__all__ = ["Engines", "Rank", "Request"]

FATAL = "engine core reported fatal failure"
PARTS = frozenset({"weights", "kv_cache"})


@dataclass(slots=True, kw_only=True)
class Rank:
    """One engine."""

    number: int
    #: ``None``, or how it was paused: abort, wait, keep.
    paused: str | None = None
    #: Whether new requests are refused rather than queued while it is paused.
    refuses: bool = False
    #: The parts of it that are asleep.
    asleep: frozenset[str] = frozenset()
    weight_version: str = "default"
    #: Frozen: answers nothing until it thaws.
    hung: bool = False
    #: Gone without a word: answers nothing, ever.
    dead: bool = False
    running: list[Request] = field(default_factory=list)
    #: What it was told while it was frozen.
    backlog: list[Callable[[Rank], None]] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        return not self.hung and not self.dead

    @property
    def working(self) -> bool:
        return any(request.admitted and not request.aborted for request in self.running)

    @property
    def sleeping(self) -> bool:
        return self.paused is not None or bool(self.asleep)

    @property
    def admits(self) -> bool:
        return self.answers and not self.sleeping

    @property
    def steps(self) -> bool:
        return self.answers and self.paused != "keep" and not self.asleep


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One generation in flight."""

    request_id: str
    limit: int
    made: int = 0
    admitted: bool = False
    aborted: bool = False


class Engines:
    """All ranks of one worker. Every method runs on the loop of the bell."""

    def __init__(self, bell: Bell, ranks: int) -> None:
        self._bell = bell
        self.ranks = [Rank(number=n) for n in range(ranks)]
        #: An engine reported its own death: final.
        self.fatal = False
        #: Adapters by name: (id, path).
        self.loras: dict[str, tuple[int, str]] = {}
        self._loras_made = 0
        self._changing = False

    def chosen(self, rank: int | None) -> list[Rank]:
        """All ranks, or the one. Raises ValueError when there is no such rank."""
        if rank is None:
            return self.ranks
        if not 0 <= rank < len(self.ranks):
            raise ValueError(f"no rank {rank}: this worker has {len(self.ranks)}")
        return [self.ranks[rank]]

    async def answer(self, what: str, ranks: Sequence[Rank] | None = None) -> None:
        """Come back when every engine has answered; a frozen one answers when it thaws, a dead one never."""
        asked = self.ranks if ranks is None else ranks
        await self._bell.until(lambda: self.fatal or all(rank.answers for rank in asked))
        if self.fatal:
            raise Refusal("INTERNAL", f"{what}: {FATAL}")

    async def agreed(self, what: str, utility: str, read: Callable[[Rank], object]) -> object:
        """What every engine says of itself, if they all say the same."""
        await self.answer(f"{what} failed")
        said = [read(rank) for rank in self.ranks]
        if any(answer != said[0] for answer in said):
            shown = ", ".join(_debug(answer) for answer in said)
            raise Refusal(
                "INTERNAL",
                f"{what} failed: utility call `{utility}` returned inconsistent results across engines: [{shown}]",
            )
        return said[0]

    # -- changes: one at a time through the frontend, and an engine acts on them even if their caller has given up

    async def change(self, what: str, act: Callable[[Rank], None]) -> None:
        """Make every engine do something."""
        async with self._turn():
            self.tell(act)
            await self.answer(f"{what} failed")

    async def pause(self, what: str, mode: str, *, refuse: bool, asleep: frozenset[str] = frozenset()) -> None:
        """Stop generating; with ``wait`` comes back when nothing runs any more. Then put parts to sleep."""

        def act(rank: Rank) -> None:
            rank.paused, rank.refuses = mode, refuse and mode != "keep"
            if mode == "abort":
                for request in rank.running:
                    request.aborted = True
            if mode != "wait":
                rank.asleep |= asleep

        async with self._turn():
            self.tell(act)
            await self.answer(f"{what} failed")
            if mode == "wait":
                await self._bell.until(lambda: self.fatal or not any(rank.working for rank in self.ranks))
                for rank in self.ranks:
                    rank.asleep |= asleep
                self._bell.ring()

    async def resume(self, what: str) -> None:
        """Go on; what is asleep stays asleep."""

        def act(rank: Rank) -> None:
            rank.paused, rank.refuses = None, False

        await self.change(what, act)

    async def wake(self, what: str, parts: frozenset[str]) -> None:
        """Wake parts; with nothing left asleep, generation goes on."""

        def act(rank: Rank) -> None:
            rank.asleep -= parts
            if not rank.asleep:
                rank.paused, rank.refuses = None, False

        await self.change(what, act)

    def tell(self, act: Callable[[Rank], None], ranks: Sequence[Rank] | None = None) -> None:
        """Engines do this now; a frozen one when it thaws, a dead one never."""
        for rank in self.ranks if ranks is None else ranks:
            if rank.hung:
                rank.backlog.append(act)
            elif not rank.dead:
                act(rank)
        self._bell.ring()

    def thaw(self) -> None:
        """Frozen engines do what they have been told meanwhile."""
        for rank in self.ranks:
            rank.hung = False
            backlog, rank.backlog = rank.backlog, []
            for act in backlog:
                self.tell(act, [rank])
        self._bell.ring()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        await self._bell.until(lambda: not self._changing)
        self._changing = True
        try:
            yield
        finally:
            self._changing = False
            self._bell.ring()

    def next_lora_id(self) -> int:
        """Ids are given out once, also to attempts that fail."""
        self._loras_made += 1
        return self._loras_made

    # -- generation

    async def run(self, request: Request, rank: int | None, interval_s: float) -> bool:
        """Generate until done; whether it was aborted. ``request.made`` counts the tokens meanwhile."""
        home = self._home(rank)
        if home.paused is not None and home.refuses:
            raise Refusal("UNAVAILABLE", "Generation is paused. Please retry after it resumes.")
        home.running.append(request)
        try:
            while True:
                await self._bell.until(
                    lambda: self.fatal or request.aborted or (home.steps and (request.admitted or not home.sleeping))
                )
                if self._over(request):
                    return True
                request.admitted = True
                if interval_s > 0:
                    await self._bell.until(lambda: self.fatal or request.aborted, timeout_s=interval_s)
                    if self._over(request):
                        return True
                    if not home.steps:
                        continue
                    request.made += 1
                else:
                    request.made = request.limit
                self._bell.ring()
                if request.made >= request.limit:
                    return False
        finally:
            home.running.remove(request)
            self._bell.ring()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End the requests of these ids; others are nobody's."""
        wanted = {request_id for request_id in request_ids if request_id}
        for rank in self.ranks:
            for request in rank.running:
                if request.request_id in wanted:
                    request.aborted = True
        self._bell.ring()

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return any(rank.running for rank in self.ranks)

    def _home(self, rank: int | None) -> Rank:
        return self.ranks[rank] if rank is not None else min(self.ranks, key=lambda r: len(r.running))

    def _over(self, request: Request) -> bool:
        if self.fatal:
            raise Refusal("INTERNAL", f"engine-core error: {FATAL}")
        return request.aborted


def _debug(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"'
