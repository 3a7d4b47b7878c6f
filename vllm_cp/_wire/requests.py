"""Requests: ending them, and one of our own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_cp._proto import control_pb2 as control
from vllm_cp._proto import inference_pb2 as inference
from vllm_cp._wire import text
from vllm_cp._wire.messages import read
from vllm_cp.models.generated import FinishReason, Generated

__all__: list[str] = []

_FINISH = {
    inference.FinishInfo.NOT_FINISHED: FinishReason.NOT_FINISHED,
    inference.FinishInfo.LENGTH: FinishReason.LENGTH,
    inference.FinishInfo.STOP: FinishReason.STOP,
    inference.FinishInfo.ABORTED: FinishReason.ABORTED,
}


def abort_request(request_ids: Iterable[str]) -> bytes:
    if isinstance(request_ids, str):
        raise TypeError("request_ids is one string: pass a list of ids, [request_id]")
    ids = list(request_ids)
    if not all(ids):
        raise ValueError("a request id is empty: the server would ignore it without a word")
    return control.AbortRequest(request_ids=[text("request id", i) for i in ids]).SerializeToString()


def generate_request(prompt: str | Sequence[int], max_tokens: int, request_id: str | None) -> bytes:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more, not {max_tokens}")
    m = inference.GenerateRequest(request_id=text("request id", request_id or ""))
    if isinstance(prompt, str):
        m.text = text("prompt", prompt)
    else:
        m.token_ids.ids.extend(prompt)
    m.stopping.max_new_tokens = max_tokens
    m.stopping.ignore_eos = True
    m.response.output_token_ids = True
    return m.SerializeToString()


def generated(data: bytes) -> Generated:
    m = read(inference.GenerateResponse, data)
    finish = m.outputs.finish_info if m.outputs.HasField("finish_info") else None
    return Generated(
        text=m.outputs.text,
        token_ids=tuple(m.outputs.token_ids),
        finish_reason=FinishReason.NOT_FINISHED
        if finish is None
        else _FINISH.get(finish.finish_reason, FinishReason.UNKNOWN),
        prompt_tokens=m.prompt_info.num_prompt_tokens if m.HasField("prompt_info") else None,
        output_tokens=finish.num_output_tokens if finish is not None else None,
    )
