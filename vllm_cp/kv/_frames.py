"""What the frames of a message mean."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_cp.kv.decoding import DecodeFailure
from vllm_cp.kv.events import DecodeReason

__all__ = ["END_OF_REPLAY", "live_parts", "replay_parts", "replay_request"]

#: The sequence number, -1 as unsigned 64 bits, that ends a replay.
END_OF_REPLAY = 2**64 - 1
#: No publisher gets this far in a lifetime, so a higher number is damage and not a gap.
_HIGHEST = 2**60


def live_parts(frames: Sequence[bytes]) -> tuple[int, bytes] | DecodeFailure:
    """Sequence number and payload of a live message: topic, sequence (8 bytes, big-endian), payload."""
    if len(frames) != 3:
        return DecodeFailure(DecodeReason.FRAMES, f"{len(frames)} frames, not 3")
    seq = _number(frames[1])
    if seq == END_OF_REPLAY:
        return DecodeFailure(DecodeReason.RESERVED, "the end marker of a replay in the live stream")
    return seq if isinstance(seq, DecodeFailure) else (seq, frames[2])


def replay_parts(frames: Sequence[bytes]) -> tuple[int, bytes] | DecodeFailure:
    """The same for a message of a replay: delimiter, topic (not on older servers), sequence, payload."""
    if not 2 <= len(frames) <= 4:
        return DecodeFailure(DecodeReason.FRAMES, f"{len(frames)} frames, not 3 or 4")
    seq = _number(frames[-2])
    return seq if isinstance(seq, DecodeFailure) else (seq, frames[-1])


def replay_request(start: int) -> list[bytes]:
    """The request for everything from number ``start`` on. Malformed ones get no answer at all."""
    return [b"", start.to_bytes(8, "big")]


def _number(frame: bytes) -> int | DecodeFailure:
    if len(frame) != 8:
        return DecodeFailure(DecodeReason.SEQUENCE, f"a sequence frame of {len(frame)} bytes, not 8")
    seq = int.from_bytes(frame, "big")
    if seq > _HIGHEST and seq != END_OF_REPLAY:
        return DecodeFailure(DecodeReason.SEQUENCE, f"sequence number {seq} is beyond reach")
    return seq
