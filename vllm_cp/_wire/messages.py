"""Reading any message of the generated code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from vllm_cp._wire import UndecodableError

__all__ = ["read"]

M = TypeVar("M", bound=Message)


def read(kind: Callable[[], M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise UndecodableError(str(error)) from None
    return message
