"""What a verb is made of: its command, with help in one layout, and the way from question to exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit, overall
from vllm_cp.cli._output import Report, render, report_of_failure
from vllm_cp.cli._table import View

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient

__all__ = ["Noun", "Verb", "answer"]


def answer(
    view: View,
    ask: Callable[[ControlClient], Mapping[str, Any]],
    *,
    judge: Callable[[Mapping[str, Any]], tuple[Exit, str]] = lambda _: (Exit.OK, ""),
) -> int:
    """Ask every target, print the records, say what went wrong, and give the exit code.

    ``judge`` looks at each record: its code, and a remark for standard error ("" for none).
    """
    # Usage errors come first: nothing heavy is imported for a command line that is wrong.
    connections, output = _context.connections(), _context.output()
    from vllm_cp.cli._fanout import ask_all

    reports: list[Report] = []
    remarks: list[str] = []
    for reply in ask_all(connections, ask):
        if reply.value is None:
            report = report_of_failure(reply.target, reply.error or AssertionError("no answer"))
            assert report.error is not None
            remarks.append(report.error["message"])
        else:
            code, remark = judge(reply.value)
            report = Report(reply.target, code, reply.value)
            if remark:
                remarks.append(f"{reply.target}: {remark}")
        reports.append(report)
    _stdio.emit(render(reports, view, output))
    for remark in remarks:
        _stdio.say(remark)
    return overall(report.exit for report in reports)


class _Layout(click.Command):
    """Shared flags, ``-h``, and help in sections: what it does, examples, own options, connection."""

    def __init__(self, *args: Any, examples: str = "", **settings: Any) -> None:
        super().__init__(*args, **{"add_help_option": False, **settings})
        self.examples = examples
        self.params = [*self.params, *_context.shared_options(), _help_option()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _raw_section(formatter, "Examples", self.examples)
        shared = [p for p in self.params if isinstance(p, _context.SharedOption)]
        own = [p for p in self.params if isinstance(p, click.Option) and p not in shared]
        for title, parameters in (("Options", own), ("Connection", shared)):
            rows = [row for p in parameters if (row := p.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(rows)


class Verb(_Layout):
    """A command that asks workers something."""


class Noun(_Layout, click.Group):
    """A command with verbs. Alone it shows its help, on standard error: that is no data."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False, "subcommand_metavar": "VERB ...", **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
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
