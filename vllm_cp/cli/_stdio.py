"""The two standard streams: data out, talk out, in any locale, into anything."""

from __future__ import annotations

import contextlib
import os
import select
import sys

from vllm_cp.cli._text import plain

__all__ = ["OutputFailedError", "emit", "encodable", "guard_descriptors", "reader_left", "say", "talk"]


class OutputFailedError(Exception):
    """Standard output could not be written. ``reader_left`` when it was a pipe that nobody reads any more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror}")
        self.reader_left = isinstance(error, BrokenPipeError)


def guard_descriptors() -> None:
    """Put the null device in the place of closed standard descriptors, else a socket would get their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system gives the lowest free number


def emit(text: str) -> None:
    """Write data and see it through. Raises OutputFailedError; a closed standard output swallows it all."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes again when it ends: let that succeed, or it complains and changes the exit code.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
        raise OutputFailedError(error) from None


def reader_left() -> bool:
    """Whether standard output is a pipe or socket that nobody reads any more: known without writing to it."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # none, or one that is no file
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def say(text: str) -> None:
    """One line for people, on standard error."""
    talk(f"vllm-cp: {plain(text)}\n")


def talk(text: str) -> None:
    """Text for people, on standard error. Where that can't be written, nobody is there to be told."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        sys.stderr.write(encodable(text, sys.stderr.encoding))
        sys.stderr.flush()


def encodable(text: str, encoding: str | None) -> str:
    """The text with what the encoding can't hold escaped, so that writing never raises UnicodeEncodeError."""
    name = encoding or "utf-8"
    return text.encode(name, "backslashreplace").decode(name)
