"""Text of unknown origin, made safe for a terminal and measured in its columns."""

from __future__ import annotations

__all__ = ["columns", "cut", "plain"]


def plain(text: str) -> str:
    """The text on one line, with everything that could forge a line or move a cursor escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(text: str) -> int:
    """How many terminal columns a ``plain`` text takes."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, width: int, ellipsis: str) -> str:
    """The text in at most ``width`` columns, with an ellipsis for what is left out; the whole text where it fits.

    Words lose their end. A single word, such as an address, loses its middle: both its ends tell it from others.
    """
    if columns(text) <= width:
        return text
    room = max(0, width - len(ellipsis))
    tail = 0 if " " in text else room // 2
    end = _start(text[::-1], tail)[::-1]
    return _start(text, room - columns(end)) + ellipsis[: max(0, width)] + end


def _start(text: str, width: int) -> str:
    kept = []
    for character in text:
        width -= _columns(character)
        if width < 0:
            break
        kept.append(character)
    return "".join(kept)


def _columns(character: str) -> int:
    import unicodedata

    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
