"""Workers that are found: by files, by DNS, in Kubernetes, by pool; in flags, variables and contexts alike."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.discovery.apiserver import ApiServer, pod
from tests.discovery.nameserver import NameServer
from vllm_cp import Connection
from vllm_cp.testing import FakeWorker


@pytest.fixture
def pair() -> Iterator[tuple[FakeWorker, FakeWorker]]:
    """Two workers."""
    with FakeWorker() as one, FakeWorker() as two:
        yield one, two


def _sd(path: Path, *groups: tuple[list[str], dict[str, str]]) -> str:
    path.write_text(json.dumps([{"targets": targets, "labels": labels} for targets, labels in groups]))
    return str(path)


def _rows(ended: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(ended.out)
    return rows


def test_file(pair: tuple[FakeWorker, FakeWorker], tmp_path: Path, cli: Cli) -> None:
    """A file_sd file names the workers; each goes by its key, and one written on the line too is asked once."""
    one, two = pair
    file = _sd(tmp_path / "fleet.json", ([one.target], {"__worker__": "ml/llama-0"}), ([two.target], {}))
    ended = cli("health", "--file-sd", file, "--target", two.target, "-o", "json")
    assert (ended.code, ended.err) == (0, "")
    assert [row["target"] for row in _rows(ended)] == [two.target, "ml/llama-0"]
    assert len(two.calls) == 1


def test_patterns_and_pools(pair: tuple[FakeWorker, FakeWorker], tmp_path: Path, cli: Cli) -> None:
    """A pattern stands for several files, and --pool for some of their workers."""
    one, two = pair
    _sd(tmp_path / "a.json", ([one.target], {"pool": "chat"}))
    _sd(tmp_path / "b.json", ([two.target], {"pool": "code"}))
    flags = ("--file-sd", str(tmp_path / "*.json"))
    assert cli("health", *flags, "-o", "name").out.split() == [one.target, two.target]
    assert cli("health", *flags, "--pool", "code", "-o", "name").out.split() == [two.target]
    ended = cli("health", *flags, "--pool", "cod")
    assert (ended.code, ended.out) == (2, "")
    assert "no worker is in the pool 'cod': there are chat, code" in ended.err
    assert cli("health", "--target", one.target, "--pool", "default").code == 0


def test_a_worker_without_an_address_is_a_row_that_failed(worker: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """Where the source can't say how to reach a worker, the others are asked and this one has its reason."""
    labels = {"__tls_ca_file__": "nothing.pem", "__worker__": "broken"}
    file = _sd(tmp_path / "fleet.json", ([worker.target], {}), (["10.0.0.1:1"], labels))
    ended = cli("health", "--file-sd", file)
    assert ended.code == 6
    assert worker.target in ended.out
    assert ended.err.startswith("vllm-cp: broken: discovery: worker unreachable")
    assert "nothing.pem" in ended.err


