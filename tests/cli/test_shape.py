"""How an answer is shown: columns, order, times, and what is told of the calls behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.facts import known_fleet
from vllm_cp.cli._times import iso, local
from vllm_cp.testing import FakeWorker


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[str]]:
    """Flags that name the known fleet."""
    with known_fleet() as workers:
        yield [part for worker in workers for part in ("--target", worker.target)]


def test_columns(fleet: list[str], cli: Cli) -> None:
    """--columns chooses columns in the order given, by title in any spelling or by path, wide ones included."""
    header = cli("info", *fleet, "--columns", "instance,kv-blocks,Max_Len,parallelism.world_size").out.splitlines()[0]
    assert re.split(" {2,}", header) == ["INSTANCE", "KV BLOCKS", "MAX LEN", "WORLD"]


@pytest.mark.parametrize("sort", ["kv-blocks", "total_kv_blocks", "KV BLOCKS"])
def test_sort(sort: str, cli: Cli) -> None:
    """--sort orders tables and data alike, - puts the largest first, and what is unknown is last either way."""
    with FakeWorker() as big, FakeWorker() as none, FakeWorker() as small:
        big.set(total_kv_blocks=90)
        none.set(total_kv_blocks=None)
        small.set(total_kv_blocks=1000)  # so that a comparison of words would put it first
        flags = [part for worker in (big, none, small) for part in ("--target", worker.target)]
        orders = {"": [big, small, none], "-": [small, big, none]}
        for sign, order in orders.items():
            expected = [worker.target for worker in order]
            table = cli("info", *flags, "--sort", f"{sign}{sort}").out.splitlines()[1:]
            assert [line.split()[0] for line in table] == expected
            for output in ("json", "jsonl", "name"):
                text = cli("info", *flags, "--sort", f"{sign}{sort}", "-o", output).out
                found = (
                    text.splitlines()
                    if output == "name"
                    else [row["target"] for row in json.loads(text)]
                    if output == "json"
                    else [json.loads(line)["target"] for line in text.splitlines()]
                )
                assert found == expected


def test_sort_of_words_and_of_several_rows(fleet: list[str], cli: Cli) -> None:
    """Rows are sorted across workers, and numbers stand before words; targets that failed are last in data."""
    lines = cli("kv", "sources", *fleet, "--sort", "-rank").out.splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["1", "0", "-"]
    data = json.loads(cli("model", *fleet, "--sort", "-model", "-o", "json").out)
    assert [row.get("served_model_name") for row in data] == ["tiny", "llama-70b", None]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--columns", "lunch"), "no column is called 'lunch': there are target, version, kv-blocks"),
        (("--columns", "target,"), "no column is called ''"),
        (("--sort", "-lunch"), "no column is called 'lunch'"),
        (("--columns", "target", "-o", "json"), "--columns chooses columns of a table, and -o is json"),
    ],
)
def test_usage(flags: tuple[str, ...], said: str, worker: FakeWorker, cli: Cli) -> None:
    """A column that is not there is a usage error that names those that are, before anybody is asked."""
    ended = cli("info", "--target", worker.target, *flags)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert worker.calls == []


def test_flags_stand_anywhere(worker: FakeWorker, cli: Cli) -> None:
    """--columns before the verb means the same as after it."""
    before = cli("--columns", "version", "info", "--target", worker.target)
    assert before.out == cli("info", "--columns", "version", "--target", worker.target).out == "VERSION\n0.33.0\n"


def test_times() -> None:
    """Data has ISO 8601 in UTC to the millisecond; people get their own zone, and the day where it is not today."""
    assert iso(1767323045.6789) == "2026-01-02T03:04:05.678Z"
    assert iso(1767323045.0) == "2026-01-02T03:04:05.000Z"
    assert iso(None) is None
    now = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
    here = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc).astimezone()
    text = local("2026-01-02T03:04:05.678Z", now=now)
    assert text.endswith(here.strftime("%H:%M:%S %Z"))
    assert local("2026-01-02T03:04:05.678Z", now=datetime(2026, 3, 1, tzinfo=timezone.utc)) == (
        here.strftime("%Y-%m-%d %H:%M:%S %Z")
    )


def test_verbose_shows_each_call_with_its_time(worker: FakeWorker, cli: Cli) -> None:
    """-v tells each attempt of each call on standard error, and leaves standard output alone."""
    quiet = cli("info", "--target", worker.target, "-o", "json")
    worker.fail("GetServerInfo", "UNAVAILABLE", "try later", times=1)
    for flag in ("-v", "--verbose"):
        ended = cli("info", flag, "--target", worker.target, "-o", "json")
        assert (ended.code, ended.out) == (0, quiet.out)
    worker.fail("GetServerInfo", "UNAVAILABLE", "try later", times=1)
    lines = cli("-v", "info", "--target", worker.target).err.splitlines()
    name = f"vllm-cp: {worker.target}: Control.GetServerInfo: "
    assert re.fullmatch(re.escape(name) + r"UNAVAILABLE in \d+\.\d ms \(try later\)", lines[0])
    assert re.fullmatch(re.escape(name) + r"OK in \d+\.\d ms, attempt 2", lines[1])


def test_debug_shows_the_wire_and_masks_secrets(worker: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """--debug shows how a worker is reached and the bytes both ways; a token is masked, the worker's echo too."""
    token = tmp_path / "token"
    token.write_text("s3cret-s3cret\n")
    worker.set(served_model_name="s3cret-s3cret")
    flags = ("--target", worker.target, "--token-file", str(token), "--insecure-token", "--debug")
    ended = cli("model", *flags, "--columns", "target")
    said = ended.err
    assert ended.code == 0
    assert f"debug: {worker.target}: plaintext, token *** from {token}, 5 s for each answer" in said
    assert "-> /vllm.Control/GetModelInfo, deadline 5 s, authorization: Bearer ***, 0 bytes" in said
    assert re.search(r"<- /vllm.Control/GetModelInfo, \d+ bytes: [0-9a-f]*\*\*\*", said)
    assert "s3cret" not in said
    assert b"s3cret".hex() not in said


def test_debug_shows_what_is_sent(worker: FakeWorker, cli: Cli) -> None:
    """The request's bytes are those that the worker gets."""
    said = cli("abort", "ab", "--target", worker.target, "--debug").err
    assert "-> /vllm.Control/Abort, deadline 5 s, 4 bytes: 0a026162\n" in said
    assert "<- /vllm.Control/Abort, 0 bytes\n" in said
