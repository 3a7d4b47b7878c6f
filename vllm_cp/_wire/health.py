"""The health service, without the generated code: two fields, and what asks for them must start at once.

A test holds it to the generated code.
"""

from __future__ import annotations

from vllm_cp._wire import UndecodableError, text
from vllm_cp.models.health import HealthStatus

__all__: list[str] = []

#: By number: ``ServingStatus`` of ``grpc.health.v1``.
_STATUSES = (
    HealthStatus.UNKNOWN,
    HealthStatus.SERVING,
    HealthStatus.NOT_SERVING,
    HealthStatus.SERVICE_UNKNOWN,
)
#: Field 1: of the request, as bytes; of the answer, as a number.
_SERVICE, _STATUS = 0x0A, 0x08
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5


def health_request(service: str) -> bytes:
    name = text("service", service).encode()
    return bytes([_SERVICE]) + _varint(len(name)) + name if name else b""


def health_status(data: bytes) -> HealthStatus:
    status = at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if tag < 8:
            raise UndecodableError("a field without a number")
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            status = value if tag == _STATUS else status
        elif kind == _SIZED:
            size, at = _read_varint(data, at)
            at += size
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        else:
            raise UndecodableError(f"a field of the unknown kind {kind}")
    if at > len(data):
        raise UndecodableError("it ends within a field")
    # An enum is 32 bits wide, whatever is sent.
    status &= 0xFFFFFFFF
    return _STATUSES[status] if status < len(_STATUSES) else HealthStatus.UNKNOWN


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise UndecodableError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise UndecodableError("a number that has no end")
