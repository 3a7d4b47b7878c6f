"""Times: ISO 8601 in UTC in data, the reader's own zone in tables."""

from __future__ import annotations

from datetime import datetime, timezone

__all__ = ["iso", "local", "local_now"]


def iso(unix: float | None) -> str | None:
    """Unix seconds as data: ``2026-11-30T20:18:05.123Z``; ``None`` stays ``None``."""
    if unix is None:
        return None
    return datetime.fromtimestamp(unix, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local(text: str, *, now: datetime | None = None) -> str:
    """An ISO time for people: ``21:18:05 CET`` today, ``2026-11-29 21:18:05 CET`` on other days."""
    # Python 3.10 does not read a Z.
    at = datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
    today = (now or datetime.now(timezone.utc)).astimezone().date()
    return at.strftime("%H:%M:%S %Z" if at.date() == today else "%Y-%m-%d %H:%M:%S %Z")


def local_now(unix: float) -> str:
    """Unix seconds of just now, for people."""
    return local(iso(unix) or "")
