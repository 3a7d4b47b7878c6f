"""``ft``: what fault tolerance says of each engine, and every rank's server told once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.held import FORMATS, held
from tests.cli.process import Terminal
from vllm_cp.cli import _output, _verb
from vllm_cp.cli._table import View
from vllm_cp.testing import FakeGroup, FakeHttp

SURE = ("--all", "--yes", "--timeout", "3")


@pytest.fixture
def ranks() -> Iterator[list[FakeHttp]]:
    """Two ranks of one group, both unhealthy."""
    group = FakeGroup()
    with FakeHttp(engines=[0], group=group) as one, FakeHttp(engines=[1], group=group) as two:
        one.fall_ill(info="NCCL time-out")
        two.fall_ill()
        yield [one, two]


def _flags(servers: list[FakeHttp]) -> list[str]:
    return [part for server in servers for part in ("--http-url", server.url)]


def _told(server: FakeHttp) -> int:
    return len([call for call in server.calls if call.path.endswith("/apply")])


def _named(servers: list[FakeHttp]) -> dict[str, str]:
    return {server.url: f"http://127.0.0.1:{number:05}" for number, server in enumerate(servers, 1)}


def _still(text: str, names: dict[str, str]) -> str:
    for url, name in names.items():
        text = text.replace(url, name)
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "3f2a0c11-0000-4000-8000-000000000000", text)
    return re.sub(r"\b\d\.\d{3}\b", "0.512", text)


@pytest.mark.parametrize("verb", ["status", "retry", "retry-dry"])
def test_output_is_as_written_down(verb: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each format, and on a terminal of 80 columns: one rank that is ill, a dead one, and a server without any."""
    word, _, dry = verb.partition("-")
    names: dict[str, str] = {}

    def renamed(reports: Sequence[_output.Report], view: View, shape: _output.Shape) -> str:
        # A cut name shows a part of its port, which is another one each time.
        return _output.render([report._replace(target=names[report.target]) for report in reports], view, shape)

    monkeypatch.setattr(_verb, "render", renamed)
    for output in (*FORMATS, "80"):
        with FakeHttp(engines=[0]) as ill, FakeHttp(engines=[1]) as dead, FakeHttp(fault_tolerance=False) as none:
            servers = [ill, dead, none]
            names |= _named(servers)
            ill.fall_ill(info="NCCL time-out while waiting for the peers of this group to answer")
            dead.die(info="engine process exited")
            flags = [*_flags(servers), *(SURE if word == "retry" else ()), *(["--dry-run"] if dry else [])]
            if output == "80":
                monkeypatch.setattr(_output, "terminal_width", lambda: 80)
            ended = cli("ft", word, *flags, *(() if output == "80" else ("-o", output)))
        held(f"ft-{verb}.{output}", _still(ended.out, names))
        assert ended.code == (0 if dry else 6)
        assert output != "80" or max(map(len, ended.out.splitlines())) <= 80
    held(f"ft-{verb}.talk", _still(ended.err, names))


@pytest.mark.parametrize(
    ("state", "code"), [("healthy", 0), ("unhealthy", 8), ("dead", 8), ("none", 7), ("away", 3), ("broken", 5)]
)
def test_status_to_exit(state: str, code: int, nobody: str, cli: Cli) -> None:
    """All healthy is 0, anything else 8, no fault tolerance 7, nobody there 3, an answer nobody can read 5."""
    with FakeHttp(fault_tolerance=state != "none") as server:
        if state == "unhealthy":
            server.fall_ill()
        if state == "dead":
            server.die()
        if state == "broken":
            server.fail("/fault_tolerance/status", 200, "this is no status")
        url = f"http://{nobody}" if state == "away" else server.url
        assert cli("ft", "status", "--http-url", url).code == code


def test_retry_tells_every_rank(ranks: list[FakeHttp], cli: Cli) -> None:
    """Each server of the group is told once, all recover, and each rank has its row."""
    ended = cli("ft", "retry", *_flags(ranks), *SURE, "-o", "json")
    rows: list[dict[str, Any]] = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert [row["engines"][0]["result"] for row in rows] == ["recovered", "recovered"]
    assert [row["engines"][0]["engine"] for row in rows] == [0, 1]
    assert [_told(rank) for rank in ranks] == [1, 1]


def test_a_rank_that_was_left_out(ranks: list[FakeHttp], cli: Cli) -> None:
    """Without the server of every rank nobody goes on: out of time is 3, and the row says so."""
    ended = cli("ft", "retry", "--http-url", ranks[0].url, "--yes", "--timeout", "0.5")
    assert ended.code == 3
    assert "out_of_time" in ended.out
    assert "engine 0 did not recover: out_of_time" in ended.err


def test_several_take_all_and_a_yes(ranks: list[FakeHttp], cli: Cli) -> None:
    """Several servers take --all, and --yes where nobody can be asked; until then nothing is sent."""
    for flags, said in (((), "give --all"), (("--all",), "give --yes to do it")):
        ended = cli("ft", "retry", *_flags(ranks), *flags)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
    assert [_told(rank) for rank in ranks] == [0, 0]


def test_asks_on_a_terminal(ranks: list[FakeHttp]) -> None:
    """On a terminal it says what it will do to whom; only a yes goes on."""
    for answer, code, told in (("n\n", 130, 0), ("y\n", 0, 1)):
        with Terminal("ft", "retry", "--all", "--timeout", "10", *_flags(ranks)) as terminal:
            shown = terminal.expect("Go on? [y/N] ")
            assert "this will tell unhealthy engines to retry on 2 workers:" in shown
            assert ranks[0].url in shown
            terminal.press(answer)
            assert terminal.end() == code
        assert [_told(rank) for rank in ranks] == [told, told]


def test_urls_by_the_hosts_of_the_targets(ranks: list[FakeHttp], cli: Cli) -> None:
    """One URL with {host} in it stands for the server of each target, and rows go by the targets' names."""
    port = ranks[0].url.rpartition(":")[2]
    ended = cli("ft", "status", "--target", "127.0.0.1:1", "--http-url", f"http://{{host}}:{port}", "-o", "json")
    assert ended.code == 8
    assert [(row["target"], row["http_url"]) for row in json.loads(ended.out)] == [("127.0.0.1:1", ranks[0].url)]


def test_urls_from_discovery(ranks: list[FakeHttp], tmp_path: Path, cli: Cli) -> None:
    """What discovery knows need not be said again."""
    groups = [
        {"targets": [f"10.0.0.{n}:1"], "labels": {"__worker__": f"ml/llama-{n}", "__http_url__": rank.url}}
        for n, rank in enumerate(ranks)
    ]
    (tmp_path / "fleet.json").write_text(json.dumps(groups))
    flags = ("--file-sd", str(tmp_path / "fleet.json"))
    assert cli("ft", "retry", *flags, *SURE, "-o", "name").out.split() == ["ml/llama-0", "ml/llama-1"]
    assert cli("ft", "status", *flags).code == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--target", "h"), "the HTTP server of h:8001 is not known: give --http-url http://{host}:8000"),
        (("--http-url", "h:8000"), "is no HTTP base URL; write http://h:8000"),
        (("--http-url", "http://{host}:1", "--http-url", "http://h:1"), "give one URL with {host} in it"),
    ],
)
def test_usage(flags: tuple[str, ...], said: str, cli: Cli) -> None:
    """A server that is not known or no URL is a usage error that shows how to write it."""
    ended = cli("ft", "status", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Without the HTTP library one line says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "httpx2", None)
    ended = cli("ft", "status", "--http-url", "http://h:1")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert 'pip install "vllm-cp[http]"' in ended.err
