"""Which workers, reached how, shown how: what the flags, the environment and the context file come to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from vllm_cp.cli import _contexts
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._flags import BY_NAME, kept
from vllm_cp.cli._output import FORMATS, Shape
from vllm_cp.cli._text import plain

if TYPE_CHECKING:
    from vllm_cp.cli._table import View
    from vllm_cp.config import Connection, Tls

__all__ = [
    "LONGEST_S",
    "ContextFileError",
    "CredentialsError",
    "LocalError",
    "canonical",
    "connections",
    "context_file",
    "decoded",
    "defaults",
    "effective_context",
    "flags_only",
    "given",
    "name_of",
    "named",
    "output",
    "seconds",
    "shape",
    "some_missing",
    "via",
    "whole_timeout",
]

T = TypeVar("T")

_DEFAULT_S = 5.0
#: A day. gRPC turns far longer deadlines into ones that have passed.
LONGEST_S = 86400.0
_FLEET = "vllm_cp.cli.fleet"
_MISSING = "vllm_cp.cli.missing"
#: The flags that name workers, and what each is called in a context.
_NAMING = {"target": "targets", "file-sd": "file_sd", "dns": "dns", "k8s": "k8s"}
_BY_DAEMON = "health, info, model, kv sources, ready and episodes"
_ALONE = "vllm_cp.cli.alone"


class LocalError(click.ClickException):
    """Something on this machine is not as it must be, and the command line is not to blame."""

    code = Exit.UNEXPECTED


class CredentialsError(LocalError):
    """A certificate, key or token on this machine can't be used."""

    code = Exit.CREDENTIALS


class ContextFileError(LocalError):
    """The context file can't be used."""

    code = Exit.USAGE


class Fleet(NamedTuple):
    """A context that is in force."""

    name: str
    settings: dict[str, Any]


def output(allowed: Sequence[str] = FORMATS) -> str:
    """The format asked for. Raises UsageError for one that the verb does not have."""
    chosen = str(kept().get("output", "table"))
    if chosen not in allowed:
        raise click.UsageError(f"-o {chosen}: this verb has {', '.join(allowed)} only")
    return chosen


def shape(view: View) -> Shape:
    """How the answer is to be shown. Raises UsageError for columns that the view does not have."""
    chosen = output()
    columns, sort = kept().get("columns"), kept().get("sort")
    if columns is not None and chosen not in ("table", "wide"):
        raise click.UsageError(f"--columns chooses columns of a table, and -o is {chosen}")
    try:
        return Shape(
            chosen,
            None if columns is None else tuple(view.find(name) for name in columns.split(",")),
            None if sort is None else view.find(sort.removeprefix("-")),
            sort is not None and sort.startswith("-"),
        )
    except LookupError as error:
        raise click.UsageError(str(error.args[0])) from None


def whole_timeout(default_s: float) -> float:
    """``--timeout`` of a verb for which it bounds the whole run; its variable is about single answers."""
    return seconds("--timeout", kept()["timeout"]) if "timeout" in kept() else default_s


def connections(
    *, at_most_s: float | None = None, default_s: float = _DEFAULT_S, look: bool = True
) -> list[Connection]:
    """A connection for each worker, in order, each once. Raises UsageError or CredentialsError; asks no worker.

    ``at_most_s`` is the time of a whole run, which then is what ``--timeout`` stands for: no answer may take longer.
    ``default_s`` is the time for one answer where nobody chose one. Without ``look`` sources of workers are checked as
    far as that goes without reading them.
    """
    from dataclasses import replace

    from vllm_cp.config import DEFAULT_TARGET

    source, daemon = via()
    if daemon is not None and look:
        verb = click.get_current_context().command_path.partition(" ")[2]
        raise click.UsageError(
            f"{source}: a daemon can't answer '{verb}', which asks the workers themselves: drop it"
            f" (a daemon answers {_BY_DAEMON})"
        )
    wanted = _wanted(DEFAULT_TARGET)
    shared = defaults(at_most_s=at_most_s, default_s=default_s)
    made = {name: replace(shared, target=text) for name, text in _written(*wanted.pop("target", ("", []))).items()}
    _, pool = _text("pool")
    if not wanted and pool is None:
        return list(made.values())
    from vllm_cp.cli import _sources

    return _sources.found(wanted, made, shared, pool, look=look)


