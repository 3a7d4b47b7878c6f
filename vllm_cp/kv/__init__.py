"""KV-cache events: read them without losing any silently, and know which worker holds a prefix.

    from vllm_cp import ControlClient
    from vllm_cp.kv import PrefixIndex, Subscriber

    index = PrefixIndex()
    with ControlClient("worker-0:8001") as client:
        with Subscriber(client.kv_event_sources(), refresh=client.kv_event_sources, worker="worker-0") as events:
            for item in events:
                index.apply(item)
                print(index.match(prompt_token_ids))

``Subscriber`` and ``AsyncSubscriber`` say what happened: a ``Batch`` of events, a ``Gap`` where batches are lost for
good, a ``Reset`` where all that was known is void. ``PrefixIndex`` turns that into "who holds the start of this
prompt". Needs the extra ``kv`` (pyzmq and msgspec); names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_cp.errors import ConfigError

if TYPE_CHECKING:
    from vllm_cp.kv.decoding import Decoded as Decoded
    from vllm_cp.kv.decoding import DecodeFailure as DecodeFailure
    from vllm_cp.kv.decoding import decode as decode
    from vllm_cp.kv.events import Batch as Batch
    from vllm_cp.kv.events import BlockHash as BlockHash
    from vllm_cp.kv.events import Cleared as Cleared
    from vllm_cp.kv.events import DecodeReason as DecodeReason
    from vllm_cp.kv.events import Event as Event
    from vllm_cp.kv.events import Removed as Removed
    from vllm_cp.kv.events import SourceId as SourceId
    from vllm_cp.kv.events import Stored as Stored
    from vllm_cp.kv.events import Unknown as Unknown
    from vllm_cp.kv.index import Match as Match
    from vllm_cp.kv.index import OnLoss as OnLoss
    from vllm_cp.kv.index import PrefixIndex as PrefixIndex
    from vllm_cp.kv.index import Run as Run
    from vllm_cp.kv.index import View as View
    from vllm_cp.kv.settings import Settings as Settings
    from vllm_cp.kv.stream import Gap as Gap
    from vllm_cp.kv.stream import GapReason as GapReason
    from vllm_cp.kv.stream import Item as Item
    from vllm_cp.kv.stream import Notice as Notice
    from vllm_cp.kv.stream import NoticeKind as NoticeKind
    from vllm_cp.kv.stream import Reset as Reset
    from vllm_cp.kv.stream import ResetReason as ResetReason
    from vllm_cp.kv.stream import SourceState as SourceState
    from vllm_cp.kv.stream import SourceStats as SourceStats
    from vllm_cp.kv.stream import StateChange as StateChange
    from vllm_cp.kv.stream import SubscriberStats as SubscriberStats
    from vllm_cp.kv.subscriber import AsyncSubscriber as AsyncSubscriber
    from vllm_cp.kv.subscriber import Subscriber as Subscriber

_HOMES = {
    "decoding": ("DecodeFailure", "Decoded", "decode"),
    "events": (
        "Batch",
        "BlockHash",
        "Cleared",
        "DecodeReason",
        "Event",
        "Removed",
        "SourceId",
        "Stored",
        "Unknown",
    ),
    "index": ("Match", "OnLoss", "PrefixIndex", "Run", "View"),
    "settings": ("Settings",),
    "stream": (
        "Gap",
        "GapReason",
        "Item",
        "Notice",
        "NoticeKind",
        "Reset",
        "ResetReason",
        "SourceState",
        "SourceStats",
        "StateChange",
        "SubscriberStats",
    ),
    "subscriber": ("AsyncSubscriber", "Subscriber"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605  (a list; the linter does not see through sorted)

_MISSING = [name for name in ("msgspec", "zmq") if find_spec(name) is None]
if _MISSING:
    raise ConfigError(
        f'reading KV-cache events needs {" and ".join(_MISSING)}, which is not installed: pip install "vllm-cp[kv]"'
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
