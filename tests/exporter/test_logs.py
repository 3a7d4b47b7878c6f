"""Log lines: one per event, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from vllm_cp_exporter.logs import LineFormatter, LogFormat


def line(
    form: LogFormat, event: str = "ready", *, exc_info: Any = None, name: str = "vllm_cp_exporter", **extra: Any
) -> str:
    record = logging.LogRecord(name, logging.INFO, __file__, 1, event, (), exc_info)
    vars(record).update(extra)
    return LineFormatter(form).format(record)


NASTY = ["", "a b", 'a"b', "a=b", "a\nb", "a\\b", "\x1b[31m", "w\udcff", "\u2028", "模型"]


@pytest.mark.parametrize("text", NASTY)
def test_one_line_whatever_it_says(text: str) -> None:
    """A value with quotes, line ends or escapes stays on its line, and moves no cursor."""
    plain = line("logfmt", fields={"worker": text})
    assert len(plain.splitlines()) == 1
    assert plain.isprintable()
    assert json.loads(line("json", fields={"worker": text}))["worker"] == text


def test_logfmt() -> None:
    """Time, level, event, then the facts."""
    said = line("logfmt", fields={"worker": "a:8001", "detail": "no answer"})
    assert said.endswith(' level=info event=ready worker=a:8001 detail="no answer"')
    assert said.startswith("ts=20")


def test_an_exception_is_one_line() -> None:
    """An error is its kind, its words and its place; never a traceback."""
    try:
        int("first\nsecond")
    except ValueError:
        said = line("logfmt", "watcher_failed", exc_info=sys.exc_info())
    assert "ValueError: invalid literal" in said
    assert f"at={__name__}:" in said
    assert len(said.splitlines()) == 1


def test_other_peoples_lines() -> None:
    """A library's message is an event with its logger's name; facts given as plain extras are shown."""
    assert " logger=aiohttp.server" in line("logfmt", "Error handling request", name="aiohttp.server")
    assert line("logfmt", worker="a").endswith(" worker=a")