def name_of(connection: Connection) -> str:
    """What a worker is called: its identity where it was discovered, else its address."""
    return getattr(connection, "key", "") or connection.address.name


def some_missing(missing: bool = False) -> bool:
    """Whether discovery told that not all workers could be found; ``missing`` notes that it did."""
    meta = click.get_current_context().meta
    meta[_MISSING] = meta.get(_MISSING, False) or missing
    return bool(meta[_MISSING])


def _written(source: str, texts: Sequence[str]) -> dict[str, str]:
    """Targets by their canonical spelling."""
    from vllm_cp._target import parse_target
    from vllm_cp.errors import ConfigError

    targets: dict[str, str] = {}
    for text in texts:
        try:
            targets.setdefault(parse_target(text).name, text)
        except ConfigError as error:
            raise click.UsageError(f"{source}: {error}") from None
    return targets


def via() -> tuple[str, str | None]:
    """Who says which daemon to ask, and its URL; ``None`` when the workers are to be asked."""
    return _text("via")


def defaults(*, at_most_s: float | None = None, default_s: float = _DEFAULT_S) -> Connection:
    """How any worker is reached, apart from where. As for ``connections``."""
    from vllm_cp.config import Connection, read_token
    from vllm_cp.errors import ConfigError

    tls = _tls()
    token_file = _path("token-file")
    insecure_token = _switch("insecure-token")
    named_by, server_name = _text("server-name")
    if server_name is not None and tls is None:
        raise click.UsageError("--server-name is a name in a TLS certificate: give --tls or --tls-ca with it")
    if token_file is not None:
        if tls is None and not insecure_token:
            raise click.UsageError(
                "the token would cross the network in plaintext: give --tls or --tls-ca,"
                " or --insecure-token if you accept that"
            )
        _usable(lambda: read_token(token_file))
    try:
        return Connection(
            tls=tls,
            token_file=token_file,
            insecure_token=insecure_token,
            timeout_s=_timeout(at_most_s, default_s),
            proxy=_switch("proxy"),
            server_name=server_name,
        )
    except ConfigError as error:  # all but the server name was checked above
        raise click.UsageError(f"{named_by}: {error}") from None