def test_a_file_in_trouble(worker: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """No readable file at all is 3; some of several is 6, with the workers of the others, and both say which."""
    missing = str(tmp_path / "missing.json")
    ended = cli("health", "--file-sd", missing)
    assert (ended.code, ended.out) == (3, "")
    assert "missing.json" in ended.err
    assert ended.err.count("\n") == 1
    good = _sd(tmp_path / "fleet.json", ([worker.target], {}))
    ended = cli("health", "--file-sd", good, "--file-sd", missing)
    assert ended.code == 6
    assert worker.target in ended.out
    assert ended.err.startswith("vllm-cp: --file-sd: some workers may be missing: ")


def test_nobody_there(tmp_path: Path, cli: Cli) -> None:
    """An empty set is no success: a check over nobody would always be green."""
    ended = cli("health", "--file-sd", _sd(tmp_path / "fleet.json"))
    assert (ended.code, ended.err) == (3, "vllm-cp: --file-sd: no worker is there\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--file-sd", "fleet.txt"), "must end in .json, .yml, .yaml"),
        (("--dns", ":80"), "':80' is neither NAME:PORT nor the name of SRV records"),
        (("--dns", "llama:http"), "is neither NAME:PORT"),
        (("--k8s", "ml/"), "'ml/' has no selector; write [NAMESPACE/]SELECTOR"),
    ],
)
def test_usage(flags: tuple[str, ...], said: str, cli: Cli) -> None:
    """What could never be read is a usage error, and names the flag."""
    ended = cli("health", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert ended.err.startswith(f"vllm-cp: {flags[0]}: ")


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        (("--file-sd", "fleet.yml"), "vllm-cp[discovery]"),
        (("--dns", "llama"), "vllm-cp[discovery]"),
        (("--k8s", "app=llama"), "vllm-cp[kubernetes]"),
    ],
)
def test_a_missing_package_is_named(
    flags: tuple[str, ...], extra: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Where the package behind a source is not installed, one line says what to install."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("dns", "yaml", "kubernetes_asyncio"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("dns", "yaml", "kubernetes_asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = cli("health", *flags)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert f"pip install '{extra}'" in ended.err


async def test_dns(pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """NAME:PORT is a worker at each address of the name, NAME alone is SRV records, which bring ports of their own."""
    one, two = pair
    async with NameServer() as names:
        monkeypatch.setattr("vllm_cp.discovery.dns.default_resolver", names.resolver)
        names.set("w.test", "A", "127.0.0.1")
        port = one.target.rpartition(":")[2]
        ended = await asyncio.to_thread(cli, "health", "--dns", f"w.test:{port}", "-o", "name")
        assert ended == (0, f"w.test:{port}/127.0.0.1\n", "")
        other = two.target.rpartition(":")[2]
        names.set("srv.test", "SRV", f"0 0 {port} w.test.", f"0 0 {other} w.test.")
        ended = await asyncio.to_thread(cli, "health", "--dns", "srv.test", "-o", "name")
        assert sorted(ended.out.split()) == sorted([f"w.test:{port}", f"w.test:{other}"])


async def test_kubernetes(
    pair: tuple[FakeWorker, FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Pods go by namespace and name; a namespace before the slash limits it, a label's own prefix does not."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    one, two = pair
    async with ApiServer() as api:
        for name, worker, namespace in (("llama-0", one, "ml"), ("llama-1", two, "other")):
            port = int(worker.target.rpartition(":")[2])
            api.put(pod(name, namespace=namespace, ip="127.0.0.1", port=port, labels={"x.io/name": "llama"}))
        monkeypatch.setattr(
            "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
            str(api.kubeconfig(tmp_path / "kubeconfig")),
        )
        for selector, found in (("ml/app=vllm", ["ml/llama-0"]), ("x.io/name=llama", ["ml/llama-0", "other/llama-1"])):
            ended = await asyncio.to_thread(cli, "health", "--k8s", selector, "-o", "name")
            assert (ended.code, ended.err) == (0, "")
            assert sorted(ended.out.split()) == found


def test_variables(
    pair: tuple[FakeWorker, FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Each flag has its variable; workers named on the line leave those of the environment out."""
    one, two = pair
    monkeypatch.setenv("VLLM_CP_FILE_SD", _sd(tmp_path / "fleet.json", ([one.target], {"pool": "chat"})))
    assert cli("health", "-o", "name").out.split() == [one.target]
    monkeypatch.setenv("VLLM_CP_POOL", "other")
    assert cli("health").code == 2
    monkeypatch.setenv("VLLM_CP_POOL", "")
    assert cli("health", "--target", two.target, "-o", "name").out.split() == [two.target]


def test_contexts(worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A context may be made of sources; its file is kept by its absolute name and read when it is used."""
    monkeypatch.chdir(tmp_path)
    added = cli("context", "add", "prod", "--file-sd", "fleet.json", "--pool", "chat", "--use", "-o", "json")
    assert added.code == 0
    assert _rows(added)[0]["file_sd"] == [str(tmp_path / "fleet.json")]
    _sd(tmp_path / "fleet.json", ([worker.target], {"pool": "chat"}), (["10.0.0.1:1"], {"pool": "code"}))
    monkeypatch.chdir("/")
    assert cli("health", "-o", "name").out.split() == [worker.target]
    assert f"file-sd:{tmp_path}/fleet.json" in cli("context", "list").out


def test_a_context_is_not_in_force_for_other_sources(
    worker: FakeWorker, tmp_path: Path, asked: list[Connection], cli: Cli
) -> None:
    """A context in use lends its settings to none but its own sources: its token is not for the workers of others."""
    own = _sd(tmp_path / "own.json", ([worker.target], {}))
    other = _sd(tmp_path / "other.json", ([worker.target], {}))
    assert cli("context", "add", "prod", "--file-sd", own, "--timeout", "9", "--use").code == 0
    for file, timeout_s in ((own, 9.0), (other, 5.0)):
        assert cli("health", "--file-sd", file).code == 0
        assert [c.timeout_s for c in asked] == [timeout_s]


def test_changes_name_discovered_workers(worker: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """A dry run says the names that people know."""
    file = _sd(tmp_path / "fleet.json", ([worker.target], {"__worker__": "ml/llama-0"}))
    ended = cli("resume", "--file-sd", file, "--dry-run")
    assert ended.code == 0
    assert "ml/llama-0" in ended.out
    assert "on ml/llama-0; nothing was sent" in ended.err
