"""``vllm-cp context``: named fleets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from vllm_cp.cli import _context, _contexts, _stdio
from vllm_cp.cli._contexts import Store
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._flags import CONNECTION
from vllm_cp.cli._output import Report, Shape, render
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._text import plain
from vllm_cp.cli._verb import Noun, Verb

__all__ = ["command"]

command = Noun(
    "context",
    help="Named fleets: targets, TLS and token files under one name.",
    connects=False,
    examples="""
vllm-cp context add prod --target llama-0 --target llama-1 --tls-ca ca.pem
vllm-cp context use prod
vllm-cp context list
""",
)

_VIEW = View(
    (
        Column("NAME", "name"),
        Column("IN USE", "current"),
        Column("TARGETS", "workers"),
        Column("POOL", "pool"),
        Column("TLS", "how"),
        Column("TOKEN FILE", "token_file"),
        Column("CA", "tls_ca", wide=True),
        Column("CERTIFICATE", "tls_cert", wide=True),
        Column("KEY", "tls_key", wide=True),
        Column("SERVER NAME", "server_name", wide=True),
        Column("TIMEOUT", "timeout", wide=True),
        Column("INSECURE TOKEN", "insecure_token", wide=True),
        Column("PROXY", "proxy", wide=True),
    ),
    lambda record: [{**record, "how": _how(record), "workers": _workers(record)}],
)


def _workers(settings: Mapping[str, Any]) -> list[str]:
    found = {"file-sd": settings["file_sd"], "dns": settings["dns"], "k8s": settings["k8s"]}
    via = [f"via:{settings['via']}"] if settings["via"] else []
    return [*via, *settings["targets"], *(f"{how}:{text}" for how, texts in found.items() for text in texts)]


def _how(settings: Mapping[str, Any]) -> str:
    if settings["tls_cert"] is not None:
        return "mutual"
    if settings["tls_ca"] is not None:
        return "own CA"
    return "system CAs" if settings["tls"] else "off"


@command.command(
    "list",
    cls=Verb,
    connects=False,
    examples="""
vllm-cp context list
vllm-cp context list -o name
""",
)
def list_() -> int:
    """The contexts there are, and which of them is in use."""
    shape, store = _context.shape(_VIEW), _context.context_file(_path())
    return _shown(store, list(store.contexts), shape)


@command.command(
    "show",
    cls=Verb,
    connects=False,
    examples="""
vllm-cp context show
vllm-cp context show prod -o yaml
""",
)
@click.argument("name", required=False)
def show(name: str | None) -> int:
    """Show one context.

    By default the one in use: VLLM_CP_CONTEXT, else what 'context use' chose.
    """
    shape, store = _context.shape(_VIEW), _context.context_file(_path())
    if name is None:
        name = os.environ.get("VLLM_CP_CONTEXT") or store.current
        if name is None:
            raise click.UsageError("no context is in use: name one, or choose one with 'vllm-cp context use'")
    return _shown(store, [_known(store, name)], shape)


@command.command(
    "add",
    cls=Verb,
    examples="""
vllm-cp context add prod --target llama-0 --target llama-1
vllm-cp context add prod --replace --use --target llama-0 --tls-ca ca.pem
vllm-cp context add chat --dns llama.ml.svc:8001 --pool chat
""",
)
@click.argument("name")
@click.option("--replace", is_flag=True, help="Overwrite a context of that name.")
@click.option("--use", is_flag=True, help="Use it from now on.")
def add(name: str, replace: bool, use: bool) -> int:
    """Keep the connection flags of this command line under a name.

    Files are kept by their absolute names; what is in them is never copied, and a token is kept in a file only.
    Variables of the environment are not kept.
    """
    shape = _context.shape(_VIEW)
    if not name or name.startswith("-") or not name.isprintable() or any(c.isspace() or c == "," for c in name):
        raise click.UsageError(f"'{plain(name)}' can't be the name of a context: write one word, such as prod")
    settings = _given()
    with _changing() as store:
        if name in store.contexts and not replace:
            raise click.UsageError(f"there is a context '{plain(name)}' already: give --replace to overwrite it")
        changed = store._replace(contexts={**store.contexts, name: settings}, current=name if use else store.current)
        _contexts.save(changed)
    return _shown(changed, [name], shape)


@command.command(
    "remove",
    cls=Verb,
    connects=False,
    examples="""