def _tls() -> Tls | None:
    from vllm_cp.config import Tls

    ca, cert, key = _path("tls-ca"), _path("tls-cert"), _path("tls-key")
    if (cert is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both or neither")
    if ca is None and cert is None and not _switch("tls"):
        return None
    return _usable(lambda: Tls(ca_file=ca, cert_file=cert, key_file=key))


def _wanted(default: str) -> dict[str, tuple[str, list[str]]]:
    """What names the workers to ask: by flag, who says so and what."""
    if named := _named():
        return named
    fleet = effective_context()
    if fleet is None:
        return {"target": (BY_NAME["target"].variable, [default])}
    source = f"context {fleet.name!r}"
    return {flag: (source, list(fleet.settings[key])) for flag, key in _NAMING.items() if key in fleet.settings}


def named() -> tuple[list[str], str | None]:
    """The targets and the pool that were named, for a choice among what somebody else knows. Raises UsageError."""
    chosen = _wanted("") if effective_context() is not None or _named() else {}
    for flag, (source, _) in chosen.items():
        if flag != "target":
            raise click.UsageError(f"{source}: a daemon has found its workers: choose with --target or --pool")
    return list(chosen.get("target", ("", []))[1]), _text("pool")[1]


def _named() -> dict[str, tuple[str, list[str]]]:
    """The same by the command line alone, else by the environment alone; empty when neither names any worker."""
    on_line = {flag: (BY_NAME[flag].option, list(kept()[flag])) for flag in _NAMING if flag in kept()}
    # Whoever names a fleet on the command line means its workers, not those that happen to be in the environment.
    if on_line or "context" in kept():
        return on_line
    return {flag: (BY_NAME[flag].variable, words) for flag in _NAMING if (words := _words(flag))}


def _words(flag: str) -> list[str]:
    text = _variable(flag)
    # A selector has commas of its own.
    return (text if flag == "k8s" else text.replace(",", " ")).split()


def flags_only() -> None:
    """From here on neither the environment nor a context counts."""
    click.get_current_context().meta[_ALONE] = True


def _variable(name: str) -> str:
    """What the variable of a flag says; "" for nothing."""
    variable = BY_NAME[name].variable
    alone = click.get_current_context().meta.get(_ALONE)
    return "" if alone else decoded(variable, os.environ.get(variable, ""))


def effective_context() -> Fleet | None:
    """The context in force. Raises UsageError for one that does not exist, ContextFileError for a broken file.

    One named on the command line is in force whatever the targets. Any other is not where workers outside of it are
    named: its token is meant for its own.
    """
    meta = click.get_current_context().meta
    if meta.get(_ALONE):
        return None
    if _FLEET not in meta:
        meta[_FLEET] = _find_context()
    fleet: Fleet | None = meta[_FLEET]
    return fleet


def _find_context() -> Fleet | None:
    source, name = "--context", given("context")
    if name is None:
        source, name = BY_NAME["context"].variable, _variable("context") or None
    path = _contexts.file_path()
    store = context_file(path) if path is not None else None
    if name is None and store is not None:
        name = store.current
    if name is None:
        return None
    there = store.contexts if store else {}
    if name not in there:
        known = f"there are {', '.join(map(plain, there))}" if there else "there are none, see 'vllm-cp context'"
        raise click.UsageError(f"{source}: no context is called '{plain(name)}': {known}")
    fleet = Fleet(name, there[name])
    own = all(
        set(map(canonical, texts)) <= set(map(canonical, fleet.settings.get(_NAMING[flag], ())))
        for flag, (_, texts) in _named().items()
    )
    return fleet if own or "context" in kept() else None


def context_file(path: Path) -> _contexts.Store:
    """The context file's contents. Raises ContextFileError when it can't be used."""
    try:
        return _contexts.load(path)
    except _contexts.BrokenFileError as error:
        raise ContextFileError(str(error)) from None


def canonical(target: str) -> str:
    """The canonical spelling of a target; what is none stays as it is."""
    from vllm_cp._target import parse_target
    from vllm_cp.errors import ConfigError

    try:
        return parse_target(target).name
    except ConfigError:
        return target


def given(name: str) -> Any:
    """What a flag says, ``None`` when it was not given. Raises UsageError for an empty value."""
    flag, value = BY_NAME[name], kept().get(name)
    if value == "":
        raise click.UsageError(f"{flag.option}: the value is empty")
    return value


def _timeout(at_most_s: float | None, default_s: float) -> float:
    source, text = _text("timeout", flag=at_most_s is None)
    each_s = default_s if text is None else seconds(source, text)
    return each_s if at_most_s is None else min(each_s, at_most_s)


def seconds(source: str, text: Any) -> float:
    """A time that somebody wrote down. Raises UsageError for one that is none."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST_S:
        raise click.UsageError(f"{source}: {text!r} is no number of seconds above 0 and up to {LONGEST_S:.0f}")
    return number


def _switch(name: str) -> bool:
    source, text = _text(name)
    if text is None or isinstance(text, bool):
        return bool(text)
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


def _text(name: str, *, flag: bool = True) -> tuple[str, Any]:
    """Where a setting comes from and what it says: flag, else environment, else context, else ``None``."""
    about = BY_NAME[name]
    if flag and name in kept():
        return about.option, given(name)
    if text := _variable(name):
        return about.variable, text
    fleet = effective_context()
    if fleet is not None and about.key in fleet.settings:
        return f"context {fleet.name!r}", fleet.settings[about.key]
    return about.variable, None


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


def _usable(make: Callable[[], T]) -> T:
    from vllm_cp.errors import ConfigError

    try:
        return make()
    except ConfigError as error:
        raise CredentialsError(str(error)) from None
