"""One line per event on standard error, logfmt or JSON. Standard output is never written to.

Parts of the daemon log through ``logging``: the message is the event's name, its facts are ``extra={"fields": {…}}``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime, timezone
from typing import Literal

__all__ = ["FORMATS", "LEVELS", "LineFormatter", "LogFormat", "set_up"]

LogFormat = Literal["logfmt", "json"]
FORMATS = ("logfmt", "json")
LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "fields", "taskName"}
_BARE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+")


class LineFormatter(logging.Formatter):
    """One record, one line, whatever is in it."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        facts: dict[str, object] = {
            "ts": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if not record.name.startswith("vllm_cp"):
            facts["logger"] = record.name
        facts |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        facts |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            facts["at"] = _place(record.exc_info[1])
        if self._form == "json":
            return json.dumps(facts, default=str)
        return " ".join(f"{key}={_quoted(value)}" for key, value in facts.items())


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=not text.isprintable())


def _place(error: BaseException) -> str:
    """Where it was raised: all of a traceback that fits on the line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}" if trace else ""


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # the class is not generic when the program runs
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (the name is the base class's)
        """Say nothing: standard error is gone, and the page is what counts."""


def set_up(form: LogFormat, level: str) -> None:
    """Send everything to standard error from here on."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Other people's debugging is not ours.
    for name in ("asyncio", "aiohttp", "grpc", "httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
