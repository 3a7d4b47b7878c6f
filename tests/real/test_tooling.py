"""What the stacks stand on: fetched binaries, held ports, announced processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real import fetch
from tests.real.ports import Ports
from tests.real.sim.control import announce


def test_ports_are_held_against_others(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports taken once are not given twice, and workers draw from ranges apart, below the ephemeral ones."""
    mine = ports.take(3)
    assert mine == list(range(mine[0], mine[0] + 3))
    with Ports() as others:
        assert not set(others.take(20)) & set(mine)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw15")
    with Ports() as far:
        assert max(far.take()) < 32_768
        assert not set(far.take(3)) & set(mine)


def test_a_version_that_does_not_exist_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a binary cannot be had, fetching says why in one line, ends with 1 and leaves nothing behind."""
    monkeypatch.setenv("VLLM_CP_VLLM_RS_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch.main(["0.33.0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fetch: cannot download vllm 0.33.0 ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_fetched_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A binary that is there is not fetched again."""
    monkeypatch.setenv("VLLM_CP_VLLM_RS_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    kept = tmp_path / "0.1.0" / "vllm-rs"
    kept.parent.mkdir()
    kept.write_text("there already")
    kept.chmod(0o755)
    assert fetch.main(["0.1.0"]) == 0
    assert capsys.readouterr().out == f"{kept}\n"


def test_an_announcement_is_whole_or_absent(tmp_path: Path) -> None:
    """Engine processes announce themselves by a rename, so a reader never sees half of it."""
    announce(tmp_path / "engine.json", 6000)
    assert [path.name for path in tmp_path.iterdir()] == ["engine.json"]
