"""Which workers, reached how, shown how: the flags that every verb takes, before and after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from vllm_cp.cli._output import FORMATS
from vllm_cp.cli._text import plain

if TYPE_CHECKING:
    from vllm_cp.config import Connection, Tls

__all__ = ["CredentialsError", "SharedOption", "connections", "decoded", "output", "shared_options"]

T = TypeVar("T")

_KEPT = "vllm_cp.cli.flags"
#: A day. gRPC turns far longer deadlines into ones that have passed.
_LONGEST_S = 86400.0
# Where systems keep the CAs they trust, as one file: Debian, Fedora, SUSE, RHEL, Alpine.
_SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


class CredentialsError(click.ClickException):
    """A certificate, key or token on this machine can't be used."""


class _Flag(NamedTuple):
    option: str
    metavar: str | None
    help: str
    multiple: bool = False

    @property
    def variable(self) -> str:
        return "VLLM_CP_" + self.option.removeprefix("--").replace("-", "_").upper()


_FLAGS = (
    _Flag("--target", "HOST:PORT", "Worker to ask; repeatable. Port 8001 if left out. [default: localhost:8001]", True),
    _Flag("--timeout", "SECONDS", "Longest wait for each answer. [default: 5]"),
    _Flag("--tls", None, "Use TLS and trust the system's CAs."),
    _Flag("--tls-ca", "FILE", "Use TLS and trust the CAs in this PEM file only."),
    _Flag("--tls-cert", "FILE", "Use TLS and show this certificate (PEM)."),
    _Flag("--tls-key", "FILE", "Key of --tls-cert (PEM)."),
    _Flag("--server-name", "NAME", "Name in the worker's certificate, if not the one dialled."),
    _Flag("--token-file", "FILE", "Send the bearer token in this file; over TLS only."),
    _Flag("--insecure-token", None, "Send the token over plaintext too, for all to read."),
    _Flag("--proxy", None, "Honour http_proxy and its kin; else workers are reached directly."),
)
_BY_NAME = {flag.option.removeprefix("--"): flag for flag in _FLAGS}


class SharedOption(click.Option):
    """A flag that is taken at every level of the command line; what stands later counts."""


def shared_options() -> list[click.Option]:
    """Fresh options for one command: the connection flags and ``-o``."""
    made: list[click.Option] = [
        SharedOption(
            [flag.option],
            metavar=flag.metavar,
            help=flag.help,
            multiple=flag.multiple,
            # Said only where it is so: a plain no makes click take the option without its value.
            is_flag=True if flag.metavar is None else None,
            expose_value=False,
            callback=_keep,
        )
        for flag in _FLAGS
    ]
    made.append(
        click.Option(
            ["-o", "--output"],
            type=click.Choice(FORMATS),
            help="Format on standard output. [default: table]",
            expose_value=False,
            callback=_keep,
        )
    )
    return made


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    # Groups are parsed before their verbs and share one meta, so that later flags overwrite earlier ones.
    assert parameter.name is not None
    if ctx.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE:
        ctx.meta.setdefault(_KEPT, {})[parameter.name.replace("_", "-")] = value


def output() -> str:
    """The format asked for."""
    return str(_kept().get("output", "table"))


def connections() -> list[Connection]:
    """A connection for each worker, in order, each once. Raises UsageError or CredentialsError; sends nothing."""
    from vllm_cp._target import parse_target
    from vllm_cp.config import DEFAULT_TARGET, Connection, read_token
    from vllm_cp.errors import ConfigError

    targets: dict[str, str] = {}
    source, texts = _targets(DEFAULT_TARGET)
    for text in texts:
        try:
            targets.setdefault(parse_target(text).name, text)
        except ConfigError as error:
            raise click.UsageError(f"{source}: {error}") from None
    timeout_s = _timeout()
    tls = _tls()
    token_file = _path("token-file")
    insecure_token, server_name = _switch("insecure-token"), _text("server-name")[1]
    if server_name is not None and tls is None:
        raise click.UsageError("--server-name is a name in a TLS certificate: give --tls or --tls-ca with it")
    if token_file is not None:
        if tls is None and not insecure_token:
            raise click.UsageError(
                "the token would cross the network in plaintext: give --tls or --tls-ca,"
                " or --insecure-token if you accept that"
            )
        _usable(lambda: read_token(token_file))
    return [
        Connection(
            target=text,
            tls=tls,
            token_file=token_file,
            insecure_token=insecure_token,
            timeout_s=timeout_s,
            proxy=_switch("proxy"),
            server_name=server_name,
        )
        for text in targets.values()
    ]


def _tls() -> Tls | None:
    from vllm_cp.config import Tls

    ca, cert, key = _path("tls-ca"), _path("tls-cert"), _path("tls-key")
    if (cert is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both or neither")
    if ca is None and cert is None and not _switch("tls"):
        return None
    return _usable(lambda: Tls(ca_file=ca or _system_roots(), cert_file=cert, key_file=key))


def _system_roots() -> Path | None:
    """The system's CAs as one file; ``None`` leaves the choice to gRPC, which brings a bundle of its own."""
    if chosen := os.environ.get("SSL_CERT_FILE"):
        return Path(chosen)
    return next((path for path in map(Path, _SYSTEM_ROOTS) if path.is_file()), None)


def _targets(default: str) -> tuple[str, list[str]]:
    kept = _kept().get("target")
    if kept is not None:
        return "--target", list(kept)
    variable, text = _text("target")
    listed: list[str] = str(text or "").replace(",", " ").split()
    return variable, listed or [default]


def _timeout() -> float:
    source, text = _text("timeout")
    if text is None:
        return 5.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise click.UsageError(f"{source}: {text!r} is no number of seconds above 0 and up to {_LONGEST_S:.0f}")
    return seconds


def _switch(name: str) -> bool:
    source, text = _text(name)
    if text is None or text is True:
        return text is True
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in value:
        raise click.UsageError(f"{source}: {text!r} is neither true nor false")
    return value[text.lower()]


def _path(name: str) -> Path | None:
    _, text = _text(name)
    if text is None:
        return None
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        # Decoded as UTF-8 in a locale that has no such character: the file's name is the bytes that were given.
        text = os.fsdecode(text.encode())
    return Path(text)


def _text(name: str) -> tuple[str, Any]:
    """Where a setting comes from and what it says: flag, else environment, else ``None``."""
    flag, kept = _BY_NAME[name], _kept()
    if name not in kept:
        text = os.environ.get(flag.variable)
        return flag.variable, decoded(flag.variable, text) if text else None
    if kept[name] == "":
        raise click.UsageError(f"{flag.option}: the value is empty")
    return flag.option, kept[name]


def decoded(what: str, text: str) -> str:
    """Text from the operating system, read as UTF-8 where its locale could not. Raises UsageError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise click.UsageError(f"{what} '{plain(text)}' is not valid UTF-8 text") from None
    return text


def _kept() -> dict[str, Any]:
    kept: dict[str, Any] = click.get_current_context().meta.get(_KEPT, {})
    return kept


def _usable(make: Callable[[], T]) -> T:
    from vllm_cp.errors import ConfigError

    try:
        return make()
    except ConfigError as error:
        raise CredentialsError(str(error)) from None
