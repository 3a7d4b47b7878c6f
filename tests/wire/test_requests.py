"""Requests: arguments become exactly these bytes, and what cannot be meant is refused before it is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.raw import field, message, packed, read
from vllm_cp import PauseMode, _rpc, _wire

EMPTY_ID = "a request id is empty: the server would ignore it without a word"
TEXT = st.text(max_size=10)
NAMES = st.text(min_size=1, max_size=10)
UNICODE = ["請求", "🙂", "e\u0301", "a\x00b", "ünïcødé"]


@pytest.mark.parametrize(
    ("made", "data"),
    [
        (_wire.health_request(""), b""),
        (_wire.health_request("vllm.Control"), b"\x0a\x0cvllm.Control"),
        (_wire.abort_request(["a", "bc"]), b"\x0a\x01a\x0a\x02bc"),
        (_wire.abort_request([]), b""),
        (_wire.pause_request(PauseMode.ABORT, True), b"\x08\x01\x10\x01"),
        (_wire.pause_request(PauseMode.WAIT, False), b"\x08\x02\x10\x00"),
        (_wire.pause_request(PauseMode.KEEP, False), b"\x08\x03\x10\x00"),
        (_wire.sleep_request(1, PauseMode.ABORT), b"\x08\x01\x10\x01"),
        (_wire.sleep_request(0, PauseMode.WAIT), b"\x08\x00\x10\x02"),
        (_wire.wake_up_request(()), b""),
        (_wire.wake_up_request(("weights", "kv_cache")), b"\x0a\x07weights\x0a\x08kv_cache"),
        (_wire.load_lora_request("a", "/l"), b"\x0a\x01a\x12\x02/l"),
        (_wire.unload_lora_request("a"), b"\x0a\x01a"),
        (_wire.init_weight_transfer_request({"a": 1}), b'\x0a\x08{"a": 1}'),
        (_wire.update_weights_request({}), b"\x0a\x02{}"),
        (_wire.finish_weight_update_request(None), b""),
        (_wire.finish_weight_update_request(""), b"\x0a\x00"),
        (_wire.finish_weight_update_request("v2"), b"\x0a\x02v2"),
        (_wire.update_weight_version_request("v2"), b"\x0a\x02v2"),
        (
            _wire.generate_request("hi", 1, None),
            b"\x1a\x02hi" + field(8, b"\x08\x01\x30\x01") + field(9, b"\x28\x01"),
        ),
        (
            _wire.generate_request([300, 7], 16, "id"),
            b"\x0a\x02id"
            + field(4, field(1, packed([300, 7])))
            + field(8, b"\x08\x10\x30\x01")
            + field(9, b"\x28\x01"),
        ),
    ],
)
def test_arguments_become_these_bytes(made: bytes, data: bytes) -> None:
    """Each request is the bytes that the contract says, presence of every choice included."""
    assert made == data


@given(st.lists(NAMES, max_size=10))
def test_ids_arrive_unchanged(ids: list[str]) -> None:
    """Whatever an id is made of, the server gets that id, in order, repeated ones too."""
    assert read(_wire.abort_request(iter(ids))).get(1, []) == [i.encode() for i in ids]


@pytest.mark.parametrize("text", UNICODE)
def test_unicode_travels_as_it_is(text: str) -> None:
    """CJK, emoji, combining marks and a NUL arrive unchanged, in ids, names and prompts."""
    assert _wire.abort_request([text]) == field(1, text)
    assert _wire.unload_lora_request(text) == field(1, text)
    assert _wire.health_request(text) == field(1, text)
    assert read(_wire.generate_request(text, 1, text))[3] == [text.encode()]


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("service", _wire.health_request),
        ("request id", lambda text: _wire.abort_request(["ok", text])),
        ("request id", lambda text: _wire.generate_request("x", 1, text)),
        ("prompt", lambda text: _wire.generate_request(text, 1, None)),
        ("tag", lambda text: _wire.wake_up_request([text])),
        ("LoRA name", lambda text: _wire.load_lora_request(text, "/l")),
        ("LoRA path", lambda text: _wire.load_lora_request("a", text)),
        ("LoRA name", _wire.unload_lora_request),
        ("weight version", _wire.finish_weight_update_request),
        ("weight version", _wire.update_weight_version_request),
    ],
)
def test_text_that_cannot_travel_is_refused(what: str, make: Callable[[str], bytes]) -> None:
    """An argument with an invalid byte in it is a ValueError that names it, not a failure deep inside."""
    with pytest.raises(ValueError, match=r"is not valid Unicode text and cannot be sent$") as caught:
        make("req-\udcff")
    assert str(caught.value) == f"{what} 'req-\\udcff' is not valid Unicode text and cannot be sent"


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: _wire.abort_request("abc"), TypeError, "request_ids is one string: pass a list of ids, [request_id]"),
        (lambda: _wire.abort_request([""]), ValueError, EMPTY_ID),
        (lambda: _wire.wake_up_request("weights"), TypeError, "tags is one string: pass a list of tags, [tag]"),
        (lambda: _wire.sleep_request(-1, PauseMode.KEEP), ValueError, "the sleep level must be 0 or more, not -1"),
        (lambda: _wire.generate_request("x", 0, None), ValueError, "max_tokens must be 1 or more, not 0"),
        (lambda: _wire.pause_request("stop", True), ValueError, "'stop' is not a valid PauseMode"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(make: Callable[[], bytes], kind: type[Exception], said: str) -> None:
    """An argument that the server would silently take for something else never leaves."""
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == said


def test_modes_may_be_words() -> None:
    """A mode is taken as the enum or as its word."""
    word: Any = "keep"
    assert _wire.pause_request(word, True) == _wire.pause_request(PauseMode.KEEP, True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(TEXT, JSON, max_size=3))
def test_weight_transfer_travels_as_json(info: dict[str, Any]) -> None:
    """What weight transfer is told arrives as the JSON that means the same."""
    for make in (_wire.init_weight_transfer_request, _wire.update_weights_request):
        (body,) = read(make(info)).get(1, [b"{}"])
        assert isinstance(body, bytes)
        assert json.loads(body) == info


def test_json_that_is_none_is_refused() -> None:
    """NaN is no JSON, and other parsers choke on it."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        _wire.update_weights_request({"scale": float("nan")})


