"""When fresh sources are asked for. Pure: polite, patient after failures, and slow after a final answer."""

from __future__ import annotations

from vllm_cp.errors import CredentialsRejected, NotSupported
from vllm_cp.kv.settings import Settings
from vllm_cp.kv.stream import SourceState

__all__ = ["Refreshing"]


class Refreshing:
    """The timer of one worker. ``now`` is monotonic seconds."""

    def __init__(self, settings: Settings) -> None:
        #: When to ask; ``None`` when there is no need to.
        self.due: float | None = None
        self.asked = self.failed = 0
        self._settings = settings
        self._pause = settings.refresh_s
        self._not_before = 0.0
        self._asking = False
        self._again = False  # something new happened while an answer was under way

    def want(self, now: float, *, urgent: bool = True) -> None:
        """Fresh sources would help. ``urgent``: something new happened, so earlier answers count for nothing."""
        if self._asking:
            self._again = self._again or urgent
            return
        if urgent:
            self._pause = self._settings.refresh_s
            self._not_before = min(self._not_before, now + self._pause)
        at = max(now, self._not_before)
        self.due = at if self.due is None else min(self.due, at)

    def take(self, now: float) -> bool:
        """Whether to ask now; then it counts as asked."""
        if self._asking or self.due is None or now < self.due:
            return False
        self._asking, self.due = True, None
        self.asked += 1
        return True

    def answered(self, now: float, *, final: bool) -> None:
        """An answer came. ``final``: there is nothing to listen to, and that will hardly change by itself."""
        self._asking = False
        if self._again:
            self._again = False
            self.want(now + self._settings.refresh_s)
            return
        if final:
            self.due = self._not_before = now + self._settings.refresh_final_s
            return
        # The next one, if the sources still cannot be reached, waits longer.
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, self._settings.refresh_max_s)

    def failed_with(self, error: Exception, now: float) -> SourceState | None:
        """It failed. Returns the state of the worker when the error is final, else it will be asked again."""
        self.failed += 1
        if isinstance(error, NotSupported):
            self.answered(now, final=True)
            return SourceState.UNSUPPORTED
        if isinstance(error, CredentialsRejected):
            self.answered(now, final=True)
            return SourceState.DENIED
        self.answered(now, final=False)
        self.due = self._not_before
        return None
