"""What came of asking one worker of many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Outcome"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """A value or an error, of one worker."""

    #: The worker's identity: its discovery key.
    key: str
    #: Where it was asked; ``None`` when no usable address is known.
    target: str | None
    #: What the function returned; ``None`` with an error, and when it returned that.
    value: T | None = None
    #: Why there is no value.
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.error is None

    def unwrap(self) -> T:
        """The value. Raises the error if there is one instead."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # None only where T holds it
