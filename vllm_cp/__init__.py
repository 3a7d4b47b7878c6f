"""vllm-cp: typed access to the gRPC control plane of vLLM workers.

    from vllm_cp import ControlClient

    with ControlClient("worker-0:8001") as worker:
        print(worker.server_info().total_kv_blocks)

Names load when they are first used, so importing this package is cheap and does nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vllm_cp.aio import AsyncControlClient as AsyncControlClient
    from vllm_cp.client import ControlClient as ControlClient
    from vllm_cp.config import Connection as Connection
    from vllm_cp.config import Retry as Retry
    from vllm_cp.config import Tls as Tls
    from vllm_cp.engine_page import read_page as read_page
    from vllm_cp.engine_page import read_page_async as read_page_async
    from vllm_cp.errors import ClientClosed as ClientClosed
    from vllm_cp.errors import ConfigError as ConfigError
    from vllm_cp.errors import ControlError as ControlError
    from vllm_cp.errors import CredentialsRejected as CredentialsRejected
    from vllm_cp.errors import EngineFailed as EngineFailed
    from vllm_cp.errors import ForkedClient as ForkedClient
    from vllm_cp.errors import InvalidArgument as InvalidArgument
    from vllm_cp.errors import NotAdmitting as NotAdmitting
    from vllm_cp.errors import NotFound as NotFound
    from vllm_cp.errors import NotSupported as NotSupported
    from vllm_cp.errors import OutOfTime as OutOfTime
    from vllm_cp.errors import PreconditionFailed as PreconditionFailed
    from vllm_cp.errors import RanksDisagree as RanksDisagree
    from vllm_cp.errors import Refused as Refused
    from vllm_cp.errors import TlsFailed as TlsFailed
    from vllm_cp.errors import TooLarge as TooLarge
    from vllm_cp.errors import WorkerUnreachable as WorkerUnreachable
    from vllm_cp.faults import AsyncFaultTolerance as AsyncFaultTolerance
    from vllm_cp.faults import FaultTolerance as FaultTolerance
    from vllm_cp.faults import HttpConnection as HttpConnection
    from vllm_cp.faults import recover as recover
    from vllm_cp.faults import recover_async as recover_async
    from vllm_cp.fleet import AsyncFleet as AsyncFleet
    from vllm_cp.fleet import Fleet as Fleet
    from vllm_cp.models.fault_status import FaultStatus as FaultStatus
    from vllm_cp.models.generated import FinishReason as FinishReason
    from vllm_cp.models.generated import Generated as Generated
    from vllm_cp.models.health import HealthStatus as HealthStatus
    from vllm_cp.models.kv_source import Address as Address
    from vllm_cp.models.kv_source import KvEventSource as KvEventSource
    from vllm_cp.models.ladder import Reason as Reason
    from vllm_cp.models.ladder import Rung as Rung
    from vllm_cp.models.ladder import Rungs as Rungs
    from vllm_cp.models.lora import LoraAdapter as LoraAdapter
    from vllm_cp.models.model import ModelInfo as ModelInfo
    from vllm_cp.models.outcome import Outcome as Outcome
    from vllm_cp.models.pause import PauseMode as PauseMode
    from vllm_cp.models.recovery import RankRecovery as RankRecovery
    from vllm_cp.models.recovery import RecoveryOutcome as RecoveryOutcome
    from vllm_cp.models.rpc import RpcRecord as RpcRecord
    from vllm_cp.models.scaling import ScalingState as ScalingState
    from vllm_cp.models.server import Parallelism as Parallelism
    from vllm_cp.models.server import RlCapabilities as RlCapabilities
    from vllm_cp.models.server import ServerInfo as ServerInfo
    from vllm_cp.readiness import AsyncLadder as AsyncLadder
    from vllm_cp.readiness import Ladder as Ladder

_HOMES = {
    "vllm_cp.aio": ("AsyncControlClient",),
    "vllm_cp.client": ("ControlClient",),
    "vllm_cp.config": (
        "Connection",
        "Retry",
        "Tls",
    ),
    "vllm_cp.engine_page": (
        "read_page",
        "read_page_async",
    ),
    "vllm_cp.errors": (
        "ClientClosed",
        "ConfigError",
        "ControlError",
        "CredentialsRejected",
        "EngineFailed",
        "ForkedClient",
        "InvalidArgument",
        "NotAdmitting",
        "NotFound",
        "NotSupported",
        "OutOfTime",
        "PreconditionFailed",
        "RanksDisagree",
        "Refused",
        "TlsFailed",
        "TooLarge",
        "WorkerUnreachable",
    ),
    "vllm_cp.faults": (
        "AsyncFaultTolerance",
        "FaultTolerance",
        "HttpConnection",
        "recover",
        "recover_async",
    ),
    "vllm_cp.fleet": (
        "AsyncFleet",
        "Fleet",
    ),
    "vllm_cp.models.fault_status": ("FaultStatus",),
    "vllm_cp.models.generated": (
        "FinishReason",
        "Generated",
    ),
    "vllm_cp.models.health": ("HealthStatus",),
    "vllm_cp.models.kv_source": (
        "Address",
        "KvEventSource",
    ),
    "vllm_cp.models.ladder": (
        "Reason",
        "Rung",
        "Rungs",
    ),
    "vllm_cp.models.lora": ("LoraAdapter",),
    "vllm_cp.models.model": ("ModelInfo",),
    "vllm_cp.models.outcome": ("Outcome",),
    "vllm_cp.models.pause": ("PauseMode",),
    "vllm_cp.models.recovery": (
        "RankRecovery",
        "RecoveryOutcome",
    ),
    "vllm_cp.models.rpc": ("RpcRecord",),
    "vllm_cp.models.scaling": ("ScalingState",),
    "vllm_cp.models.server": (
        "Parallelism",
        "RlCapabilities",
        "ServerInfo",
    ),
    "vllm_cp.readiness": (
        "AsyncLadder",
        "Ladder",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Address",
    "AsyncControlClient",
    "AsyncFaultTolerance",
    "AsyncFleet",
    "AsyncLadder",
    "ClientClosed",
    "ConfigError",
    "Connection",
    "ControlClient",
    "ControlError",
    "CredentialsRejected",
    "EngineFailed",
    "FaultStatus",
    "FaultTolerance",
    "FinishReason",
    "Fleet",
    "ForkedClient",
    "Generated",
    "HealthStatus",
    "HttpConnection",
    "InvalidArgument",
    "KvEventSource",
    "Ladder",
    "LoraAdapter",
    "ModelInfo",
    "NotAdmitting",
    "NotFound",
    "NotSupported",
    "OutOfTime",
    "Outcome",
    "Parallelism",
    "PauseMode",
    "PreconditionFailed",
    "RankRecovery",
    "RanksDisagree",
    "Reason",
    "RecoveryOutcome",
    "Refused",
    "Retry",
    "RlCapabilities",
    "RpcRecord",
    "Rung",
    "Rungs",
    "ScalingState",
    "ServerInfo",
    "Tls",
    "TlsFailed",
    "TooLarge",
    "WorkerUnreachable",
    "__version__",
    "read_page",
    "read_page_async",
    "recover",
    "recover_async",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
