"""The configuration file: its form, read strictly. What is not said stays ``None``; flags and defaults come on top.

::

    listen: "[::]:9645"
    defaults: {tls: {ca_file: ca.pem}, token_file: token, timeout: 5s}
    pools: {chat: {min_ready: 2, canary: once}}
    targets: [worker-0:8001, {name: chat-0, grpc: worker-1:8001, http: "http://worker-1:8000", pool: chat}]
    discovery: {file_sd: ["targets.d/*.json"], kubernetes: {namespace: ml, pool_label: app}}
    modules: {across: {tls: {ca_file: other-ca.pem}, rung: answering}}
    probe_allow: ["*.workers.internal", 10.20.0.0/16]

Relative paths are relative to the file. The README has every key.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from vllm_cp import Tls
from vllm_cp.discovery import DEFAULT_POOL, DnsKind, DnsName, Overrides
from vllm_cp.models.ladder import Expect, Rung
from vllm_cp_exporter.config import Canary, Listen, ProbeModule, parse_listen
from vllm_cp_exporter.lined import Document, Section, Value
from vllm_cp_exporter.logs import FORMATS, LEVELS, LogFormat
from vllm_cp_exporter.sources import DnsSource, FileSource, KubernetesSource, Source

S = TypeVar("S", FileSource, DnsSource, KubernetesSource)

__all__ = ["DefaultsSaid", "FileTarget", "PoolSaid", "Said", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSaid:
    """What is said of one pool, or of all."""

    min_ready: int | None = None
    ready_rung: Rung | None = None
    answer_within_s: float | None = None
    expect: Expect | None = None
    canary: Canary | None = None
    kv_events: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsSaid:
    """What is said of all connections."""

    #: False: plaintext, said aloud.
    tls: Tls | bool | None = None
    server_name: str | None = None
    token_file: Path | None = None
    insecure_token: bool | None = None
    timeout_s: float | None = None
    pool: PoolSaid = PoolSaid()
    line: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTarget:
    """One of ``targets``: ``text`` alone as in ``--target``, or the other fields."""

    value: Value
    text: str = ""
    name: str = ""
    grpc: str = ""
    http: str = ""
    pool: str | None = None
    kv_events: bool | None = None
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """All that a file says."""

    document: Document
    listen: Listen | None = None
    probe_interval_s: float | None = None
    info_interval_s: float | None = None
    engine_recovery_timeout_s: float | None = None
    state_file: Path | None = None
    log_format: LogFormat | None = None
    log_level: str | None = None
    defaults: DefaultsSaid = DefaultsSaid()
    pools: Mapping[str, PoolSaid] = field(default_factory=lambda: MappingProxyType({}))
    targets: tuple[FileTarget, ...] = ()
    sources: tuple[Source, ...] = ()
    modules: Mapping[str, ProbeModule] = field(default_factory=lambda: MappingProxyType({}))
    probe_allow: tuple[str, ...] = ()


def read(path: Path) -> Said:
    """What the file says. Raises Mistakes only when it is no YAML; others are noted in ``document``."""
    document = Document(path)
    return document.read(_file, Said(document=document))


def _file(value: Value) -> Said:
    with value.section() as top:
        return Said(
            document=value.document,
            listen=top.take("listen", lambda it: it.attempt(lambda: parse_listen(it.text())), None),
            probe_interval_s=top.take("probe_interval", Value.seconds, None),
            info_interval_s=top.take("info_interval", Value.seconds, None),
            engine_recovery_timeout_s=top.take("engine_recovery_timeout", Value.seconds, None),
            state_file=top.take("state_file", Value.path, None),
            defaults=top.take("defaults", _defaults, DefaultsSaid()),
            pools=MappingProxyType(top.take("pools", lambda it: it.named(_pool), {})),
            targets=tuple(top.take("targets", lambda it: it.each(_target), [])),
            sources=top.take("discovery", _discovery, ()),
            modules=MappingProxyType(top.take("modules", lambda it: it.named(_module), {})),
            probe_allow=tuple(top.take("probe_allow", lambda it: it.each(_allowed), [])),
            **top.take("log", _log, {}),
        )


def _log(value: Value) -> dict[str, Any]:
    with value.section() as section:
        return {
            "log_format": section.take("format", lambda it: it.word(FORMATS), None),
            "log_level": section.take("level", lambda it: it.word(LEVELS), None),
        }


def _defaults(value: Value) -> DefaultsSaid:
    with value.section() as section:
        tls = section.take("tls", _tls, None)
        if tls is None and section.get("tls") is not None:
            tls = Tls()  # it is wrong, and has been said to be; what needs TLS is not wrong for that
        return DefaultsSaid(
            tls=tls,
            server_name=section.take("server_name", Value.text, None),
            token_file=section.take("token_file", Value.path, None),
            insecure_token=section.take("insecure_token", Value.switch, None),
            timeout_s=section.take("timeout", Value.seconds, None),
            pool=_judged(section),
            line=value.line,
        )


def _judged(section: Section) -> PoolSaid:
    return PoolSaid(
        ready_rung=section.take("ready_rung", lambda it: it.choice(Rung), None),
        answer_within_s=section.take("answer_within", Value.seconds, None),
        expect=section.take("expect", lambda it: it.choice(Expect), None),
        canary=section.take("canary", lambda it: it.choice(Canary), None),
        kv_events=section.take("kv_events", Value.switch, None),
    )


def _pool(_: str, value: Value) -> PoolSaid:
    with value.section() as section:
        return replace(_judged(section), min_ready=section.take("min_ready", Value.whole, None))


def _tls(value: Value) -> Tls | bool:
    """``true``, ``false``, or the files."""
    if value.plain and not value.empty:
        return Tls() if value.switch() else False
    with value.section() as section:
        ca, cert, key = (section.take(name, Value.path, None) for name in ("ca_file", "cert_file", "key_file"))
    return value.attempt(lambda: Tls(ca_file=ca, cert_file=cert, key_file=key))


def _overrides(section: Section) -> Overrides:
    """What a target or a source may have of its own."""
    tls = section.take("tls", _tls, None)
    server_name = section.take("server_name", Value.text, None)
    token_file = section.take("token_file", Value.path, None)
    wanted = section.take("canary", Value.switch, None)
    return section.value.attempt(
        lambda: Overrides(
            tls=tls if isinstance(tls, Tls) else None,
            plaintext=tls is False,
            server_name=server_name,
            token_file=token_file,
            canary=wanted,
        )
    )


def _target(value: Value) -> FileTarget:
    if value.plain:
        return FileTarget(value=value, text=value.text())
    with value.section() as section:
        target = FileTarget(
            value=value,
            name=section.take("name", Value.text, ""),
            grpc=section.take("grpc", Value.text, ""),
            http=section.take("http", Value.text, ""),
            pool=section.take("pool", Value.text, None),
            kv_events=section.take("kv_events", Value.switch, None),
            overrides=_overrides(section),
        )
    if not target.grpc and not target.http:
        raise value.wrong("give its address: grpc, http, or both")
    if not target.grpc and not target.name:
        raise value.wrong("a target without grpc needs a name")
    return target


def _module(_: str, value: Value) -> ProbeModule:
    with value.section() as section:
        tls = section.take("tls", _tls, None)
        said: dict[str, Any] = {
            "tls": tls or None,
            "server_name": section.take("server_name", Value.text, None),
            "token_file": section.take("token_file", Value.path, None),
            "insecure_token": section.take("insecure_token", Value.switch, None),
            "rung": section.take("rung", lambda it: it.choice(Rung), None),
            "timeout_s": section.take("timeout", Value.seconds, None),
        }
    if said["token_file"] and not tls and not said["insecure_token"]:
        raise value.wrong(
            "the token would cross the network in plaintext: give tls, or insecure_token: true if you accept that"
        )
    return value.attempt(lambda: ProbeModule(**{key: one for key, one in said.items() if one is not None}))


def _allowed(value: Value) -> str:
    """A pattern for names, or a network."""
    text = value.text()
    if "/" in text:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise value.wrong(f"{text!r} is no network: {error}") from None
    elif any(c.isspace() for c in text):
        raise value.wrong(f"{text!r} holds spaces; write a pattern like *.workers.internal, or a network")
    return text


# -- discovery -------------------------------------------------------------------------------


def _discovery(value: Value) -> tuple[Source, ...]:
    with value.section() as section:
        found: list[Source] = [
            *section.take("file_sd", _file_sd, ()),
            *section.take("dns", lambda it: it.each(_dns), []),
            *section.take("kubernetes", _kubernetes, ()),
        ]
    names: set[str] = set()
    for source in found:
        if source.name in names:
            value.document.mistake(value.line, f"{value.name}: two sources are called {source.name}; give one a name")
        names.add(source.name)
    return tuple(found)


def _file_sd(value: Value) -> tuple[Source, ...]:
    """A list of names and patterns, or a mapping that has it and more."""
    if value.is_list and not any(map(_is_section, value.items())):
        return _built(value, FileSource(files=_files(value)))
    if value.is_list:
        return tuple(source for one in value.each(_file_sd) for source in one)
    with value.section() as section:
        source = FileSource(
            name=section.take("name", Value.text, "file_sd"),
            files=section.take("files", _files, ()),
            poll_s=section.take("poll_interval", Value.seconds, 5.0),
            pool=section.take("pool", Value.text, DEFAULT_POOL),
            overrides=_overrides(section),
        )
    return _built(value, source)


def _is_section(value: Value) -> bool:
    return not value.plain and not value.empty


def _files(value: Value) -> tuple[str, ...]:
    return tuple(os.fspath(path) for path in value.each(Value.path))


def _dns(value: Value) -> Source:
    with value.section() as section:
        name = section.take("name", Value.text, "")
        kind = section.take("kind", lambda it: it.choice(DnsKind), DnsKind.HOST)
        port = section.take("port", Value.port, None)
        http_port = section.take("http_port", Value.port, None)
        family: Any = section.take("family", lambda it: it.word(("any", "ipv4", "ipv6")), "any")
        pool = section.take("pool", Value.text, DEFAULT_POOL)
        overrides = _overrides(section)
    if not name:
        raise value.wrong("give the name to resolve: name")
    dns = value.attempt(lambda: DnsName(name=name, kind=kind, port=port, http_port=http_port, family=family))
    called = f"dns:{name}" if port is None else f"dns:{name}:{port}"
    return _built(value, DnsSource(name=called, dns=dns, pool=pool, overrides=overrides))[0]


def _kubernetes(value: Value) -> tuple[Source, ...]:
    """One selection of pods, or a list of them."""
    return tuple(value.each(_pods)) if value.is_list else (_pods(value),)


def _pods(value: Value) -> KubernetesSource:
    with value.section() as section:
        namespace = section.take("namespace", Value.text, "")
        missing = section.get("namespace") is None
        node = section.take("node", Value.text, None)
        variable = section.take("node_from_env", Value.text, None)
        source = KubernetesSource(
            name=section.take("name", Value.text, "kubernetes"),
            namespace=None if namespace == "*" else namespace,
            label_selector=section.take("selector", Value.text, None),
            node=node,
            pool_label=section.take("pool_label", Value.text, None),
            pool=section.take("pool", Value.text, DEFAULT_POOL),
            http_scheme=section.take("http_scheme", lambda it: it.word(("http", "https")), "http"),
            kubeconfig=section.take("kubeconfig", Value.path, None),
            context=section.take("context", Value.text, None),
            overrides=_overrides(section),
        )
    if missing:
        raise value.wrong("give a namespace, or '*' for all of them")
    if variable is not None:
        if node is not None:
            raise value.wrong("node and node_from_env exclude each other")
        if not os.environ.get(variable):
            raise value.wrong(f"node_from_env: {variable} is not set in the environment")
        source = replace(source, node=os.environ[variable])
    _built(value, source)
    return source


def _built(value: Value, source: S) -> tuple[S]:
    """The source, once it is known that it can be built."""
    value.attempt(source.build)
    return (source,)
