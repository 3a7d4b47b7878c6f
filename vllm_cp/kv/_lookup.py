"""How far into a prompt each cache group holds it. One walk over the prompt for all groups together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from vllm_cp.kv._shelves import Group, Owner, Place, Plane

__all__ = ["Runs", "limit", "runs_of"]

#: Leading blocks by number of the group, where there are any.
Runs: TypeAlias = dict[int, int]


def runs_of(planes: Mapping[Place, Plane], keys: Iterable[int], groups: int) -> tuple[Runs, dict[str | None, Runs]]:
    """Leading blocks that are resident anywhere, and in each medium alone, of the groups in a mask.

    A group leaves the walk at the first block that it does not hold; masks make that one operation for all of them.
    """
    media: dict[str | None, list[Plane]] = {}
    for (medium, _), plane in planes.items():
        if plane:
            media.setdefault(medium, []).append(plane)
    if not media:
        return {}, {}
    if len(media) == 1:
        [(medium, found)] = media.items()
        runs = _walk_one(found, keys, groups)
        return runs, {medium: runs} if runs else {}
    return _walk_all(media, keys, groups)


def _walk_one(planes: list[Plane], keys: Iterable[int], groups: int) -> Runs:
    runs: Runs = {}
    alive, at = groups, 0
    get = planes[0].get
    others = [plane.get for plane in planes[1:]]
    for key in keys:
        held = get(key, 0)
        for other in others:
            held |= other(key, 0)
        still = alive & held
        if still != alive:
            _leave(runs, alive ^ still, at)
            alive = still
            if not alive:
                return runs
        at += 1
    _leave(runs, alive, at)
    return runs


def _walk_all(
    media: dict[str | None, list[Plane]], keys: Iterable[int], groups: int
) -> tuple[Runs, dict[str | None, Runs]]:
    anywhere: Runs = {}
    runs: dict[str | None, Runs] = {medium: {} for medium in media}
    alive = dict.fromkeys(media, groups)
    alive_anywhere, at = groups, 0
    look = [(medium, [plane.get for plane in planes]) for medium, planes in media.items()]
    for key in keys:
        union = 0
        for medium, gets in look:
            held = 0
            for get in gets:
                held |= get(key, 0)
            union |= held
            was = alive[medium]
            still = was & held
            if still != was:
                _leave(runs[medium], was ^ still, at)
                alive[medium] = still
        still = alive_anywhere & union
        if still != alive_anywhere:
            _leave(anywhere, alive_anywhere ^ still, at)
            alive_anywhere = still
            if not still:
                break
        at += 1
    _leave(anywhere, alive_anywhere, at)
    for medium, left in alive.items():
        _leave(runs[medium], left, at)
    return anywhere, {medium: found for medium, found in runs.items() if found}


def _leave(runs: Runs, groups: int, at: int) -> None:
    """The groups in the mask hold ``at`` blocks and not the next."""
    if at:
        for number in _bits(groups):
            runs[number] = at


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def limit(owner: Owner, tokens: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Leading blocks and tokens of an owner, from those of its groups (by number).

    A prefix is usable as far as every group has it that keeps whole prompts. Groups that keep a window hold back
    nothing, and neither does the group of events that name none, where others are named.
    """
    groups: list[Group] = [*owner.groups.values()]
    if len(groups) > 1:
        groups = [group for group in groups if not group.windowed] or groups
    if len(groups) > 1:
        groups = [group for group in groups if group.index is not None and group.sizes] or groups
    return min((tokens.get(group.number, (0, 0)) for group in groups), key=lambda run: run[1])
