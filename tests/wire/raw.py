"""A protobuf writer and reader of a few lines, so that the generated code is not its own judge."""

from __future__ import annotations

from collections.abc import Iterable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """An unsigned number, seven bits a byte; a negative one is written in 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | str | bytes) -> bytes:
    """One field, written even when it is zero or empty."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def message(fields: dict[int, int | str | bytes | None]) -> bytes:
    """A message of fields in the order given; a ``None`` is left out."""
    return b"".join(field(number, value) for number, value in fields.items() if value is not None)


def packed(numbers: Iterable[int]) -> bytes:
    """The body of a packed field of numbers."""
    return b"".join(map(varint, numbers))


def unknown(number: int) -> bytes:
    """Fields that nobody knows, one of each wire type."""
    return (
        field(number, 7)
        + varint(number + 1 << 3 | FIXED64)
        + b"\xff" * 8
        + field(number + 2, b"\x00\xff")
        + varint(number + 3 << 3 | FIXED32)
        + b"\xff" * 4
    )


def read(data: bytes) -> dict[int, list[int | bytes]]:
    """The fields of a message, by number, in the order of their coming."""
    fields: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: int | bytes
        if key & 7 == VARINT:
            value, at = _varint(data, at)
        else:
            assert key & 7 == BYTES, key
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
