"""Workers that are found rather than written down: files, DNS, Kubernetes, and the pool they are in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._text import plain
from vllm_cp.config import Connection
from vllm_cp.discovery import (
    DEFAULT_POOL,
    DiscoveredTarget,
    Discoverer,
    DiscoveryFailed,
    DnsDiscoverer,
    DnsKind,
    DnsName,
    FileDiscoverer,
    InThread,
    KubernetesDiscoverer,
)
from vllm_cp.errors import ConfigError

__all__ = ["Discovered", "found"]

#: Stands in for an address that is not known. It never resolves (RFC 2606), so even dialled it reaches nobody.
_NOWHERE = "unknown.invalid:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered(Connection):
    """How one worker is reached, and what else its source says of it."""

    #: The identity: ``namespace/pod``, or what the source calls it.
    key: str
    pool: str
    #: Base URL of its HTTP server; ``None`` when it isn't known.
    http_url: str | None = None
    #: Why it can't be reached; "" when it can.
    problem: str = ""


class _DiscoveryError(_context.LocalError):
    """No set of workers could be had."""

    code = Exit.UNREACHABLE


class _Source(NamedTuple):
    """One source of workers."""

    #: The flag, variable or context that names it.
    by: str
    look: Callable[[], Sequence[DiscoveredTarget]]
    #: What is wrong with it; ``None`` when nothing is.
    error: Callable[[], str | None]


def found(
    wanted: Mapping[str, tuple[str, Sequence[str]]],
    written: Mapping[str, Connection],
    defaults: Connection,
    pool: str | None,
    *,
    look: bool,
) -> list[Connection]:
    """The written workers and those of the sources, each once, of that pool alone if one is given.

    Raises UsageError for sources that could never be read, LocalError for those that could not be read now.
    """
    # What the sources log, and the libraries under them, is said by us where it matters.
    logging.getLogger().addHandler(logging.NullHandler())
    makers = {"file-sd": _files, "dns": _names, "k8s": _pods}
    sources = [source for flag, (by, texts) in wanted.items() for source in _made(by, makers[flag], texts, defaults)]
    if not look:
        return list(written.values())
    workers: dict[str, Connection] = dict(written)
    pools = dict.fromkeys(written, DEFAULT_POOL)
    for source in sources:
        for target in _looked(source):
            if target.key not in workers:
                workers[target.key] = _reached(target, defaults)
                pools[target.key] = target.pool
    chosen = [workers[key] for key in workers if pool in (None, pools[key])]
    if not chosen and workers:
        there = ", ".join(sorted(map(plain, set(pools.values()))))
        raise click.UsageError(f"--pool: no worker is in the pool '{plain(str(pool))}': there are {there}")
    if not chosen:
        raise _DiscoveryError(f"{', '.join(source.by for source in sources)}: no worker is there")
    return chosen


def _made(
    by: str, maker: Callable[[Sequence[str], float], list[_Source]], texts: Sequence[str], defaults: Connection
) -> list[_Source]:
    try:
        return [source._replace(by=by) for source in maker(texts, defaults.timeout_s)]
    except ImportError as error:
        raise click.UsageError(f"{by}: {error}") from None
    except ConfigError as error:
        raise click.UsageError(f"{by}: {error}") from None


def _looked(source: _Source) -> Sequence[DiscoveredTarget]:
    try:
        targets = source.look()
    except DiscoveryFailed as error:
        raise _DiscoveryError(f"{source.by}: {error}") from None
    if trouble := source.error():
        # What was found is asked all the same; the exit code tells that it may not be everybody.
        _stdio.say(f"{source.by}: some workers may be missing: {trouble}")
        _context.some_missing(True)
    return targets


def _reached(target: DiscoveredTarget, defaults: Connection) -> Discovered:
    problem, how = target.problem, defaults
    if not problem:
        try:
            how = target.connection(defaults)
        except ConfigError as error:
            problem = str(error)
    settings: dict[str, Any] = {field.name: getattr(how, field.name) for field in fields(Connection)}
    if problem:
        settings["target"] = _NOWHERE
    return Discovered(**settings, key=target.key, pool=target.pool, http_url=target.http_url, problem=problem)


def _files(texts: Sequence[str], _: float) -> list[_Source]:
    source = FileDiscoverer(texts)
    return [_Source("", lambda: source.look().targets, lambda: source.status.error)]


def _names(texts: Sequence[str], patience_s: float) -> list[_Source]:
    names = []
    for text in dict.fromkeys(texts):
        name, colon, port = text.rpartition(":")
        if text and not colon:
            names.append(DnsName(name=text, kind=DnsKind.SRV))
            continue
        if not (name and port.isascii() and port.isdigit()):
            raise ConfigError(f"{text!r} is neither NAME:PORT nor the name of SRV records")
        names.append(DnsName(name=name, kind=DnsKind.EACH, port=int(port)))
    return [_streamed(DnsDiscoverer(names, timeout_s=patience_s), patience_s)]


def _pods(texts: Sequence[str], patience_s: float) -> list[_Source]:
    made = []
    for number, text in enumerate(dict.fromkeys(texts)):
        head, slash, rest = text.partition("/")
        # A label's own prefix is a domain, in practice one with a dot: app.kubernetes.io/name=llama.
        namespace, selector = (head, rest) if slash and head.replace("-", "").isalnum() else (None, text)
        if not selector:
            raise ConfigError(f"{text!r} has no selector; write [NAMESPACE/]SELECTOR, such as ml/app=llama")
        pods = KubernetesDiscoverer(namespace=namespace, label_selector=selector, name=f"kubernetes-{number}")
        made.append(_streamed(pods, patience_s))
    return made


def _streamed(source: Discoverer, patience_s: float) -> _Source:
    def look() -> Sequence[DiscoveredTarget]:
        with InThread(source, first_set_s=patience_s + 1.0) as reading:
            return reading.look().targets

    return _Source("", look, lambda: source.status.error)
