"""The flags that every verb takes, at every level of the command line; what stands later counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from vllm_cp.cli._output import FORMATS

__all__ = ["BY_NAME", "CONNECTION", "Flag", "SharedOption", "connection_options", "keep", "kept", "output_options"]

_KEPT = "vllm_cp.cli.flags"


class Flag(NamedTuple):
    """One connection flag."""

    option: str
    metavar: str | None
    help: str
    multiple: bool = False

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "VLLM_CP_" + self.key.upper()

    @property
    def key(self) -> str:
        """Its name in a context file."""
        return self.option.removeprefix("--").replace("-", "_")


CONNECTION = (
    Flag("--target", "HOST:PORT", "Worker to ask; repeatable. Port 8001 if left out. [default: localhost:8001]", True),
    Flag("--file-sd", "FILE", "Workers in a file_sd file (JSON or YAML); repeatable, may be a pattern.", True),
    Flag("--dns", "NAME[:PORT]", "Workers at each address of a name, or of its SRV records; repeatable.", True),
    Flag("--k8s", "[NS/]SELECTOR", "Pods, in all namespaces if none is given; repeatable.", True),
    Flag("--pool", "NAME", "Of those workers, only this pool."),
    Flag("--context", "NAME", "Named fleet to ask and how to reach it; see 'vllm-cp context'."),
    Flag("--via", "URL", "Ask this vllm-cp-exporter what it knows of the workers, not them; reads only."),
    Flag("--timeout", "SECONDS", "Longest wait for each answer. [default: 5]"),
    Flag("--tls", None, "Use TLS and trust the system's CAs."),
    Flag("--tls-ca", "FILE", "Use TLS and trust the CAs in this PEM file only."),
    Flag("--tls-cert", "FILE", "Use TLS and show this certificate (PEM)."),
    Flag("--tls-key", "FILE", "Key of --tls-cert (PEM)."),
    Flag("--server-name", "NAME", "Name in the worker's certificate, if not the one dialled."),
    Flag("--token-file", "FILE", "Send the bearer token in this file; over TLS only."),
    Flag("--insecure-token", None, "Send the token over plaintext too, for all to read."),
    Flag("--proxy", None, "Honour http_proxy and its kin; else workers are reached directly."),
)
BY_NAME = {flag.option.removeprefix("--"): flag for flag in CONNECTION}


class SharedOption(click.Option):
    """A connection flag."""


class _ContextOption(SharedOption):
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from vllm_cp.cli._contexts import known_names

        return [CompletionItem(name) for name in known_names() if name.startswith(incomplete)]


def connection_options(*, timeout_help: str = "") -> list[click.Option]:
    """Fresh connection flags for one command."""
    return [
        (_ContextOption if flag.option == "--context" else SharedOption)(
            [flag.option],
            metavar=flag.metavar,
            help=timeout_help if timeout_help and flag.option == "--timeout" else flag.help,
            multiple=flag.multiple,
            # Said only where it is so: a plain no makes click take the option without its value.
            is_flag=True if flag.metavar is None else None,
            expose_value=False,
            callback=keep,
        )
        for flag in CONNECTION
    ]


def output_options(formats: Sequence[str] = FORMATS) -> list[click.Option]:
    """Fresh flags for one command that say what is shown."""
    settings: dict[str, Any] = {"expose_value": False, "callback": keep}
    made = [
        click.Option(
            ["-o", "--output"],
            type=click.Choice(formats),
            help="Format on standard output. [default: table]",
            **settings,
        )
    ]
    if "wide" in formats:
        made += [
            click.Option(["--columns"], metavar="A,B", help="Columns of the table, in this order.", **settings),
            click.Option(
                ["--sort"], metavar="[-]COLUMN", help="Sort by a column; - for the largest first.", **settings
            ),
        ]
    made += [
        click.Option(["-v", "--verbose"], is_flag=True, help="Show each call with its time.", **settings),
        click.Option(["--debug"], is_flag=True, help="Show what crosses the wire; secrets masked.", **settings),
    ]
    return made


def keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Remember a flag that was given."""
    # Groups are parsed before their verbs and share one meta, so that later flags overwrite earlier ones.
    assert parameter.name is not None
    if ctx.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE:
        ctx.meta.setdefault(_KEPT, {})[parameter.name.replace("_", "-")] = value


def kept() -> dict[str, Any]:
    """The flags that were given, by their names without dashes in front."""
    context = click.get_current_context(silent=True)
    given: dict[str, Any] = context.meta.get(_KEPT, {}) if context is not None else {}
    return given
