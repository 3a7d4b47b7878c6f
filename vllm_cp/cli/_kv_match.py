"""``vllm-cp kv match``: which worker holds the start of a prompt."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._kv_tail import RANK_OPTION
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, Verdict, conclude

if TYPE_CHECKING:
    from vllm_cp.cli._fanout import Reply
    from vllm_cp.cli._kv_listen import Listening, Unheard
    from vllm_cp.kv import Match, PrefixIndex, SourceStats
    from vllm_cp.kv import View as IndexView

__all__ = ["command"]

_DEFAULT_S = 10.0
_UNHEARD = "not heard"
#: Without replay there is nothing to wait for but the connection, seconds.
_SETTLE_S = 0.5


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    shared = {"target": record["target"], "of": record["prompt_tokens"]}
    return [
        {
            **shared,
            **rank,
            "shown_rank": "all" if rank["rank"] is None else rank["rank"],
            "media": [f"{medium or '?'}:{run['tokens']}" for medium, run in rank["by_medium"].items()],
        }
        for rank in record["ranks"]
    ] or [shared]


_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("RANK", "shown_rank"),
        Column("TOKENS", "tokens"),
        Column("OF", "of"),
        Column("BLOCKS", "blocks"),
        Column("BY MEDIUM", "media"),
        Column("COMPLETE", "complete", good=frozenset({"yes"})),
        Column("WHY NOT", "why"),
        Column("HELD", "blocks_held", wide=True),
    ),
    _rows,
)


@click.command(
    "match",
    cls=Verb,
    timeout_help="Longest wait for the history of the caches. [default: 10]",
    examples="""
