"""Text of unknown origin (B19): it arrives unchanged, and it never harms a terminal, a parser or an encoder."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Cli
from tests.cli.process import run
from vllm_cp.cli._stdio import encodable
from vllm_cp.cli._text import columns, cut, plain
from vllm_cp.cli._yaml import block_yaml
from vllm_cp.testing import FakeWorker

IDS = ("漢字", "😀-1", "e\u0301", "\u202etxt", "a\tb", "-dash", "'\"\\")
ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}
#: A C locale in which Python is kept from choosing UTF-8 by itself.
BARE = {**ASCII, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("env", [{}, ASCII, BARE], ids=["utf-8", "ascii", "bare"])
@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_ids_arrive_unchanged(env: dict[str, str], output: str, worker: FakeWorker) -> None:
    """Ids with CJK, emoji, combining marks and quotes reach the worker as they are, in any locale and format."""
    got = run("abort", "--target", worker.target, "-o", output, "--", *(i.encode() for i in IDS), env=env)
    assert (got.code, got.err) == (0, "")
    assert worker.calls[0].request_ids == IDS
    if output != "table":
        (row,) = (json.loads if output == "json" else yaml.safe_load)(got.out)
        assert row["request_ids"] == list(IDS)


@pytest.mark.parametrize("env", [{}, ASCII, BARE], ids=["utf-8", "ascii", "bare"])
def test_status_text_never_hides_the_code(env: dict[str, str], worker: FakeWorker) -> None:
    """A non-ASCII status text with control characters is shown or escaped, in one line beside its code."""
    worker.fail("GetServerInfo", "FAILED_PRECONDITION", "désolé 漢\n\x1b[2Jforged: line")
    got = run("info", "--target", worker.target, env=env)
    assert got.code == 5
    assert "(FAILED_PRECONDITION d" in got.err
    assert got.err.count("\n") == 1
    assert "\x1b" not in got.err
    assert "\\n\\x1b[2Jforged" in got.err


def test_server_text_in_a_table(worker: FakeWorker, cli: Cli) -> None:
    """A model name can't move the cursor, forge a row or turn the line around."""
    worker.set(served_model_name="evil\x1b[2J\nrow\u202e\x9b1m\x7f", model_id="a\rb")
    ended = cli("model", "--target", worker.target, "-o", "wide")
    assert len(ended.out.splitlines()) == 2
    assert all(line.isprintable() for line in ended.out.splitlines())
    assert "evil\\x1b[2J\\nrow\\u202e\\x9b1m\\x7f" in ended.out
    for output in ("json", "yaml"):
        out = cli("model", "--target", worker.target, "-o", output).out
        assert all(line.isprintable() and line.isascii() for line in out.splitlines())
        (row,) = (json.loads if output == "json" else yaml.safe_load)(out)
        assert row["served_model_name"] == "evil\x1b[2J\nrow\u202e\x9b1m\x7f"


def test_wide_characters_keep_columns_aligned(worker: FakeWorker, cli: Cli) -> None:
    """Characters that take two columns, and marks that take none, do not push the next column."""
    with FakeWorker() as other:
        worker.set(served_model_name="漢字e\u0301")
        other.set(served_model_name="abcde")
        ended = cli("model", "--target", worker.target, "--target", other.target)
    _, first, second = ended.out.splitlines()
    assert columns(first[: first.index(" no")]) == columns(second[: second.index(" no")])


def test_cut() -> None:
    """Words lose their end, addresses their middle; what fits stays."""
    assert cut("short", 5, "…") == "short"
    assert cut("a longer sentence", 8, "…") == "a longe…"
    assert cut("host.example:8001", 10, "…") == "host.…8001"
    assert cut("host.example:8001", 10, "...") == "host...001"
    assert cut("漢字漢字漢字", 5, "…") == "漢…字"
    assert cut("anything", 1, "…") == "…"
    assert cut("anything", 0, "...") == ""


@given(st.text(), st.integers(0, 40), st.sampled_from(["…", "..."]))
def test_cut_always_fits(text: str, width: int, ellipsis: str) -> None:
    """Nothing that was cut is wider than it may be."""
    assert columns(cut(plain(text), width, ellipsis)) <= width


@given(st.text(st.characters(exclude_categories=[])), st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252"]))
def test_encodable_is_encodable(text: str, encoding: str) -> None:
    """Whatever the text and the stream, writing does not raise."""
    encodable(text, encoding).encode(encoding)
    plain(text).encode()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.from_regex(r"[a-z]{3,6}_x", fullmatch=True), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_VALUES)
def test_yaml_reads_back(value: object) -> None:
    """What the emitter writes, a YAML parser reads as the same value."""
    text = block_yaml(value)
    assert text.isascii()
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize(
    "word", ["no", "null", "1e3", "0x1f", "- a", "a: b", "# c", "", " ", "\x7f\x85\u2028\ufeff😀", "2024-01-01"]
)
def test_yaml_keeps_strings_strings(word: str) -> None:
    """No string turns into a boolean, a number, a date or a comment."""
    assert yaml.safe_load(block_yaml([{"key": word}])) == [{"key": word}]
