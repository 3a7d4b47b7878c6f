"""The client of the command line: the SDK's, that also remembers what the health service last failed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm_cp.client import ControlClient
from vllm_cp.errors import ControlError

if TYPE_CHECKING:
    from vllm_cp._rpc import Call
    from vllm_cp.cli._talk import Wire
    from vllm_cp.config import Connection
    from vllm_cp.models.rpc import RpcRecord

__all__ = ["Client"]

T = TypeVar("T")


class Client(ControlClient):
    """A synchronous client of one worker."""

    def __init__(
        self,
        connection: Connection,
        /,
        *,
        on_rpc: Callable[[RpcRecord], None] | None = None,
        wire: Callable[[Connection], Wire] | None = None,
    ) -> None:
        super().__init__(connection, on_rpc=on_rpc)
        #: The error of the last Check, with all that was found out about it; ``None`` when it was answered.
        self.unheard: ControlError | None = None
        self._wire = wire(connection) if wire is not None else None
        self._timeout_s = connection.timeout_s

    def _run(self, call: Call[T], timeout_s: float | None, rank: int | None) -> T:
        if self._wire is not None:
            call = self._wire.traced(call, self._timeout_s if timeout_s is None else timeout_s)
        check = call.method == "Health.Check"
        try:
            answer = super()._run(call, timeout_s, rank)
        except ControlError as error:
            if check:
                self.unheard = error
            raise
        if check:
            self.unheard = None
        return answer
