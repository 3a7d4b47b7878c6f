"""The RPCs of vllm.Inference, as a fake worker answers them."""

from __future__ import annotations

from asyncio import Future
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from vllm_cp._proto import inference_pb2 as inference
from vllm_cp.testing._bell import Refusal
from vllm_cp.testing._calls import Call, read
from vllm_cp.testing._engine import Request

if TYPE_CHECKING:
    from vllm_cp.testing._frontend import Frontend

__all__ = ["generate", "generate_stream"]

#: Token ids of the real lab tokenizer: one byte each, printable.
_FIRST_ID, _LETTERS = 36, "abcdefghijklmnopqrstuvwxyz"


async def generate(front: Frontend, call: Call) -> None:
    """One answer when it is done; an aborted one holds what there was."""
    asked = read(inference.GenerateRequest, call.request)
    request, prompt_tokens, rank = _accept(front, call, asked)
    aborted = await front.engines.run(request, rank, front.facts.token_interval_s)
    answer = inference.GenerateResponse(outputs=_piece(asked, 0, request.made))
    answer.prompt_info.num_prompt_tokens = prompt_tokens
    _finish(answer, request, aborted)
    await call.send(answer.SerializeToString())


async def generate_stream(front: Frontend, call: Call) -> None:
    """The prompt's size, then one message per token; the last one says why it ended."""
    asked = read(inference.GenerateRequest, call.request)
    request, prompt_tokens, rank = _accept(front, call, asked)
    head = inference.GenerateResponse()
    head.prompt_info.num_prompt_tokens = prompt_tokens
    await call.send(head.SerializeToString())
    done = front.in_background(front.engines.run(request, rank, front.facts.token_interval_s))
    sent = 0
    try:
        while True:
            await front.bell.until(partial(_further, done, request, sent))
            over = done.done() and sent + 1 >= request.made
            answer = inference.GenerateResponse(outputs=_piece(asked, sent, min(sent + 1, request.made)))
            if over:
                _finish(answer, request, done.result())
            sent += 1
            await call.send(answer.SerializeToString())
            if over:
                return
    finally:
        done.cancel()


def _further(done: Future[bool], request: Request, sent: int) -> bool:
    return done.done() or request.made > sent


def _accept(front: Frontend, call: Call, asked: inference.GenerateRequest) -> tuple[Request, int, int | None]:
    names = (front.facts.model.served_model_name, *front.facts.model.served_model_aliases)
    if asked.model and asked.model not in names:
        raise Refusal("NOT_FOUND", f"model `{asked.model}` not found")
    request_id = asked.request_id or str(uuid4())
    prompt_tokens = _prompt_tokens(asked, request_id)
    room = front.facts.info.max_model_len or 2**31
    if prompt_tokens >= room:
        raise Refusal("INVALID_ARGUMENT", _too_long(front, room, prompt_tokens))
    limit = min(asked.stopping.max_new_tokens or room, room - prompt_tokens)
    return Request(request_id=request_id, limit=limit), prompt_tokens, _rank(front, call)


def _prompt_tokens(asked: inference.GenerateRequest, request_id: str) -> int:
    kind = asked.WhichOneof("prompt")
    if kind is None:
        raise Refusal("INVALID_ARGUMENT", "prompt is required")
    if kind == "text":
        if not asked.text:
            raise Refusal("INVALID_ARGUMENT", f"generate request `{request_id}` has an empty prompt_token_ids")
        return len(asked.text.encode())
    if not asked.token_ids.ids:
        detail = f"text request `{request_id}` must contain at least one prompt token ID"
        raise Refusal("INVALID_ARGUMENT", detail)
    return len(asked.token_ids.ids)


def _too_long(front: Frontend, room: int, prompt_tokens: int) -> str:
    if front.facts.version >= (0, 33):
        why = (
            f"contains {prompt_tokens} input tokens, which exceeds this limit even without any output tokens."
            if prompt_tokens > room
            else f"fills it with {prompt_tokens} input tokens, leaving no room for output tokens."
        )
        return (
            f"This model's maximum context length is {room} tokens. However, your prompt {why}"
            " Please reduce the length of the input prompt."
        )
    return f"this model's maximum context length is {room} tokens, but the prompt contains {prompt_tokens} input tokens"


def _rank(front: Frontend, call: Call) -> int | None:
    """The rank that the metadata names; 0.27 does not look."""
    said = next((value for key, value in call.metadata if key == "x-data-parallel-rank"), None)
    if said is None or front.facts.version < (0, 28):
        return None
    if not (said.isascii() and said.isdigit() and int(said) < 2**32):
        raise Refusal("INVALID_ARGUMENT", "x-data-parallel-rank metadata must be an unsigned 32-bit integer")
    if int(said) >= len(front.engines.ranks):
        ranks = [rank.number for rank in front.engines.ranks]
        raise Refusal(
            "INVALID_ARGUMENT",
            f"engine-core error: data parallel rank {said} is not connected to this frontend; connected ranks: {ranks}",
        )
    return int(said)


def _piece(asked: inference.GenerateRequest, start: int, end: int) -> inference.SequenceOutput:
    numbers = range(start, end)
    text = "".join(_LETTERS[n % len(_LETTERS)] for n in numbers)
    piece = inference.SequenceOutput(text=text, num_tokens=len(numbers))
    if asked.response.output_token_ids:
        piece.token_ids.extend(_FIRST_ID + n % len(_LETTERS) for n in numbers)
    return piece


def _finish(answer: inference.GenerateResponse, request: Request, aborted: bool) -> None:
    finish = answer.outputs.finish_info
    finish.num_output_tokens = request.made
    finish.finish_reason = inference.FinishInfo.ABORTED if aborted else inference.FinishInfo.LENGTH
