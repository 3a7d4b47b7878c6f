"""Prometheus file_sd documents to targets: pure, one document at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_cp._target import Target, parse_target
from vllm_cp.config import Tls
from vllm_cp.discovery.base import DEFAULT_POOL, DiscoveredTarget, Overrides
from vllm_cp.errors import ConfigError

__all__ = ["BrokenFile", "targets_of"]

#: Prometheus' own, of no meaning here: one file may serve both.
_PROMETHEUS = re.compile(
    r"__(address|scheme|metrics_path|scrape_interval|scrape_timeout|scrape_native_histograms)__|__(meta|param|tmp)_.*"
)
_SWITCH = {"on": True, "off": False, "true": True, "false": False}
_OURS = frozenset(
    {
        "__worker__",
        "__grpc_target__",
        "__grpc_port__",
        "__http_url__",
        "__http_port__",
        "__tls__",
        "__tls_ca_file__",
        "__tls_cert_file__",
        "__tls_key_file__",
        "__tls_server_name__",
        "__token_file__",
        "__canary__",
    }
)
#: Each stands for one worker, so a group with several can't have it.
_SINGULAR = ("__worker__", "__grpc_target__", "__http_url__")


class BrokenFile(Exception):
    """A document that is no list of target groups, or holds what nobody here understands."""


def targets_of(
    document: object, *, directory: Path, pool: str = DEFAULT_POOL, overrides: Overrides | None = None
) -> list[DiscoveredTarget]:
    """The targets of a document, in its order; a bad address becomes a target with a ``problem``.

    Raises BrokenFile for anything else. ``directory`` is what relative paths in labels are relative to."""
    if document is None:
        raise BrokenFile("it is empty: write [] for no targets")
    if not isinstance(document, list):
        raise BrokenFile("it holds no list of target groups")
    found = []
    for number, group in enumerate(document, 1):
        try:
            found += _group(group, directory, pool, overrides or Overrides())
        except BrokenFile as broken:
            raise BrokenFile(f"group {number}: {broken}") from None
    return found


def _group(group: object, directory: Path, pool: str, base: Overrides) -> list[DiscoveredTarget]:
    if not isinstance(group, dict):
        raise BrokenFile("it is no mapping with targets and labels")
    if unknown := sorted(str(key) for key in group if key not in ("targets", "labels")):
        raise BrokenFile(f"unknown key {unknown[0]!r}: a group has targets and labels")
    texts = group.get("targets", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BrokenFile("targets is no list of texts")
    labels = _labels(group.get("labels", {}))
    if len(texts) > 1 and (alone := [name for name in _SINGULAR if name in labels]):
        raise BrokenFile(f"label {alone[0]} is for one worker: give each target a group of its own")
    return [_target(text, labels, directory, pool, base) for text in texts]


def _labels(given: object) -> dict[str, str]:
    if not isinstance(given, dict):
        raise BrokenFile("labels is no mapping")
    labels: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise BrokenFile(f"label {name!r} has a value that is no text: {value!r}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            (name + text).encode()
        except UnicodeEncodeError:
            raise BrokenFile(f"label {name!r} holds text that is not Unicode") from None
        if name.startswith("__") and name not in _OURS and not _PROMETHEUS.fullmatch(name):
            raise BrokenFile(f"unknown label {name!r}")
        labels[name] = text
    return labels


def _target(text: str, labels: Mapping[str, str], directory: Path, pool: str, base: Overrides) -> DiscoveredTarget:
    key, target, http_url, problem, overrides = labels.get("__worker__") or text, None, None, "", base
    try:
        entry = parse_target(text)
        key = labels.get("__worker__") or entry.name
        target = _grpc(entry, labels).name
        http_url = labels.get("__http_url__") or _http(entry, labels)
        overrides = _overrides(labels, directory, base)
    except ConfigError as error:
        target, problem = None, str(error)
    return DiscoveredTarget(
        key=key if key.isprintable() and key else repr(key),
        target=target,
        problem=problem,
        http_url=http_url,
        pool=labels.get("pool") or pool,
        labels=MappingProxyType({name: value for name, value in labels.items() if name not in _OURS}),
        namespace=labels.get("__meta_kubernetes_namespace", ""),
        pod=labels.get("__meta_kubernetes_pod_name", ""),
        node=labels.get("__meta_kubernetes_pod_node_name", ""),
        overrides=overrides,
    )


def _grpc(entry: Target, labels: Mapping[str, str]) -> Target:
    if whole := labels.get("__grpc_target__"):
        return parse_target(whole)
    return parse_target(_with_port(entry, labels, "__grpc_port__")) if "__grpc_port__" in labels else entry


def _http(entry: Target, labels: Mapping[str, str]) -> str | None:
    if "__http_port__" not in labels:
        return None
    # The address is checked as a target's is, since the two have the same form.
    address = parse_target(_with_port(entry, labels, "__http_port__"))
    return f"{labels.get('__scheme__') or 'http'}://{address.name}"


def _with_port(entry: Target, labels: Mapping[str, str], label: str) -> str:
    if entry.host is None:
        raise ConfigError(f"{label} needs a target with a host, not {entry.name}")
    host = f"[{entry.host}]" if ":" in entry.host else entry.host
    return f"{host}:{labels[label]}"


def _overrides(labels: Mapping[str, str], directory: Path, base: Overrides) -> Overrides:
    changes: dict[str, Any] = {}

    def path(label: str) -> Path | None:
        return directory / labels[label] if labels.get(label) else None

    files = {what: path(f"__tls_{what}_file__") for what in ("ca", "cert", "key")}
    wanted = _switch(labels, "__tls__")
    if wanted is False:
        if any(files.values()):
            raise ConfigError("__tls__ is off, and TLS files are given: drop the one or the others")
        changes.update(tls=None, plaintext=True, server_name=None)
    elif wanted or any(files.values()):
        tls = Tls(ca_file=files["ca"], cert_file=files["cert"], key_file=files["key"])
        # A bare "on" takes the files of the source, if it has any.
        changes.update(tls=tls if any(files.values()) else base.tls or tls, plaintext=False)
    if labels.get("__tls_server_name__"):
        changes["server_name"] = labels["__tls_server_name__"]
    if token := path("__token_file__"):
        changes["token_file"] = token
    if "__canary__" in labels:
        changes["canary"] = _switch(labels, "__canary__")
    return replace(base, **changes) if changes else base


def _switch(labels: Mapping[str, str], label: str) -> bool | None:
    text = labels.get(label)
    if text is None:
        return None
    if text.lower() not in _SWITCH:
        raise ConfigError(f"{label} is {text!r}: write on or off")
    return _SWITCH[text.lower()]