vllm-cp kv match --tokens 1,15043,3186,29892 --context prod
vllm-cp kv match --text "You are a helpful" --tokenizer tokenizer.json
vllm-cp kv match --tokens 1,2,3 --lora sql -o json
""",
)
@click.option("--tokens", metavar="IDS", help="The prompt as token ids, between commas or spaces; - reads them.")
@click.option("--text", metavar="TEXT", help="The prompt as text; - reads it from standard input.")
@click.option("--tokenizer", metavar="FILE", help="tokenizer.json of the model, for --text.")
@click.option("--no-special-tokens", is_flag=True, help="Text: add none, such as the one that begins a prompt.")
@click.option("--lora", metavar="NAME", help="Adapter of the request.")
@click.option("--salt", metavar="TEXT", help="Cache salt of the request.")
@RANK_OPTION
def command(
    *,
    tokens: str | None,
    text: str | None,
    tokenizer: str | None,
    no_special_tokens: bool,
    lora: str | None,
    salt: str | None,
    ranks: tuple[int, ...],
) -> int:
    """Rank the workers by how much of the start of a prompt they hold.

    The caches are read from the replay of their events, as far back as it goes. COMPLETE says whether the view of a
    rank has no holes: in one that is not, more may be resident than is shown, or, after losses, less. TOKENS counts
    whole blocks. Text becomes what the tokenizer makes of it; a chat template is not applied.
    """
    ids = _ids(tokens, text, tokenizer, special=not no_special_tokens)
    shape, patience_s = _context.shape(_VIEW), _context.whole_timeout(_DEFAULT_S)
    connections = _context.connections(at_most_s=patience_s)
    from vllm_cp.cli import _kv_listen
    from vllm_cp.cli._fanout import Reply
    from vllm_cp.kv import PrefixIndex, Settings

    sources = _kv_listen.find_sources(connections, ranks)
    index = PrefixIndex()
    told: dict[tuple[str, int | None], str] = {}
    if sources.usable:
        with _kv_listen.Listening(sources, Settings(catch_up_after_s=0.05, replay_idle_s=2.0)) as heard:
            told = _read(heard, index, patience_s)
    found = index.match(ids, lora=lora, salt=salt)
    records: dict[str, dict[str, Any]] = {
        target: {"prompt_tokens": len(ids), "ranks": _ranks(target, found, index.views(), told, ranks)}
        for target in sources.usable
    }
    best = sorted(records, key=lambda target: -max((rank["tokens"] for rank in records[target]["ranks"]), default=0))
    replies = [Reply(target, _judged(records[target])) for target in best]
    return conclude(_VIEW, shape, [*replies, *(_failed(each, len(ids)) for each in sources.failed)])


def _failed(unheard: Unheard, prompt_tokens: int) -> Reply[Verdict]:
    from vllm_cp.cli._fanout import Reply

    if unheard.error is not None:
        return Reply(unheard.target, error=unheard.error)
    return Reply(unheard.target, Verdict({"prompt_tokens": prompt_tokens, "ranks": []}, unheard.exit, unheard.why))


def _judged(record: Mapping[str, Any]) -> Verdict:
    unheard = [rank["why"] for rank in record["ranks"] if rank["why"].startswith(_UNHEARD)]
    if unheard and len(unheard) == len(record["ranks"]):
        return Verdict(record, Exit.UNREACHABLE, unheard[0])
    return Verdict(record)


def _read(heard: Listening, index: PrefixIndex, patience_s: float) -> dict[tuple[str, int | None], str]:
    """Fill the index until every cache has told its history or patience is at its end.

    Gives each rank that is listened to, and why it has not told all; "" where it has.
    """
    began = time.monotonic()
    for each in heard:
        if each is not None:
            index.apply(each.item)
        elapsed = time.monotonic() - began
        if elapsed >= patience_s:
            break
        # A look at the numbers costs more than an item, so it is for when nothing came.
        if each is None and all(_settled(source, elapsed) for _, source in _sources(heard)):
            break
    elapsed = time.monotonic() - began
    return {
        (target, source.source.rank): _missing(source) if _settled(source, elapsed) else _unheard(source, patience_s)
        for target, source in _sources(heard)
    }


def _sources(heard: Listening) -> list[tuple[str, SourceStats]]:
    return [(target, source) for target, stats in heard.stats().items() for source in stats.sources]


def _settled(source: SourceStats, elapsed_s: float) -> bool:
    from vllm_cp.kv import GapReason, SourceState

    if source.state is not SourceState.CONNECTED or source.replaying or source.pending:
        return False
    # Whatever way the replay ended, no more of the past will come.
    told = sum(source.replays.values()) > 0 or source.begins_at == 0
    return told or source.lost[GapReason.NO_REPLAY] > 0 or elapsed_s >= _SETTLE_S


def _missing(source: SourceStats) -> str:
    """What a rank that has told all it will has not told; "" for nothing, or where the view of it knows better."""
    if source.begins_at is not None or source.replays["ok"] or source.replays["partial"]:
        return ""
    return "its history can't be read" if source.replays["failed"] else "it has no replay: its past is not known"


def _unheard(source: SourceStats, patience_s: float) -> str:
    detail = f": {source.detail}" if source.detail else ""
    return f"{_UNHEARD} within {patience_s:g} s: {source.state.value}{detail}"


def _ranks(
    target: str,
    found: Sequence[Match],
    views: Sequence[IndexView],
    told: Mapping[tuple[str, int | None], str],
    wanted: Sequence[int],
) -> list[dict[str, Any]]:
    """A record for each rank of a worker, the one that holds most first."""
    matches = {match.rank: match for match in found if match.worker == target}
    seen = {view.rank: view for view in views if view.worker == target}
    silent = [rank for name, rank in told if name == target and rank not in seen and not (rank is None and seen)]
    records = [_rank(rank, matches.get(rank), view, told.get((target, rank), "")) for rank, view in seen.items()]
    records += [_rank(rank, None, None, told[target, rank]) for rank in silent]
    records = [record for record in records if not wanted or record["rank"] is None or record["rank"] in wanted]
    return sorted(records, key=lambda record: (-record["tokens"], -1 if record["rank"] is None else record["rank"]))


def _rank(rank: int | None, match: Match | None, view: IndexView | None, why: str) -> dict[str, Any]:
    media = match.by_medium.items() if match is not None else ()
    return {
        "rank": rank,
        "tokens": match.tokens if match is not None else 0,
        "blocks": match.blocks if match is not None else 0,
        "by_medium": {medium or "unknown": {"blocks": run.blocks, "tokens": run.tokens} for medium, run in media},
        # A publisher that has told all, and had nothing to tell, has an empty cache.
        "complete": not why if view is None else view.complete and not why,
        "why": why or _hole(view),
        "blocks_held": sum(view.blocks.values()) if view is not None else 0,
    }


def _hole(view: IndexView | None) -> str:
    if view is None or view.complete:
        return ""
    if view.lost_batches:
        return f"{view.lost_batches} batches are lost"
    if view.unreadable_events:
        return f"{view.unreadable_events} events can't be read"
    return f"the view begins at batch {view.since_seq}"


def _ids(tokens: str | None, text: str | None, tokenizer: str | None, *, special: bool) -> list[int]:
    if (tokens is None) == (text is None):
        raise click.UsageError("give the prompt: --tokens IDS, or --text TEXT with --tokenizer FILE")
    if tokens is not None:
        ids = _numbers(_said(tokens))
    elif tokenizer is None:
        raise click.UsageError("--text needs the model's tokenizer: give --tokenizer FILE, or token ids with --tokens")
    else:
        ids = _encoded(_said(text or ""), tokenizer, special=special)
    if not ids:
        raise click.UsageError("the prompt is empty")
    return ids


def _said(value: str) -> str:
    if value != "-":
        return value
    if sys.stdin is None:
        raise click.UsageError("standard input is closed, and the prompt was to come from there")
    return sys.stdin.read()


def _numbers(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip().strip("[]").strip())
    if not all(word.isascii() and word.isdigit() for word in words if word):
        raise click.UsageError("--tokens: give token ids, whole numbers between commas or spaces")
    return [int(word) for word in words if word]


def _encoded(text: str, path: str, *, special: bool) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise click.UsageError("--text needs a library that is not here: pip install tokenizers") from None
    try:
        # Whatever is wrong with a file, this library raises plain Exception.
        made = Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001
        raise click.UsageError(f"--tokenizer: {path!r} can't be used: {error}") from None
    ids: list[int] = made.encode(text, add_special_tokens=special).ids
    return ids
