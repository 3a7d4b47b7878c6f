"""``vllm-cp probe``: one word and an exit code, for exec probes.

It runs every few seconds on every worker, so it starts as fast as it can: it loads gRPC, and neither protobuf nor the
SDK's client. The two messages it needs are short enough to read by hand.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit, exit_of
from vllm_cp.cli._flags import kept
from vllm_cp.cli._ladder import SERVICE_OPTION
from vllm_cp.cli._output import Report, render
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb

if TYPE_CHECKING:
    from vllm_cp.cli._talk import Wire
    from vllm_cp.config import Connection

__all__ = ["command"]

_DEFAULT_S = 1.0
_CHECK = "/grpc.health.v1.Health/Check"
_IS_PAUSED = "/vllm.Control/IsPaused"
#: Warm is left out: a probe that generates is a load of its own.
_RUNGS = ("reachable", "serving", "answering", "admitting")
_SERVING, _TRUE = b"\x08\x01", b"\x08\x01"
_VIEW = View((Column("TARGET", "target"), Column("WORD", "word"), Column("OK", "ok"), Column("RUNG", "rung")))


class _Said(NamedTuple):
    """What the probe found: its word, our exit code and that of grpc_health_probe."""

    word: str
    exit: Exit = Exit.OK
    theirs: int = 0
    remark: str = ""


class _ProbeVerb(Verb):
    """A verb whose usage errors have the other tool's code too, where that was asked for."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **settings: Any) -> click.Context:
        codes = "--grpc-health-probe-codes" in args
        try:
            return super().make_context(info_name, args, *rest, **settings)
        except click.UsageError as error:
            raise _theirs(error, codes) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            raise _theirs(error, ctx.params.get("codes")) from None


def _theirs(error: click.ClickException, codes: bool | None) -> click.ClickException:
    if not codes:
        return error
    # Usage there is 1, which is what a local error has here.
    return _context.LocalError(" ".join(error.format_message().split()))


@click.command(
    "probe",
    cls=_ProbeVerb,
    timeout_help="Longest wait in all. [default: 1]",
    examples="""
vllm-cp probe
vllm-cp probe --rung admitting --timeout 2
vllm-cp probe --service vllm.Inference --grpc-health-probe-codes
""",
)
@click.option("--rung", type=click.Choice(_RUNGS), default="serving", help="What must hold. [default: serving]")
@SERVICE_OPTION
@click.option(
    "--grpc-health-probe-codes",
    "codes",
    is_flag=True,
    help="Exit as grpc_health_probe does: 0 ok, 1 usage, 2 connection failed, 3 call failed or out of time,"
    " 4 unhealthy.",
)
def command(rung: str, service: str, codes: bool) -> int:
    """One word about one worker, and an exit code: for exec probes.

    The word is the rung that holds, or why it does not: unreachable, not_serving, engine_silent, engine_error,
    ranks_disagree, suspended, denied, failed. serving costs one call to the server; answering and admitting ask every
    engine too, which a busy fleet may fail, so neither is for a liveness probe: Kubernetes' own grpc probe is. vLLM
    0.27 can't be asked beyond serving, and is not failed for that. Nothing is asked twice.
    """
    deadline_s = _context.whole_timeout(_DEFAULT_S)
    connections = _context.connections(at_most_s=deadline_s)
    if len(connections) != 1:
        raise click.UsageError("a probe is of one worker: give one --target")
    shape = _context.shape(_VIEW)
    connection = connections[0]
    said = _probe(connection, rung, service, time.monotonic() + deadline_s)
    if shape.output == "table" and shape.columns is None:
        _stdio.emit(f"{said.word}\n")
    else:
        record = {"ok": said.exit is Exit.OK, "word": said.word, "rung": rung}
        _stdio.emit(render([Report(connection.address.name, said.exit, record)], _VIEW, shape))
    if said.remark:
        _stdio.say(said.remark)
    return said.theirs if codes else said.exit


