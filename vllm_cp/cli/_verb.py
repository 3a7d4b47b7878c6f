"""What a verb is made of: its command, with help in one layout, and the way from question to exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit, overall
from vllm_cp.cli._flags import SharedOption, connection_options, output_options
from vllm_cp.cli._output import FORMATS, Report, Shape, render, report_of_failure
from vllm_cp.cli._table import View

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client
    from vllm_cp.cli._fanout import Reply
    from vllm_cp.errors import NotSupported

__all__ = ["Noun", "Verb", "Verdict", "answer", "conclude", "explained"]

T = TypeVar("T")


class Verdict(NamedTuple):
    """What one worker's answer comes to."""

    record: Mapping[str, Any]
    exit: Exit = Exit.OK
    #: For standard error; "" for none.
    remark: str = ""


def _fine(_: Mapping[str, Any]) -> tuple[Exit, str]:
    return Exit.OK, ""


def answer(
    view: View,
    ask: Callable[[Client], Mapping[str, Any]],
    *,
    judge: Callable[[Mapping[str, Any]], tuple[Exit, str]] = _fine,
    told: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> int:
    """Ask every target, print the records, say what went wrong, and give the exit code.

    ``judge`` looks at each record: its code, and a remark for standard error ("" for none). ``told`` makes the same
    record of what a daemon knows of a worker, see ``vllm_cp.cli._daemon``, or raises why that is not known.
    """
    # Usage errors come first: nothing heavy is imported for a command line that is wrong.
    shape = _context.shape(view)
    if told is not None and _context.via()[1] is not None:
        from vllm_cp.cli import _daemon

        tell = told

        def telling(worker: Mapping[str, Any]) -> Verdict:
            record = tell(worker)
            return Verdict(record, *judge(record))

        return conclude(view, shape, _daemon.told_of_each(telling))
    connections = _context.connections()
    from vllm_cp.cli import _fanout

    def asking(client: Client) -> Verdict:
        record = ask(client)
        return Verdict(record, *judge(record))

    return conclude(view, shape, _fanout.ask_all(connections, explained(asking)))


def conclude(view: View, shape: Shape, replies: Sequence[Reply[Verdict] | Reply[Mapping[str, Any]]]) -> int:
    """Print what came of every target, say what went wrong, and give the exit code. A bare record is all right."""
    reports: list[Report] = []
    remarks: list[str] = []
    for reply in replies:
        if reply.value is None:
            report = report_of_failure(reply.target, reply.error or AssertionError("no answer"))
            assert report.error is not None
            remarks.append(report.error["message"])
        else:
            verdict = reply.value if isinstance(reply.value, Verdict) else Verdict(reply.value)
            report = Report(reply.target, verdict.exit, verdict.record)
            if verdict.remark:
                remarks.append(f"{reply.target}: {verdict.remark}")
        reports.append(report)
    _stdio.emit(render(reports, view, shape))
    for remark in remarks:
        _stdio.say(remark)
    codes = [report.exit for report in reports]
    return overall([*codes, Exit.UNREACHABLE] if _context.some_missing() else codes)


def explained(ask: Callable[[Client], T]) -> Callable[[Client], T]:
    """The question, that also finds out why a worker does not support it."""

    def asking(client: Client) -> T:
        from vllm_cp.errors import ControlError, NotSupported

        try:
            return ask(client)
        except NotSupported as error:
            with suppress(ControlError):
                error.hint = _why_not(error, client.server_info(timeout_s=2.0).engine_version) or error.hint
            raise

    return asking


def _why_not(error: NotSupported, version: str) -> str:
    if not (error.since and version):
        return ""
    if _numbers(version) < _numbers(error.since):
        return f"{error.method} came with vLLM {error.since}, and this worker runs {version}: it takes an upgrade"
    return f"this worker runs vLLM {version}, which has {error.method}: the service is switched off or hidden there"


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split(".")[:2]:
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


class _Layout(click.Command):
    """Shared flags, ``-h``, and help in sections: what it does, examples, own options, connection."""

    def __init__(
        self,
        *args: Any,
        examples: str = "",
        formats: Sequence[str] = FORMATS,
        connects: bool = True,
        timeout_help: str = "",
        **settings: Any,
    ) -> None:
        """``connects``: takes the connection flags. ``timeout_help``: what --timeout means, where it is special."""
        super().__init__(*args, **{"add_help_option": False, **settings})
        self.examples = examples
        self.params += connection_options(timeout_help=timeout_help) if connects else []
        self.params += [*(output_options(formats) if formats else []), _help_option()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _raw_section(formatter, "Examples", self.examples)
        shared = [p for p in self.params if isinstance(p, SharedOption)]
        own = [p for p in self.params if isinstance(p, click.Option) and p not in shared]
        for title, parameters in (("Options", own), ("Connection", shared)):
            rows = [row for p in parameters if (row := p.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Verb(_Layout):
    """A command that does something."""


class Noun(_Layout, click.Group):
    """A command with verbs. Alone it shows its help, on standard error: that is no data."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False, "subcommand_metavar": "VERB ...", **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            _stdio.talk(ctx.get_help() + "\n")
            ctx.exit(Exit.USAGE)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.get_short_help_str(60)) for name, verb in sorted(self.commands.items())])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def _help_option() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            _stdio.emit(ctx.get_help() + "\n")
            ctx.exit()

    return click.Option(
        ["-h", "--help"], is_flag=True, is_eager=True, expose_value=False, callback=show, help="Show this and exit."
    )


def _raw_section(formatter: click.HelpFormatter, title: str, text: str) -> None:
    if text:
        with formatter.section(title):
            formatter.write("".join(f"  {line}\n" for line in text.strip().splitlines()))
