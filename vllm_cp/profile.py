"""The deployment lock: what a worker says it is, as a small file to review, and what differs from it later.

::

    with ControlClient("llama-0:8001") as worker:
        save(capture(worker), Path("certified.lock"))
    ...
        drift = compare(load(Path("certified.lock")), capture(worker))

The file is a subset of YAML, one fact a line, so that a change is one line of a diff. Python has no YAML of its own,
and TOML only from 3.11 on; this subset takes a page of code, can tell the line of every mistake, and reads a value by
the kind of its fact: ``engine_version: 0.32`` is text. What is written is quoted, and ASCII.

    schema: 1
    facts:
      engine_version: "0.32.1"
      total_kv_blocks: 40960
      proto_version: null
    allow:
      engine_version: 0.32.*
      total_kv_blocks: 40000..42000

*Facts.* ``null`` is "the worker does not report it", which is neither zero nor no. A fact that was null and has a
value now is newly reported, one that had a value and is null now is no longer reported; both are drift. A fact whose
line is missing is not compared. KV publishers have ``kv_events.RANK.name``; ``kv_events.*.name`` holds for every rank
that has no such line of its own.

*Allow.* What a fact may be besides its locked value: a value; text in which ``*`` stands for any text; a range of
numbers, ``40000..42000``, of which one end may be missing; ``null``; a list of these; or ``any``, null included. A
rule for one rank wins over the one for all.

*Compatibility.* ``schema`` rises whenever a fact or a form of rule is added or changes its meaning. A reader takes
every schema up to its own and refuses a newer one; so a key it does not know is a slip, refused with its line.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_cp._profile_text import KV, MODEL, PARALLELISM, RANKS, RL, SCHEMA, SERVER, dumps, for_all_ranks, loads
from vllm_cp.errors import ConfigError
from vllm_cp.files import read_file
from vllm_cp.models.profile import Allowed, Drift, DriftKind, Profile, Value

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient
    from vllm_cp.models.kv_source import KvEventSource
    from vllm_cp.models.model import ModelInfo
    from vllm_cp.models.server import ServerInfo

__all__ = [
    "SCHEMA",
    "Allowed",
    "Drift",
    "DriftKind",
    "Profile",
    "Value",
    "capture",
    "compare",
    "dumps",
    "load",
    "loads",
    "not_compared",
    "profile_of",
    "save",
]


def capture(
    client: ControlClient,
    *,
    instance_id: bool = False,
    image_digest: str | None = None,
    driver: str | None = None,
    notes: Iterable[str] = (),
) -> Profile:
    """Ask a worker what it is: three reads. Raises ControlError. The rest as for ``profile_of``."""
    return profile_of(
        client.server_info(),
        client.model_info(),
        client.kv_event_sources(),
        instance_id=instance_id,
        image_digest=image_digest,
        driver=driver,
        notes=notes,
    )


def profile_of(
    info: ServerInfo,
    model: ModelInfo,
    sources: Iterable[KvEventSource],
    *,
    instance_id: bool = False,
    image_digest: str | None = None,
    driver: str | None = None,
    notes: Iterable[str] = (),
) -> Profile:
    """The profile of a worker that said these things.

    ``instance_id`` is left out unless asked for: it changes with every start. What a worker cannot know is told:
    ``image_digest``, ``driver``, and ``notes`` for people.
    """
    facts: dict[str, Value] = {}
    told = {"image_digest": image_digest, "driver": driver}
    facts.update({name: value for name, value in told.items() if value is not None})
    facts.update(_read(info, SERVER))
    if not instance_id:
        del facts["instance_id"]
    facts.update(_read(model.seen_on(info.engine_version), MODEL))
    facts.update(_read(info.parallelism, PARALLELISM))
    facts.update(_read(info.rl_capabilities, RL))
    publishers: dict[str | int, dict[str, Value]] = {}
    for source in sources:
        first: str | int = "all" if source.data_parallel_rank is None else source.data_parallel_rank
        rank, count = first, 1
        while rank in publishers:  # one per rank is the rule; a second one must not hide the first
            count += 1
            rank = f"{first}-{count}"
        publishers[rank] = _read(source, KV)
    facts[RANKS] = tuple(publishers)
    facts.update(_by_rank(publishers))
    return Profile(facts=facts, notes=tuple(notes))


def _read(said: Any, names: Iterable[str]) -> dict[str, Value]:
    # A part that was not sent at all is unknown as a whole, and text that is empty says nothing.
    values = {name: getattr(said, name) if said is not None else None for name in names}
    return {name: None if value == "" else value for name, value in values.items()}


def _by_rank(publishers: dict[str | int, dict[str, Value]]) -> dict[str, Value]:
    """What is the same at every rank is said once, or a lock of sixty-four ranks would be too long to review."""
    facts: dict[str, Value] = {}
    for name in KV:
        values = [said[name] for said in publishers.values()]
        if len(values) > 1 and values.count(values[0]) == len(values):
            facts[f"kv_events.*.{name}"] = values[0]
        else:
            facts.update({f"kv_events.{rank}.{name}": said[name] for rank, said in publishers.items()})
    return facts


def compare(profile: Profile, live: Profile) -> tuple[Drift, ...]:
    """What differs and is not allowed to, in the order of the lock. Facts that one side lacks are not compared."""
    ranks = live.facts.get(RANKS)
    every = ranks if isinstance(ranks, tuple) else ()
    now, found = _each_rank(live, every), []
    for name, locked in _each_rank(profile, every).items():
        if name not in now or now[name] == locked:
            continue
        rule = profile.allow.get(name) or profile.allow.get(for_all_ranks(name))
        if rule is not None and rule.admits(now[name]):
            continue
        kind = DriftKind.CHANGED
        if locked is None or now[name] is None:
            kind = DriftKind.NEWLY_REPORTED if locked is None else DriftKind.NO_LONGER_REPORTED
        allowed = rule.text if rule is not None else None
        found.append(Drift(name=name, kind=kind, locked=locked, live=now[name], allowed=allowed))
    return tuple(found)


def not_compared(profile: Profile, live: Profile) -> tuple[str, ...]:
    """Facts of the lock about which nothing is known now. Ranks that are gone are drift of ``kv_events.ranks``."""
    return tuple(name for name in profile.facts if name not in live.facts and not for_all_ranks(name))


def _each_rank(profile: Profile, ranks: Iterable[str | int]) -> dict[str, Value]:
    facts: dict[str, Value] = {}
    for name, value in profile.facts.items():
        if name != for_all_ranks(name):
            facts[name] = value
            continue
        own = {rank: name.replace("*", str(rank)) for rank in ranks}
        facts.update({each: value for each in own.values() if each not in profile.facts})
    return facts


def load(path: Path) -> Profile:
    """Read a file. Raises ConfigError that names the file and the line."""
    try:
        text = read_file(path, pipes=True).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read lock file {os.fspath(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"lock file {os.fspath(path)!r} is not UTF-8 text") from None
    return loads(text, os.fspath(path))


def save(profile: Profile, path: Path) -> None:
    """Write a file whole or not at all; the mode of one that is there stays. Raises OSError."""
    path = path.resolve()  # of a link, the file it points at is replaced
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(profile))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(made, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
