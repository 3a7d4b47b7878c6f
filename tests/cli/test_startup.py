"""``startup``: the clocks of a start, and no invented ones."""

from __future__ import annotations

import json
import threading

from tests.cli.conftest import Cli
from vllm_cp.testing import FakeWorker


def test_clocks_of_a_start(worker: FakeWorker, cli: Cli) -> None:
    """From a closed port on, each clock is read, in order, with one generation of one token at the end."""
    worker.stop()
    timer = threading.Timer(0.6, worker.restart, kwargs={"instance_id": "next"})
    timer.start()
    ended = cli("startup", "--target", worker.target, "--timeout", "30", "-o", "json")
    timer.join()
    assert (ended.code, ended.err) == (0, "")
    (row,) = json.loads(ended.out)
    seconds = row["seconds"]
    assert 0.1 < seconds["to_socket"] <= seconds["to_serving"] <= seconds["to_warm"] < 20
    assert seconds["to_first_response"] >= seconds["to_warm"]
    assert row["began"].endswith("Z")
    assert row["instance_id"] == "next"
    assert [call.method for call in worker.calls].count("Inference.Generate") == 1


def test_worker_that_is_up(worker: FakeWorker, cli: Cli) -> None:
    """Of a worker that is up no clock is read: 8, nulls, a line that says why, and no generation."""
    ended = cli("startup", "--target", worker.target, "-o", "json")
    assert ended.code == 8
    (row,) = json.loads(ended.out)
    assert row["began"] is None
    assert set(row["seconds"].values()) == {None}
    assert "was up already" in ended.err
    assert "Inference.Generate" not in [call.method for call in worker.calls]


def test_start_that_never_comes(nobody: str, cli: Cli) -> None:
    """When the time is up it is 3, with the last state seen."""
    ended = cli("startup", "--target", nobody, "--timeout", "0.5")
    assert ended.code == 3
    assert "not warm after 0.5 s; last seen: unreachable, " in ended.err


def test_old_worker(cli: Cli) -> None:
    """vLLM 0.27 has the clocks too: the generation proves it warm."""
    with FakeWorker(version="0.27.0") as worker:
        worker.stop()
        timer = threading.Timer(0.3, worker.restart)
        timer.start()
        ended = cli("startup", "--target", worker.target, "--timeout", "30", "-o", "json")
        timer.join()
    assert ended.code == 0
    assert json.loads(ended.out)[0]["seconds"]["to_warm"] > 0
