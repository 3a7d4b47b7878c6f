"""The one exit table of ``vllm-cp``."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from vllm_cp import errors as e

__all__ = ["MEANINGS", "Exit", "exit_of", "overall"]


class Exit(IntEnum):
    """How a run ended. Several targets that all ended alike give that code, else ``MIXED``.

    A reader that closed the pipe (``vllm-cp … | head``) is no failure: ``OK``.
    """

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    UNREACHABLE = 3
    CREDENTIALS = 4
    REFUSED = 5
    MIXED = 6
    NOT_SUPPORTED = 7
    NOT_READY = 8
    INTERRUPTED = 130


#: One line per code, as ``--help`` shows them.
MEANINGS: dict[Exit, str] = {
    Exit.OK: "ok; also when the reader of a pipe left early",
    Exit.UNEXPECTED: "unexpected: a defect of vllm-cp, or the output could not be written",
    Exit.USAGE: "the command line or the environment is wrong; nothing was sent",
    Exit.UNREACHABLE: "the worker is unreachable, or did not answer in time",
    Exit.CREDENTIALS: "token, TLS or certificate: unreadable here or rejected there",
    Exit.REFUSED: "the worker refused, did not find, could not take or failed the request",
    Exit.MIXED: "some targets failed, or the targets failed in different ways",
    Exit.NOT_SUPPORTED: "this worker's version has no such call",
    Exit.NOT_READY: "the worker answered: not ready, not serving, or not as expected",
    Exit.INTERRUPTED: "interrupted (Ctrl-C), or not confirmed when asked",
}

# Read from the top, so a kind stands before the kind it is one of.
_ERRORS: tuple[tuple[type[Exception], Exit], ...] = (
    (e.TlsFailed, Exit.CREDENTIALS),
    (e.WorkerUnreachable, Exit.UNREACHABLE),
    (e.OutOfTime, Exit.UNREACHABLE),
    (e.CredentialsRejected, Exit.CREDENTIALS),
    (e.NotSupported, Exit.NOT_SUPPORTED),
    (e.Refused, Exit.REFUSED),
    (e.NotFound, Exit.REFUSED),
    (e.InvalidArgument, Exit.REFUSED),
    (e.TooLarge, Exit.REFUSED),
    (e.EngineFailed, Exit.REFUSED),
    # Flags are checked before anybody is asked: what fails after that is a file that went away or changed.
    (e.ConfigError, Exit.CREDENTIALS),
)


def exit_of(error: Exception) -> Exit:
    """The code of one failed target; total."""
    return next((code for kind, code in _ERRORS if isinstance(error, kind)), Exit.UNEXPECTED)


def overall(exits: Iterable[Exit]) -> Exit:
    """The code of a run, from the codes of its targets."""
    seen = set(exits)
    return seen.pop() if len(seen) == 1 else Exit.MIXED if seen else Exit.OK
