"""What ``info``, ``model``, ``health`` and ``abort`` say and do not say (B20, B22)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.process import run
from vllm_cp import ServerInfo
from vllm_cp.testing import FakeWorker


def _row(cli: Cli, *args: str) -> dict[str, Any]:
    (row,) = json.loads(cli(*args, "-o", "json").out)
    return dict(row)


def test_capacity_is_as_reported(cli: Cli) -> None:
    """Blocks are the worker's own sum: not times the ranks, not times a block size."""
    with FakeWorker(ranks=4) as worker:
        worker.set(total_kv_blocks=40000, kv_block_size=4, effective_attention_block_size=256)
        row = _row(cli, "info", "--target", worker.target)
        table = cli("info", "--target", worker.target).out.splitlines()[1].split()
    assert (row["total_kv_blocks"], row["kv_block_size"], row["effective_attention_block_size"]) == (40000, 4, 256)
    assert table[2:5] == ["40000", "4", "256"]
    assert not any("token" in key and key != "max_batched_tokens" for key in row)


def test_unknown_is_not_zero(worker: FakeWorker, cli: Cli) -> None:
    """A size that the worker leaves at zero is null and "-", also when the parallelism is missing altogether."""
    worker.set(total_kv_blocks=0, kv_block_size=0, effective_attention_block_size=None, parallelism=None)
    row = _row(cli, "info", "--target", worker.target)
    assert row["total_kv_blocks"] is row["kv_block_size"] is row["parallelism"] is None
    assert cli("info", "--target", worker.target).out.splitlines()[1].split()[2:5] == ["-", "-", "-"]


def test_largest_number(cli: Cli) -> None:
    """2**64-1 comes through whole."""
    with FakeWorker(info=ServerInfo(total_kv_blocks=2**64 - 1)) as worker:
        assert _row(cli, "info", "--target", worker.target)["total_kv_blocks"] == 2**64 - 1


@pytest.mark.parametrize(
    ("version", "said"), [("0.27.0", None), ("0.28.0", None), ("0.29.0", False), ("0.33.0", False)]
)
def test_lora_is_settled_by_the_version(version: str, said: bool | None, cli: Cli) -> None:
    """Before 0.29 nobody knows; since then an unset flag is a no."""
    with FakeWorker(version=version) as worker:
        assert _row(cli, "model", "--target", worker.target)["supports_lora"] is said


def test_model_without_version(worker: FakeWorker, cli: Cli) -> None:
    """When the version can't be had the model is shown all the same, with LoRA unknown."""
    worker.fail("GetServerInfo", "PERMISSION_DENIED")
    row = _row(cli, "model", "--target", worker.target)
    assert row["served_model_name"] == "tiny"
    assert row["supports_lora"] is None


def test_health_claims_no_more_than_was_verified(worker: FakeWorker, cli: Cli) -> None:
    """With every engine frozen the server still reports SERVING; output and help call it a report, not a proof."""
    worker.hang()
    ended = cli("health", "--target", worker.target)
    assert ended.code == 0
    assert "REPORTS" in ended.out.splitlines()[0]
    assert "no proof of inference" in " ".join(cli("health", "--help").out.split())


def test_draining_worker(worker: FakeWorker, cli: Cli) -> None:
    """NOT_FOUND for a name that every vLLM has points at a drain, not at a typing error."""
    worker.fail("Check", "NOT_FOUND", "unknown service")
    ended = cli("health", "--target", worker.target)
    assert ended.code == 8
    assert "probably draining" in ended.err


def test_abort_claims_no_count(worker: FakeWorker, cli: Cli) -> None:
    """Known, unknown and repeated ids are all just sent, in one call per target."""
    with FakeWorker() as other:
        both = ("--target", worker.target, "--target", other.target)
        ended = cli("abort", "a", "a", "nobody", *both, "--all", "--yes")
        assert ended.code == 0
        for one in (worker, other):
            (call,) = one.calls
            assert call.request_ids == ("a", "a", "nobody")
    assert [line.split()[1] for line in ended.out.splitlines()] == ["RESULT", "sent", "sent"]


def test_abort_is_not_repeated(worker: FakeWorker, cli: Cli) -> None:
    """A change that failed is not asked again."""
    worker.fail("Abort", "UNAVAILABLE", "try later")
    assert cli("abort", "a", "--target", worker.target).code == 3
    assert len(worker.calls) == 1


PROXIES = ["http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"]


@pytest.mark.parametrize("variable", PROXIES)
def test_proxy_variables_are_ignored(variable: str, worker: FakeWorker) -> None:
    """A company proxy in the environment does not get between us and a worker."""
    got = run("health", "--target", worker.target, env={variable: "http://127.0.0.1:9"})
    assert (got.code, got.err) == (0, "")


def test_proxy_on_request(worker: FakeWorker) -> None:
    """With --proxy it does, the failed call names the variable, and no_proxy is honoured."""
    env = {"http_proxy": "http://127.0.0.1:9"}
    got = run("health", "--proxy", "--target", worker.target, env=env)
    assert got.code == 3
    assert "a proxy is in force (http_proxy)" in got.err
    assert run("health", "--proxy", "--target", worker.target, env={**env, "no_proxy": "127.0.0.1"}).code == 0
