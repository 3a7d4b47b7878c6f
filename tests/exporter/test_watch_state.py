"""The state file: what is there, what is not ours, and what cannot be written. In this process, without a worker."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.exporter.views import GONE, UP, life, view
from vllm_cp.episodes import remember
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp_exporter.snapshot import Snapshot
from vllm_cp_exporter.statefile import StateFile

OVER = Episode(
    cause=Cause.ENGINE_SILENT,
    start=1_700_000_000.25,
    end=1_700_000_010.5,
    kind=EndKind.RESUMED,
    duration_s=10.25,
    instance_id="o\u00f1e",
    detail='said "no"\n',
)
WORKER = {
    "instance_id": "one",
    "first_ready": 1_700_000_000.0,
    "was_admitting": True,
    "open_fault": None,
    "counted": False,
    "episodes": [],
}


def document(**worker: Any) -> dict[str, Any]:
    """A file with one worker in it."""
    return {"format": "vllm-cp-exporter-state", "version": 1, "workers": {"a": {**WORKER, **worker}}}


def snapshot() -> Snapshot:
    """A worker with an open fault and an old one, and one that is fine."""
    broken = view(life(UP, GONE), key="a", episodes=(OVER,))
    return Snapshot(workers=MappingProxyType({"a": broken, "b": view(key="b")}))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """The open fault, the finished episodes, the instance and the first ready time come back as they were."""
    path = tmp_path / "state.json"
    shot = snapshot()
    file = StateFile(path)
    assert file.load() == {}, "a first start has nothing to remember"
    file.save(shot)
    known = StateFile(path).load()
    assert known["a"].memory == remember(shot.workers["a"].state)
    assert known["a"].memory.open_fault is not None
    assert known["a"].episodes == (OVER,)
    assert known["b"].memory.open_fault is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"], "nothing is left beside it"


def test_nothing_new_is_not_written_again(tmp_path: Path) -> None:
    """A file that says it all already is left alone."""
    path = tmp_path / "state.json"
    file = StateFile(path)
    file.save(snapshot())
    path.unlink()
    file.save(snapshot())
    assert not path.exists()


STRANGE = {
    "empty": b"",
    "cut": json.dumps(document()).encode()[:-9],
    "binary": b"\xff\xfe\x00\x80",
    "list": b"[]",
    "null": b"null",
    "deep": b"[" * 200_000,
    "foreign": json.dumps({"format": "somebody-else", "version": 1, "workers": {}}).encode(),
    "later": json.dumps({**document(), "version": 2}).encode(),
    "no-workers": json.dumps({"format": "vllm-cp-exporter-state", "version": 1}).encode(),
    "workers-list": json.dumps({**document(), "workers": [1]}).encode(),
    "worker-text": json.dumps({**document(), "workers": {"a": "b"}}).encode(),
    "worker-bare": json.dumps({**document(), "workers": {"a": {}}}).encode(),
    "cause": json.dumps(document(open_fault={"cause": "sunspots", "start": 1})).encode(),
    "huge": json.dumps(document(first_ready=10**400)).encode(),
    "infinite": json.dumps(document(first_ready=float("inf"))).encode(),
    "nan": json.dumps(document(open_fault={"cause": "unknown", "start": float("nan")})).encode(),
    "time-text": json.dumps(document(first_ready="yesterday")).encode(),
}


@pytest.mark.parametrize("content", STRANGE.values(), ids=STRANGE)
def test_a_file_that_is_not_ours(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A corrupt or foreign file is set aside as it was, with one warning; the daemon goes on and writes its own."""
    path = tmp_path / "state.json"
    path.write_bytes(content)
    file = StateFile(path)
    assert file.load() == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("state.json.unreadable-")
    assert aside.read_bytes() == content
    assert str(aside) in str(caplog.records[0].__dict__["fields"])
    file.save(snapshot())
    assert StateFile(path).load().keys() == {"a", "b"}
    assert file.ok is True


@pytest.mark.parametrize("where", ["nowhere/state.json", "directory"])
def test_a_place_that_cannot_be_written(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be written is one warning, however often it is tried, and counts as good again once it can."""
    path = tmp_path / where
    if where == "directory":
        path.mkdir()
    caplog.set_level(logging.WARNING)
    file = StateFile(path)
    assert file.load() == {}
    for _ in range(3):
        file.save(snapshot())
    assert file.ok is False
    assert len(caplog.records) == 1
    assert list(tmp_path.rglob(".*")) == [], "no scratch file is left"
    if where == "directory":
        path.rmdir()
    else:
        path.parent.mkdir()
    file.save(snapshot())
    assert StateFile(path).load().keys() == {"a", "b"}
    assert file.ok is True
