"""Standard output is data (B37): it parses whatever the worker and the environment do."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.conftest import Cli
from tests.cli.facts import known_fleet
from tests.cli.process import ended, start
from vllm_cp.testing import FakeWorker

VERBS = [
    ("health",),
    ("info",),
    ("model",),
    ("kv", "sources"),
    ("abort", "a", "--all", "--yes"),
    ("resume", "--all"),
]
#: What the old worker can't do.
_SINCE_0_28 = VERBS[5:]
ENVIRONMENTS = [
    {},
    {"FORCE_COLOR": "1"},
    {"NO_COLOR": "1"},
    {"TERM": "dumb"},
    {"GRPC_VERBOSITY": "debug"},
    {"PYTHONWARNINGS": "always"},
    {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
]


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=str)
def test_json_parses(env: dict[str, str], nobody: str) -> None:
    """One array with one object per target: up, down, denying and with nothing to report, for every verb."""
    with known_fleet() as workers:
        targets = [*(w.target for w in workers), nobody]
        flags = [part for target in targets for part in ("--target", target)]
        runs = [start(*verb, *flags, "-o", "json", env=env) for verb in VERBS]
        for verb, got in zip(VERBS, map(ended, runs), strict=True):
            data = json.loads(got.out)
            assert [row["target"] for row in data] == targets
            assert ["error" in row for row in data] == [False, verb in _SINCE_0_28, True, True], verb
            assert "\x1b" not in got.out
            assert got.code == 6
            for row in data[2:]:
                assert set(row["error"]) == {"kind", "code", "method", "detail", "hint", "message"}
            assert data[2]["error"]["kind"] == "CredentialsRejected"
            assert data[3]["error"]["kind"] == "WorkerUnreachable"
            assert len([line for line in got.err.splitlines() if line.startswith("vllm-cp: ")]) >= 2


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_one_target_is_an_array_too(output: str, worker: FakeWorker, nobody: str) -> None:
    """One target, up or down, gives an array of one."""
    for target in (worker.target, nobody):
        got = ended(start("info", "--target", target, "-o", output))
        (row,) = (json.loads if output == "json" else yaml.safe_load)(got.out)
        assert row["target"] == target


def test_quiet_when_all_is_well(worker: FakeWorker) -> None:
    """A run that worked says nothing on standard error, whatever gRPC would have to tell."""
    for verb in VERBS[:3]:
        got = ended(start(*verb, "--target", worker.target, env={"PYTHONWARNINGS": "always"}))
        assert (got.code, got.err) == (0, "")


def test_usage_error_leaves_standard_output_empty() -> None:
    """By rule: a command line that is wrong writes no data, in json as elsewhere."""
    got = ended(start("health", "--target", "host:", "-o", "json"))
    assert (got.code, got.out) == (2, "")


def test_yaml_says_the_same_as_json(cli: Cli) -> None:
    """Both formats hold the same data."""
    with known_fleet() as workers:
        flags = [part for worker in workers for part in ("--target", worker.target)]
        for verb in VERBS:
            one = cli(*verb, *flags, "-o", "json")
            two = cli(*verb, *flags, "-o", "yaml")
            assert json.loads(one.out) == yaml.safe_load(two.out)


def test_jsonl_is_one_object_a_line(cli: Cli) -> None:
    """jsonl holds the objects of json, each on a line of its own, in ASCII."""
    with known_fleet() as workers:
        flags = [part for worker in workers for part in ("--target", worker.target)]
        one = cli("info", *flags, "-o", "json")
        two = cli("info", *flags, "-o", "jsonl")
    assert [json.loads(line) for line in two.out.splitlines()] == json.loads(one.out)
    assert two.out.isascii()


def test_dry_run_is_data_too(worker: FakeWorker, cli: Cli) -> None:
    """A dry run prints what it would do as records, and says on standard error that nothing was sent."""
    got = cli("shutdown", "--dry-run", "--target", worker.target, "-o", "json")
    assert json.loads(got.out) == [{"target": worker.target, "result": "dry run"}]
    assert got.err.endswith("nothing was sent\n")
