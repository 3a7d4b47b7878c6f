"""Running ``vllm-cp top``: workers, keys and the terminal in one event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vllm_cp.cli._exit import Exit
from vllm_cp.cli._top_board import Board
from vllm_cp.cli._top_screen import Screen
from vllm_cp.config import Connection
from vllm_cp.faults import HttpConnection

__all__ = ["keys_of", "look", "run"]

#: Between two frames where nothing is pressed, seconds: the eye and a slow line take no more.
_FRAME_S = 0.5
#: Between two glances whether all workers have been heard of, seconds.
_GLANCE_S = 0.05
#: An escape that is followed by nothing for so long is the key of that name, seconds.
_ESCAPE_S = 0.05
_SPECIAL = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "pgup",
    "\x1b[6~": "pgdn",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "back",
    "\b": "back",
}


def look(
    connections: Sequence[Connection], urls: Mapping[str, HttpConnection], patience_s: float
) -> list[dict[str, Any]]:
    """The workers, as soon as all have been heard of, or patience is at its end."""

    async def looking() -> list[dict[str, Any]]:
        board = Board(connections, urls, 5.0)
        watching = asyncio.create_task(board.run())
        deadline = time.monotonic() + patience_s
        try:
            while not board.settled and time.monotonic() < deadline:
                # It never ends by itself: whatever ends it is a defect, and is raised here.
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(watching), _GLANCE_S)
            return board.records()
        finally:
            await _cancelled(watching)

    return asyncio.run(looking())


def run(connections: Sequence[Connection], urls: Mapping[str, HttpConnection], every_s: float, screen: Screen) -> int:
    """Paint until somebody quits. Raises KeyboardInterrupt on Ctrl-C, after the terminal is as it was."""
    ended = asyncio.run(_run(connections, urls, every_s, screen))
    if ended == signal.SIGINT:
        raise KeyboardInterrupt
    if ended:
        # The screen is given back; now it may end us as it would have.
        signal.signal(ended, signal.SIG_DFL)
        os.kill(os.getpid(), ended)
    return Exit.OK


async def _run(
    connections: Sequence[Connection], urls: Mapping[str, HttpConnection], every_s: float, screen: Screen
) -> int:
    """The signal that ended it, or 0."""
    loop, moved, ended = asyncio.get_running_loop(), asyncio.Event(), [0]
    keys = _Keys(screen.press, moved.set)

    def end(number: int) -> None:
        ended[0], screen.done = number, True
        moved.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGWINCH, moved.set)
    loop.add_reader(sys.stdin.fileno(), keys.read)
    board = Board(connections, urls, every_s)
    watching = asyncio.create_task(board.run())
    try:
        with _keys_at_once(), _alternate_screen() as paint:
            while not screen.done and not watching.done():
                moved.clear()
                paint(lambda width, height: screen.frame(board.records(), width, height))
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(moved.wait(), _FRAME_S)
    finally:
        loop.remove_reader(sys.stdin.fileno())
        failure = watching.exception() if watching.done() and not watching.cancelled() else None
        await _cancelled(watching)
    if failure is not None:
        raise failure
    return ended[0]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextmanager
def _alternate_screen() -> Iterator[Callable[[Callable[[int, int], str]], None]]:
    """A screen of our own; what was there before comes back. Gives a function that paints a frame of any size."""
    console = Console(highlight=False, soft_wrap=True)
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

        def paint(frame: Callable[[int, int], str]) -> None:
            # Asked anew each time: that is how a resize is followed.
            width, height = console.size
            text = Text.from_ansi(frame(width, height), no_wrap=True, overflow="crop")
            live.update(text, refresh=True)

        yield paint


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come as they are pressed, and are not shown."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Keys:
    """Bytes from the terminal, as keys."""

    def __init__(self, press: Callable[[str], None], moved: Callable[[], None]) -> None:
        self._press = press
        self._moved = moved
        self._rest = ""
        self._escape: asyncio.TimerHandle | None = None

    def read(self) -> None:
        """Something was typed."""
        data = os.read(sys.stdin.fileno(), 1024)
        if self._escape is not None:
            self._escape.cancel()
            self._escape = None
        if not data:  # the terminal is gone
            self._press("q")
        keys, self._rest = keys_of(self._rest + data.decode(errors="replace"))
        for key in keys:
            self._press(key)
        if self._rest:
            self._escape = asyncio.get_running_loop().call_later(_ESCAPE_S, self._alone)
        self._moved()

    def _alone(self) -> None:
        self._rest, self._escape = "", None
        self._press("esc")
        self._moved()


def keys_of(text: str) -> tuple[list[str], str]:
    """The keys in what was typed, and the beginning of one that is not complete."""
    keys = []
    while text:
        special = next((code for code in _SPECIAL if text.startswith(code)), None)
        if special is not None:
            keys.append(_SPECIAL[special])
            text = text[len(special) :]
        elif text[0] == "\x1b" and any(code.startswith(text) for code in _SPECIAL):
            return keys, text
        elif text[0] == "\x1b":
            # An escape before another key is that key's own; a sequence that is not known is swallowed whole.
            body = text[1:].lstrip("[O")
            end = next((n for n, c in enumerate(body) if c.isalpha() or c == "~"), len(body) - 1)
            text = body[end + 1 :]
        else:
            keys.append(text[0])
            text = text[1:]
    return keys, ""