@given(
    NAMES | st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=10), st.integers(1, 2**32 - 1), st.none() | NAMES
)
def test_any_generation(prompt: str | list[int], max_tokens: int, request_id: str | None) -> None:
    """A generation carries the prompt as text or as ids, its limit and its id, and asks for token ids back."""
    fields = read(_wire.generate_request(prompt, max_tokens, request_id))
    assert fields.get(1, [b""]) == [(request_id or "").encode()]
    if isinstance(prompt, str):
        assert fields[3] == [prompt.encode()]
    else:
        assert fields[4] == [field(1, packed(prompt))]
    assert fields[8] == [message({1: max_tokens, 6: 1})]
    assert fields[9] == [field(5, 1)]


CALLS: list[tuple[_rpc.Call[Any], str, bool, str]] = [
    (_rpc.check("x"), "/grpc.health.v1.Health/Check", True, "0.27"),
    (_rpc.watch("x"), "/grpc.health.v1.Health/Watch", True, "0.27"),
    (_rpc.server_info(), "/vllm.Control/GetServerInfo", True, "0.27"),
    (_rpc.model_info(), "/vllm.Control/GetModelInfo", True, "0.27"),
    (_rpc.kv_event_sources("h"), "/vllm.Control/GetKvEventSources", True, "0.27"),
    (_rpc.abort(["a"]), "/vllm.Control/Abort", False, "0.27"),
    (_rpc.is_paused(), "/vllm.Control/IsPaused", True, "0.28"),
    (_rpc.is_sleeping(), "/vllm.Control/IsSleeping", True, "0.28"),
    (_rpc.weight_version(), "/vllm.Control/GetWeightVersion", True, "0.28"),
    (_rpc.pause(PauseMode.KEEP, False), "/vllm.Control/PauseGeneration", False, "0.28"),
    (_rpc.resume(), "/vllm.Control/ResumeGeneration", False, "0.28"),
    (_rpc.sleep(1, PauseMode.WAIT), "/vllm.Control/Sleep", False, "0.28"),
    (_rpc.wake_up(["weights"]), "/vllm.Control/WakeUp", False, "0.28"),
    (_rpc.init_weight_transfer_engine({}), "/vllm.Control/InitWeightTransferEngine", False, "0.28"),
    (_rpc.start_weight_update(), "/vllm.Control/StartWeightUpdate", False, "0.28"),
    (_rpc.start_draft_weight_update(), "/vllm.Control/StartDraftWeightUpdate", False, "0.28"),
    (_rpc.update_weights({}), "/vllm.Control/UpdateWeights", False, "0.28"),
    (_rpc.finish_weight_update(None), "/vllm.Control/FinishWeightUpdate", False, "0.28"),
    (_rpc.update_weight_version("v"), "/vllm.Control/UpdateWeightVersion", False, "0.28"),
    (_rpc.list_loras(), "/vllm.Control/ListLoras", True, "0.29"),
    (_rpc.load_lora("a", "/l"), "/vllm.Control/LoadLora", False, "0.29"),
    (_rpc.unload_lora("a"), "/vllm.Control/UnloadLora", False, "0.29"),
    (_rpc.shutdown(), "/vllm.Control/Shutdown", False, "0.32"),
    (_rpc.generate("x", 1, None), "/vllm.Inference/Generate", False, "0.27"),
]


@pytest.mark.parametrize(("call", "path", "safe", "since"), CALLS, ids=[path for _, path, _, _ in CALLS])
def test_every_call_has_its_path(call: _rpc.Call[Any], path: str, safe: bool, since: str) -> None:
    """Calls go to the server's own names, know the version that brought them, and only reads are safe to repeat."""
    assert (call.path, call.safe, call.since) == (path, safe, since)
    assert call.method == path.rpartition(".")[2].replace("/", ".")
