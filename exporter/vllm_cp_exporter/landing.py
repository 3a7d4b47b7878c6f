"""The status page: every worker on one self-contained page, drawn here, kept up to date by a few lines of script.

The page is whole without the script: then the browser loads it again every few seconds. The script asks for the part
that changes and puts it in its place, so there is one place that draws.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from urllib.parse import urlencode

from vllm_cp import __version__
from vllm_cp.models.episode import Episode
from vllm_cp.models.ladder import RungState
from vllm_cp_exporter.collector import clean
from vllm_cp_exporter.records import episode_record, iso
from vllm_cp_exporter.snapshot import POOL_STATES, Facts, Snapshot, WorkerView

__all__ = ["EPISODES", "POLICY", "episodes", "landing_page", "live_part"]

log = logging.getLogger("vllm_cp_exporter.landing")

#: The longest list of episodes that is given out.
EPISODES = 1000
_EPISODES_SHOWN = 50
#: More workers than these are no page to read; a pool is.
_WORKERS_SHOWN = 500

_ASSETS = files("vllm_cp_exporter") / "assets"
_STYLE = (_ASSETS / "status.css").read_text("utf-8")
_SCRIPT = (_ASSETS / "status.js").read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


#: Nothing is loaded from anywhere, and no script runs but the one that is in the page.
POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_LOOKS = {"ready": "good", "faulted": "bad", "unknown": "bad", "starting": "warn", "suspended": "warn"}
_TROUBLE_FIRST = ("faulted", "unknown", "starting", "suspended", "draining", "ready")
_TABLE = (
    '<div class="wide workers"><table><thead><tr><th scope="col">worker<th scope="col">state'
    '<th scope="col">ladder and open fault'
    '<th scope="col">capacity<th scope="col">load<th scope="col">KV events<th scope="col">restarts'
    "</thead><tbody>"
)
_EPISODE_TABLE = (
    '<h2>Last episodes</h2><div class="wide"><table><thead><tr><th scope="col">worker<th scope="col">start'
    '<th scope="col">cause<th scope="col">end<th scope="col">seconds<th scope="col">what was said</thead><tbody>'
)


def landing_page(
    snapshot: Snapshot,
    not_ready: str | None,
    pool: str | None = None,
    revision: int = 0,
    sources: Mapping[str, float] | None = None,
) -> str:
    """The page. ``pool`` shows one pool only; ``sources``: when each source of targets last answered, Unix seconds."""
    again = escape(_link(pool))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>vllm-cp-exporter</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<noscript><meta http-equiv="refresh" content="5; url={again}"></noscript>'
        f'<style>{_STYLE}</style></head><body><div class="page">'
        f'<header><h1>vllm-cp-exporter</h1><span class="soft">{escape(__version__)}</span>'
        '<span class="mark" id="mark"><noscript>reloads every 5 s</noscript></span>'
        '<nav><a href="metrics">/metrics</a><a href="api/v1/workers">/api/v1/workers</a>'
        '<a href="api/v1/episodes">/api/v1/episodes</a><a href="-/ready">/-/ready</a>'
        '<a href="-/healthy">/-/healthy</a></nav></header>'
        f'<main id="live">{live_part(snapshot, not_ready, pool, revision, sources)}</main>'
        f"</div><script>{_SCRIPT}</script></body></html>\n"
    )


def live_part(
    snapshot: Snapshot,
    not_ready: str | None,
    pool: str | None = None,
    revision: int = 0,
    sources: Mapping[str, float] | None = None,
) -> str:
    """What changes on the page. A worker that cannot be shown costs its own line only."""
    everyone = snapshot.workers.values()
    workers = sorted((view for view in everyone if pool in (None, view.pool)), key=_order)
    rows = "".join(map(_guarded, workers[:_WORKERS_SHOWN]))
    more = len(workers) - _WORKERS_SHOWN
    past = "".join(_episode(*each) for each in _newest(snapshot, _EPISODES_SHOWN, pool))
    waiting = f'<p class="notice">Not ready: {_text(not_ready)}</p>' if not_ready else ""
    return (
        f'<div data-revision="{revision}">{waiting}{_summary(workers)}{_pools(snapshot, pool)}'
        f"{_TABLE}{rows or _nothing(7)}</tbody></table></div>"
        + (f'<p class="soft">{more} more workers are not shown; choose a pool.</p>' if more > 0 else "")
        + f"{_EPISODE_TABLE}{past or _nothing(6)}</tbody></table></div>{_sources(sources or {})}</div>"
    )


def _order(view: WorkerView) -> tuple[int, str, str]:
    return _TROUBLE_FIRST.index(view.pool_state), view.pool, view.key


def _summary(workers: Sequence[WorkerView]) -> str:
    states = [view.pool_state for view in workers]
    ready = f"<h2>{states.count('ready')} of {len(states)} workers ready</h2>"
    tiles = [
        f'<li class="{_LOOKS.get(state, "")}"><strong>{count}</strong>{state}'
        for state in ("ready", *(each for each in POOL_STATES if each != "ready"))
        if (count := states.count(state))
    ]
    return f'{ready}<ul class="sum">{"".join(tiles)}</ul>' if tiles else ready


def _pools(snapshot: Snapshot, chosen: str | None) -> str:
    pools = snapshot.pools()
    if len(pools) < 2 and chosen is None:
        return ""
    links = [_pool_link(None, "all pools", chosen)]
    for name, views in sorted(pools.items()):
        wanted = snapshot.min_ready.get(name)
        count = f"{sum(view.state.ready for view in views)}/{len(views)}"
        links.append(_pool_link(name, f"{name} {count}" + (f", wants {wanted}" if wanted is not None else ""), chosen))
    return f'<nav class="pools" aria-label="pools">{"".join(links)}</nav>'


def _pool_link(pool: str | None, text: str, chosen: str | None) -> str:
    current = ' aria-current="page"' if pool == chosen else ""
    return f'<a href="{escape(_link(pool))}"{current}>{_text(text)}</a>'


def _link(pool: str | None) -> str:
    return "." if pool is None else "?" + urlencode({"pool": pool}, errors="replace")


def _nothing(columns: int) -> str:
    return f'<tr><td colspan="{columns}" class="soft">none'


def _guarded(view: WorkerView) -> str:
    try:
        return _worker(view)
    except Exception:  # (one strange worker must not hide the others)
        log.debug("worker_not_shown", exc_info=True)
        return f'<tr><td>{_who(view.key, view.pool)}<td colspan="6">cannot be shown'


def _worker(view: WorkerView) -> str:
    state = view.state
    fault = state.open_fault
    opened = f'<p class="fault">{fault.episode.cause.value} since {iso(fault.episode.start)}</p>' if fault else ""
    label = view.pool_state
    reason = state.reason.value.replace("_", " ") if state.reason else ""
    also = f"<small>{_text(reason)}</small>" if reason and reason != label else ""
    steps = "".join(_rung(rung.value, held) for rung, held in state.rungs)
    why = next((held.why for _, held in state.rungs if held.holds is not True and held.why), "")
    return (
        f"<tr><td>{_who(view.key, view.pool)}"
        f"<small>{_text(view.target or view.http_url)}</small>"
        f'<td><span class="chip {_LOOKS.get(label, "")}">{label}</span>{also}'
        f'<td><ol class="ladder">{steps}</ol>{opened}'
        + (f'<p class="why">{_text(why)}</p>' if why else "")
        + _capacity(view.facts)
        + _load(view)
        + f'<td data-is="KV events">{_events(view.facts)}'
        f'<td class="n" data-is="restarts">{state.restarts}'
    )


def _capacity(facts: Facts) -> str:
    server = facts.server
    if server is None:
        return '<td data-is="capacity">-'
    blocks = "-" if server.total_kv_blocks is None else str(server.total_kv_blocks)
    most = server.max_running_requests
    running = "" if most is None else f"<small>{most} requests per rank</small>"
    model = f"<small>{_text(facts.model.served_model_name)}</small>" if facts.model else ""
    return f'<td data-is="capacity">{blocks} KV blocks{running}{model}'


def _load(view: WorkerView) -> str:
    page = view.metrics
    if page is None:
        return '<td class="none">-'
    running, waiting = (_count(number) for number in (page.running, page.waiting))
    used = page.kv_cache_usage_ratio
    bar = (
        ""
        if used is None
        else f'<meter max="1" high="0.9" value="{used:.3f}"></meter><small>{used:.0%} of KV cache</small>'
    )
    return f'<td data-is="load">{running} running, {waiting} waiting{bar}'


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:g}"


def _who(key: str, pool: str) -> str:
    return f'<span class="key">{_text(key)}</span><small>{_text(pool)}</small>'


def _events(facts: Facts) -> str:
    """Whether KV-cache events can be had, and why not."""
    if facts.sources is None:
        return _text(facts.sources_problem or "-")
    if not facts.sources:
        return "off"
    useless = [source.reason for source in facts.sources if source.reason]
    where = useless[0] if useless else facts.sources[0].connect_to
    count = len(facts.sources)
    return f"{count} source{'s' if count > 1 else ''}<small>{_text(where or '')}</small>"


def _rung(name: str, state: RungState) -> str:
    look = {True: "yes", False: "no", None: "open"}[state.holds]
    why = state.why or (f"proved by {state.proof}" if state.proof else "not known")
    return f'<li class="{look}" title="{_text(why)}">{escape(name)}'


def _episode(key: str, pool: str, episode: Episode) -> str:
    end = f"{episode.kind.value} at {iso(episode.end)}" if episode.kind else "open"
    took = "-" if episode.duration_s is None else f"{episode.duration_s:.1f}"
    return (
        f'<tr><td>{_who(key, pool)}<td data-is="start">{iso(episode.start) or "-"}'
        f'<td data-is="cause">{episode.cause.value}<td data-is="end">{end}'
        f'<td class="n" data-is="seconds">{took}<td data-is="said">{_text(episode.detail) or "-"}'
    )


def _sources(sources: Mapping[str, float]) -> str:
    if not sources:
        return ""
    rows = (f"<tr><td>{_text(name)}<td>{iso(at) or '-'}" for name, at in sources.items())
    return (
        '<h2>Sources of targets</h2><div class="wide"><table><thead><tr><th scope="col">source'
        f'<th scope="col">last answered</thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def episodes(snapshot: Snapshot) -> list[dict[str, object]]:
    """The last episodes of all workers as records, newest first."""
    return [
        {"worker": clean(key), "pool": clean(pool), **episode_record(episode)}
        for key, pool, episode in _newest(snapshot, EPISODES)
    ]


def _newest(snapshot: Snapshot, most: int, pool: str | None = None) -> Iterable[tuple[str, str, Episode]]:
    views = [view for view in snapshot.workers.values() if pool in (None, view.pool)]
    known = [(view.key, view.pool, episode) for view in views for episode in view.episodes]
    return sorted(known, key=lambda known: known[2].start, reverse=True)[:most]


def _text(text: str) -> str:
    return escape(clean(text))
