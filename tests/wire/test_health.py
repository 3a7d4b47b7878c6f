"""The health messages, that are read and written by hand, against the generated code."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_cp import _wire
from vllm_cp._proto import health_pb2
from vllm_cp.models.health import HealthStatus

_NAMES = {number: name for name, number in health_pb2.HealthCheckResponse.ServingStatus.items()}


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
@example("")
@example("vllm.Inference")
@example("x" * 128)
def test_requests_are_those_of_the_generated_code(service: str) -> None:
    """Whatever the name of the service, the bytes are the same."""
    assert _wire.health_request(service) == health_pb2.HealthCheckRequest(service=service).SerializeToString()


@given(st.binary(max_size=40))
@example(b"")
@example(b"\x08\x01")
@example(b"\x08\x01\x08\x02")
@example(b"\x12\x03abc\x08\x03")
@example(b"\x08\x81\x80\x80\x80\x10")
@example(b"\x08")
@example(b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x12\x05abc")
@example(b"\x00\x01")
@example(b"\x0e")
def test_answers_are_read_as_by_the_generated_code(data: bytes) -> None:
    """Where the generated code reads a status it is that one; what it refuses is refused or unknown, never a crash."""
    message = health_pb2.HealthCheckResponse()
    try:
        message.ParseFromString(data)
    except DecodeError:
        message = None  # type: ignore[assignment]
    try:
        status = _wire.health_status(data)
    except _wire.UndecodableError:
        # Groups are the one thing that it skips and we don't: nobody has sent one since 2008.
        assert message is None or any(byte & 7 in (3, 4) for byte in data)
        return
    if message is not None:
        assert status is HealthStatus(_NAMES.get(message.status, "UNKNOWN"))


@pytest.mark.parametrize("number", [4, 17, 2**31, 2**64 - 1])
def test_a_status_of_tomorrow_is_unknown(number: int) -> None:
    """A number that has no name here is no error."""
    data = b"\x08" + bytes([*((number >> shift & 0x7F | 0x80) for shift in range(0, 63, 7)), number >> 63])
    assert _wire.health_status(data) is HealthStatus.UNKNOWN