vllm-cp context remove staging
vllm-cp context remove prod -o json
""",
)
@click.argument("name")
def remove(name: str) -> int:
    """Forget a context, and show for the last time what it was. The files it names stay."""
    shape = _context.shape(_VIEW)
    with _changing() as store:
        _known(store, name)
        left = {other: settings for other, settings in store.contexts.items() if other != name}
        _contexts.save(store._replace(contexts=left, current=None if store.current == name else store.current))
    if store.current == name:
        _stdio.say(f"'{plain(name)}' was in use: no context is now")
    return _shown(store, [name], shape)


@command.command(
    "use",
    cls=Verb,
    connects=False,
    examples="""
vllm-cp context use prod
vllm-cp context use --none
""",
)
@click.argument("name", required=False)
@click.option("--none", "nothing", is_flag=True, help="Use no context from now on.")
def use(name: str | None, nothing: bool) -> int:
    """Choose the context to use from now on.

    It is in force where neither --context nor VLLM_CP_CONTEXT names another.
    """
    shape = _context.shape(_VIEW)
    if (name is None) != nothing:
        raise click.UsageError("name one context to use, or give --none")
    with _changing() as store:
        changed = store._replace(current=None if name is None else _known(store, name))
        _contexts.save(changed)
    return _shown(changed, [name] if name is not None else [], shape)


def _path() -> Path:
    path = _contexts.file_path()
    if path is None:
        raise click.UsageError("there is no home directory to keep contexts in: set VLLM_CP_CONTEXT_FILE")
    return path


def _known(store: Store, name: str) -> str:
    if name not in store.contexts:
        known = ", ".join(map(plain, store.contexts)) or "none yet"
        raise click.UsageError(f"no context is called '{plain(name)}': there are {known}")
    return name


@contextmanager
def _changing() -> Iterator[Store]:
    """The store, to be changed by us alone."""
    path = _path()
    try:
        with _contexts.locked(path) as store:
            yield store
    except _contexts.BrokenFileError as error:
        raise _context.ContextFileError(str(error)) from None
    except OSError as error:
        raise _context.LocalError(f"cannot change the context file {path}: {error.strerror}; it is as it was") from None


def _given() -> dict[str, Any]:
    """The connection flags of this command line, checked as a verb would check them, as settings of a context."""
    settings: dict[str, Any] = {}
    for flag in CONNECTION:
        value = _context.given(flag.option.removeprefix("--"))
        if value is None:
            continue
        if flag.key == "context":
            raise click.UsageError("--context: a context can't be made of another one")
        if flag.multiple:
            files = flag.metavar == "FILE"
            key = "targets" if flag.key == "target" else flag.key
            settings[key] = [os.path.abspath(each) if files else each for each in value]
        elif flag.key == "timeout":
            settings["timeout"] = _context.seconds("--timeout", value)
        else:
            settings[flag.key] = os.path.abspath(value) if flag.metavar == "FILE" else value
    if not any(isinstance(value, list) or key == "via" for key, value in settings.items()):
        raise click.UsageError("a context is a fleet: give its workers with --target, --file-sd, --dns, --k8s or --via")
    _context.flags_only()
    _context.connections(look=False)
    return settings


def _shown(store: Store, names: Sequence[str], shape: Shape) -> int:
    reports = [Report(name, Exit.OK, _record(store, name), key="name") for name in names]
    _stdio.emit(render(reports, _VIEW, shape))
    return Exit.OK


def _record(store: Store, name: str) -> dict[str, Any]:
    settings = store.contexts[name]
    record: dict[str, Any] = {"current": name == store.current, "targets": settings.get("targets", [])}
    for flag in CONNECTION:
        if flag.key not in ("target", "context"):
            absent: Any = [] if flag.multiple else False if flag.metavar is None else None
            record[flag.key] = settings.get(flag.key, absent)
    return record