def _probe(connection: Connection, rung: str, service: str, deadline: float) -> _Said:
    from vllm_cp import errors

    calls = _Calls(connection, deadline)
    try:
        said = _checked(calls, rung, service)
        if said is not None:
            return said
        try:
            paused = calls.ask(_IS_PAUSED, b"", "0.28") == _TRUE
        except errors.RanksDisagree as error:
            return _unhealthy("ranks_disagree", str(error)) if rung == "admitting" else _Said(rung)
        except errors.NotSupported as error:
            return _Said("serving", remark=f"{calls.target}: no more than 'serving' can be proved: {error.hint}")
        except errors.OutOfTime as error:
            return _unhealthy("engine_silent", str(error))
        except errors.EngineFailed as error:
            return _unhealthy("engine_error", str(error))
        if paused and rung == "admitting":
            return _unhealthy("suspended", f"{calls.target}: paused or asleep")
        return _Said(rung)
    except errors.ControlError as error:
        return _failed(error)
    finally:
        calls.close()


def _checked(calls: _Calls, rung: str, service: str) -> _Said | None:
    """What the health service settles; ``None`` where the engines have to be asked."""
    from vllm_cp import errors

    name = service.encode()
    try:
        request = b"\x0a" + _varint(len(name)) + name if name else b""
        serving = calls.ask(_CHECK, request, "0.27") == _SERVING
    except errors.NotFound as error:
        serving = False
        remark = str(error)
    except (errors.WorkerUnreachable, errors.OutOfTime):
        raise
    except errors.ControlError:
        if rung == "reachable":
            return _Said(rung)
        raise
    else:
        remark = f"{calls.target}: the server does not report SERVING"
    if rung == "reachable" or (rung == "serving" and serving):
        return _Said(rung)
    return None if serving else _unhealthy("not_serving", remark)


def _unhealthy(word: str, remark: str) -> _Said:
    return _Said(word, Exit.NOT_READY, 4, remark)


def _failed(error: Exception) -> _Said:
    from vllm_cp import errors

    code = exit_of(error)
    if isinstance(error, errors.WorkerUnreachable):
        return _Said("unreachable", code, 2, str(error))
    if isinstance(error, errors.OutOfTime):
        return _Said("unreachable", code, 3, str(error))
    return _Said("denied" if code is Exit.CREDENTIALS else "failed", code, 3, str(error))


class _Calls:
    """The calls of one probe, all inside one deadline, none of them repeated."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        from vllm_cp import _channel

        self.target = connection.address.name
        self._connection = connection
        self._deadline = deadline
        self._channel = _channel.channel(connection)
        self._metadata = _channel.call_metadata(connection)(None)
        self._verbose = bool(kept().get("verbose") or kept().get("debug"))
        self._wire: Wire | None = None
        if kept().get("debug"):
            from vllm_cp.cli._talk import Wire

            self._wire = Wire(connection)

    def close(self) -> None:
        self._channel.close()

    def ask(self, path: str, request: bytes, since: str) -> bytes:
        """The answer's bytes. Raises ControlError by meaning."""
        import grpc

        from vllm_cp import _channel, _status, errors

        method = path.rpartition(".")[2].replace("/", ".")
        began = time.monotonic()
        left = max(0.001, self._deadline - began)
        if self._wire is not None:
            self._wire.sent(path, request, left)
        try:
            answer: bytes = self._channel.unary_unary(path, None, None)(request, timeout=left, metadata=self._metadata)
        except grpc.RpcError as failed:
            # Every RpcError that a call raises is also a Call; the base class does not say so.
            code, detail = failed.code(), failed.details() or ""
            self._say(method, code.name, detail, began)
            error = _status.meaning(code, detail, target=self.target, method=method, since=since)
            if _status.tls_suspected(error):
                why = _channel.why_tls_fails(self._connection, max(0.001, self._deadline - time.monotonic()))
                if why is not None:
                    hint = _status.tls_hint(why) if self._connection.tls else "the port may speak TLS: give --tls-ca"
                    raise errors.TlsFailed(self.target, method, code.name, f"{detail} ({why})", hint) from None
            raise error from None
        self._say(method, "OK", "", began)
        if self._wire is not None:
            self._wire.got(path, answer)
        return answer

    def _say(self, method: str, code: str, detail: str, began: float) -> None:
        if self._verbose:
            from vllm_cp.cli._talk import said_call

            said_call(self.target, method, code, detail, elapsed_s=time.monotonic() - began)


def _varint(number: int) -> bytes:
    """A protobuf length."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])
