"""The metric table's rows about KV-cache events; they are there for workers whose events are followed."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from vllm_cp_exporter.kvview import KV_STATES
from vllm_cp_exporter.row import Kind, Point, Points, Row, row, value
from vllm_cp_exporter.snapshot import WorkerView

__all__ = ["KV_ROWS"]


def _by(name: str, part: str, labels: str, text: str) -> Row[WorkerView]:
    """The numbers in a part of ``KvView``, by one label or by several."""
    single, read = " " not in labels, attrgetter(f"kv.{part}")

    def points(view: WorkerView) -> Points:
        return [((key,) if single else key, number) for key, number in read(view).items()]

    return row(f"kv_{name}", _kind(name), text, labels, points, f"kv.{part}")


def _one(name: str, part: str, text: str) -> Row[WorkerView]:
    """A part of ``KvView`` that is one number."""
    read = attrgetter(f"kv.{part}")
    return row(f"kv_{name}", _kind(name), text, "", lambda view: value(read(view)), f"kv.{part}")


def _kind(name: str) -> Kind:
    return "counter" if name.endswith("_total") else "gauge"


def _states(view: WorkerView) -> Iterator[Point]:
    for rank, state in view.kv.states.items():
        for each in KV_STATES:
            yield (rank, each), float(each == state)


KV_ROWS: tuple[Row[WorkerView], ...] = (
    _by(
        "events_total",
        "events",
        "type medium tier",
        "KV-cache events by type, medium and offload tier; none where the event does not say.",
    ),
    _by("blocks_stored_total", "stored", "rank medium", "Blocks that events said were stored."),
    _by("blocks_removed_total", "removed", "rank medium", "Blocks that events said were removed."),
    _by(
        "blocks_resident",
        "resident",
        "rank medium",
        "Different blocks held now; absent while the view of the rank is not complete.",
    ),
    _by(
        "view_complete",
        "complete",
        "rank",
        "Whether every change since the cache of the rank was empty was seen; absent before its first event.",
    ),
    _one("gaps_total", "gaps", "Times that batches were missing, recovered or not."),
    _one("batches_lost_total", "lost", "Batches that are lost for good."),
    _by(
        "replays_total",
        "replays",
        "result",
        "Requests for missing batches: ok came to their end, partial broke off, failed brought nothing.",
    ),
    _one("replay_seconds_total", "replay_seconds", "Time spent in such requests, all together."),
    _by("decode_failures_total", "failures", "reason", "What a publisher sent and nobody can read, by reason."),
    _one("publisher_restarts_total", "restarts", "New publisher processes in the place of old ones."),
    _by("last_sequence", "last_sequence", "rank", "Number of the last batch; absent until the publisher's first."),
    _by(
        "last_event_timestamp_seconds",
        "last_event",
        "rank",
        "When the last batch came, by our clock; absent until there is one.",
    ),
    row(
        "kv_subscriber_state",
        "gauge",
        "How the rank's publisher can be heard: 1 for the state. Rank all is one for all ranks, or the whole worker.",
        "rank state",
        _states,
        "kv.states",
    ),
    _one("queue_depth", "queue_depth", "Batches received and not counted yet."),
    _one("queue_drops_total", "dropped", "Batches dropped because counting was too slow; they are lost, too."),
)
