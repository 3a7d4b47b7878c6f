"""What people see in a browser: every worker on one self-contained page, and the last episodes as records."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from html import escape

from vllm_cp import __version__
from vllm_cp.models.episode import Episode
from vllm_cp.models.ladder import RungState
from vllm_cp_exporter.collector import clean
from vllm_cp_exporter.snapshot import Snapshot, WorkerView

__all__ = ["EPISODES", "episodes", "landing_page"]

#: The longest list of episodes that is given out.
EPISODES = 1000
_ON_THE_PAGE = 50

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>vllm-cp-exporter</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="5">
<style>
body{font:14px/1.5 system-ui,sans-serif;margin:1.5rem;color:#1a1f24;background:#fff}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:1.6rem}
.wide{overflow-x:auto}table{border-collapse:collapse}
th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid #dde2e6;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.r{display:inline-block;padding:0 .4rem;margin-right:.2rem;border-radius:.25rem;background:#e6e9ec;color:#4a5560}
.yes{background:#d3f0dc;color:#10552a}.no{background:#f8d7d7;color:#7d1414}
@media(prefers-color-scheme:dark){body{color:#dfe5ea;background:#14181c}th,td{border-color:#323a42}
.r{background:#2c343b;color:#a9b4bd}.yes{background:#12401f;color:#9fe3b4}.no{background:#521a1a;color:#f3b3b3}}
</style></head><body>
"""


def landing_page(snapshot: Snapshot, not_ready: str | None) -> str:
    """The page. A worker that cannot be shown costs its own line only."""
    workers = list(snapshot.workers.values())
    ready = sum(view.state.ready for view in workers)
    rows = "".join(map(_guarded, workers))
    past = "".join(_episode(key, pool, episode) for key, pool, episode in _newest(snapshot, _ON_THE_PAGE))
    return (
        f"{_HEAD}<h1>vllm-cp-exporter {escape(__version__)}</h1>"
        f"<p>{ready} of {len(workers)} workers ready{escape(f' ({not_ready})') if not_ready else ''}. "
        '<a href="/metrics">/metrics</a> <a href="/api/v1/episodes">/api/v1/episodes</a> '
        '<a href="/-/ready">/-/ready</a> <a href="/-/healthy">/-/healthy</a></p>'
        '<div class="wide"><table><tr><th>worker<th>pool<th>target<th>ladder<th>ready<th>KV blocks<th>restarts'
        f"<th>open fault</tr>{rows}</table></div>"
        '<h2>Last episodes</h2><div class="wide"><table><tr><th>worker<th>pool<th>start<th>cause<th>end<th>seconds'
        f"<th>what was said</tr>{past or '<tr><td colspan=7>none</tr>'}</table></div></body></html>\n"
    )


def _guarded(view: WorkerView) -> str:
    try:
        return _worker(view)
    except Exception:  # noqa: BLE001  (one strange worker must not hide the others)
        return f"<tr><td>{_text(view.key)}<td>{_text(view.pool)}<td colspan=6>cannot be shown</tr>"


def _worker(view: WorkerView) -> str:
    state, server = view.state, view.facts.server
    ladder = "".join(_rung(rung.value, held) for rung, held in state.rungs)
    fault = state.open_fault
    opened = f"{fault.episode.cause.value} since {_iso(fault.episode.start)}" if fault else ""
    reason = state.reason.value if state.reason else ""
    blocks = server.total_kv_blocks if server else None
    verdict = f'<span class="r no">{_text(reason)}</span>' if reason else '<span class="r yes">ready</span>'
    return (
        f"<tr><td>{_text(view.key)}<td>{_text(view.pool)}<td>{_text(view.target or view.http_url)}<td>{ladder}"
        f'<td>{verdict}<td class="n">{"-" if blocks is None else blocks}<td class="n">{state.restarts}'
        f"<td>{_text(opened)}</tr>"
    )


def _rung(name: str, state: RungState) -> str:
    look = {True: "r yes", False: "r no", None: "r"}[state.holds]
    why = state.why or (f"proved by {state.proof}" if state.proof else "")
    return f'<span class="{look}" title="{_text(why)}">{escape(name)}</span>'


def _episode(key: str, pool: str, episode: Episode) -> str:
    end = f"{episode.kind.value} at {_iso(episode.end)}" if episode.kind else "open"
    took = "-" if episode.duration_s is None else f"{episode.duration_s:.1f}"
    return (
        f"<tr><td>{_text(key)}<td>{_text(pool)}<td>{_iso(episode.start)}<td>{episode.cause.value}<td>{end}"
        f'<td class="n">{took}<td>{_text(episode.detail)}</tr>'
    )


def episodes(snapshot: Snapshot) -> list[dict[str, object]]:
    """The last episodes of all workers as records, newest first."""
    return [
        {
            "worker": clean(key),
            "pool": clean(pool),
            "cause": episode.cause.value,
            "start": _iso(episode.start),
            "end": _iso(episode.end),
            "kind": episode.kind.value if episode.kind else None,
            "duration_s": episode.duration_s,
            "instance_id": None if episode.instance_id is None else clean(episode.instance_id),
            "detail": clean(episode.detail),
        }
        for key, pool, episode in _newest(snapshot, EPISODES)
    ]


def _newest(snapshot: Snapshot, most: int) -> Iterable[tuple[str, str, Episode]]:
    known = [(view.key, view.pool, episode) for view in snapshot.workers.values() for episode in view.episodes]
    return sorted(known, key=lambda known: known[2].start, reverse=True)[:most]


def _iso(at: float | None) -> str | None:
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # no calendar has this moment
        return None


def _text(text: str) -> str:
    return escape(clean(text))
