"""``kv match``: which worker holds the start of a prompt, and how well that is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.held import FORMATS, held
from vllm_cp.cli import _output
from vllm_cp.testing import FakeKvPublisher, FakeWorker

TOKENS = ",".join(map(str, range(70)))


@contextmanager
def _three() -> Iterator[list[FakeWorker]]:
    """Two workers that hold different parts of a prompt, one of them in two ranks, and one without events."""
    with (
        FakeKvPublisher(rank=0) as much,
        FakeKvPublisher(rank=1, replay=False) as nothing,
        FakeKvPublisher(rank=0) as some,
        FakeWorker(kv_sources=[some.source]) as second,
        FakeWorker(kv_sources=[much.source, nothing.source]) as first,
        FakeWorker() as off,
    ):
        much.store(range(64))
        much.store(range(64), lora="sql")
        some.store(range(32))
        yield [second, first, off]


def test_match_is_as_written_down(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each format and on 80 columns: who holds most comes first, and what is not known of a rank is said."""
    with _three() as workers:
        targets = [part for worker in workers for part in ("--target", worker.target)]
        for output in (*FORMATS, "80"):
            if output == "80":
                monkeypatch.setattr(_output, "terminal_width", lambda: 80)
            flags = () if output == "80" else ("-o", output)
            got = cli("kv", "match", "--tokens", TOKENS, *targets, *flags)
            out, err = got.out, got.err
            for number, worker in enumerate(workers):
                out, err = (text.replace(worker.target, f"127.0.0.1:{11111 * (number + 1)}") for text in (out, err))
            if output != "80":
                held(f"kv-match.{output}", out)
            assert got.code == 6
            assert output != "80" or max(map(len, got.out.splitlines())) <= 80
        held("kv-match.talk", err)


def test_match(kv: FakeKvPublisher, publishing: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """Adapters are told apart, other prompts hold nothing, a lost past is no complete view."""

    def matched(*flags: str) -> dict[str, Any]:
        got = cli("kv", "match", "--target", publishing.target, "-o", "json", *flags)
        assert got.code == 0
        (row,) = json.loads(got.out)
        (rank,) = row["ranks"]
        return dict(rank)

    kv.store(range(64), lora="sql")
    assert matched("--tokens", TOKENS)["tokens"] == 0
    assert matched("--tokens", TOKENS, "--lora", "sql")["tokens"] == 64
    assert matched("--tokens", "[1, 2, 3]")["tokens"] == 0
    assert matched("--tokens", TOKENS)["complete"] is True
    kv.forget()
    kv.store(range(200, 216))
    rank = matched("--tokens", TOKENS)
    assert (rank["complete"], rank["why"] != "") == (False, True)


def test_match_of_text(kv: FakeKvPublisher, publishing: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """Text becomes the token ids of a local tokenizer file."""
    pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(64)}
    document = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    full = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**full, **document, "post_processor": None, "decoder": None}))
    kv.store(range(32))
    flags = ("--target", publishing.target, "--tokenizer", str(file), "-o", "json")
    got = cli("kv", "match", "--text", " ".join(words), *flags)
    assert json.loads(got.out)[0]["prompt_tokens"] == 64
    assert json.loads(got.out)[0]["ranks"][0]["tokens"] == 32
