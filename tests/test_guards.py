"""The house rules, held by tests: what may import what, what must be complete, what must be equal."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import vllm_cp
from vllm_cp import AsyncControlClient, ControlClient, PauseMode, _rpc, _status
from vllm_cp._proto import control_pb2, health_pb2

ROOT = Path(__file__).parents[1]
SDK = ROOT / "vllm_cp"
DAEMON = ROOT / "exporter" / "vllm_cp_exporter"
#: Folders that are no part of the project, and hidden ones.
FOREIGN = re.compile(r"build|dist|__pycache__|node_modules|\.(?!ci$).*")


def files(folder: Path, pattern: str = "*.py") -> Iterator[Path]:
    for path in sorted(folder.rglob(pattern)):
        inside = path.relative_to(ROOT).parts
        if path.is_file() and not any(FOREIGN.fullmatch(part) for part in inside[:-1]):
            yield path


def production() -> Iterator[Path]:
    yield from (path for path in files(SDK) if SDK / "_proto" not in path.parents)
    yield from files(DAEMON)


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in it; ``from a import b`` gives ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def within(names: set[str], package: str) -> list[str]:
    return sorted(name for name in names if name == package or name.startswith(f"{package}."))


# -- the two clients ------------------------------------------------------------------------


def public_names(kind: type[Any]) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_both_clients_have_the_same_names() -> None:
    """Whoever knows one client knows the other."""
    assert public_names(ControlClient) == public_names(AsyncControlClient)


@pytest.mark.parametrize("name", sorted({"__init__", *public_names(ControlClient)}))
def test_both_clients_have_the_same_signatures(name: str) -> None:
    """A method takes the same arguments in both colours, and gives the same, apart from async."""
    sync, other = inspect.getattr_static(ControlClient, name), inspect.getattr_static(AsyncControlClient, name)
    if isinstance(sync, property):
        sync, other = sync.fget, other.fget
    ours, theirs = inspect.signature(sync), inspect.signature(other)
    assert ours.parameters == theirs.parameters
    assert str(theirs.return_annotation).replace("Async", "") == str(ours.return_annotation)
    assert inspect.getdoc(sync) == inspect.getdoc(other)
    if name not in ("__init__", "watch", "target"):
        assert inspect.iscoroutinefunction(other)


@pytest.mark.parametrize("name", sorted(public_names(ControlClient) - {"watch", "close", "target"}))
def test_every_call_takes_a_time_and_a_rank(name: str) -> None:
    """Each unary call may have its own deadline and its own rank, by keyword."""
    parameters = inspect.signature(getattr(ControlClient, name)).parameters
    for option in ("timeout_s", "rank"):
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[option].default is None


SAMPLES: dict[str, Any] = {
    "request_ids": ["a"],
    "mode": PauseMode.KEEP,
    "clear_cache": False,
    "level": 1,
    "name": "a",
    "path": "/a",
    "init_info": {},
    "update_info": {},
    "version": "v",
    "prompt": "x",
    "service": "",
}


def samples(function: Any) -> dict[str, Any]:
    """Arguments for those that have no default."""
    parameters = list(inspect.signature(function).parameters.values())
    return {p.name: SAMPLES[p.name] for p in parameters if p.default is p.empty and p.name != "self"}


def test_every_rpc_of_the_contract_has_a_call_and_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the wire contract offers, the clients offer; and they call nothing that it does not offer."""
    called: set[str] = set()
    monkeypatch.setattr(ControlClient, "_run", lambda _self, call, *_: called.add(call.path))
    with ControlClient("localhost:1") as client:
        for name in public_names(ControlClient) - {"watch", "close", "target"}:
            getattr(client, name)(**samples(getattr(ControlClient, name)))
    control = {f"/vllm.Control/{m.name}" for m in control_pb2.DESCRIPTOR.services_by_name["Control"].methods}
    health = {f"/grpc.health.v1.Health/{m.name}" for m in health_pb2.DESCRIPTOR.services_by_name["Health"].methods}
    called.add(_rpc.watch("").path)
    assert called == control | health | {"/vllm.Inference/Generate"}


def test_every_status_has_a_meaning() -> None:
    """When gRPC adds a status, this fails until it has a meaning."""
    assert set(_status.MEANINGS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


# -- the public names -----------------------------------------------------------------------


def test_public_names_agree() -> None:
    """What is exported, what type checkers see and what loads are one list."""
    tree = ast.parse((SDK / "__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen: dict[str, str] = {}
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "X as X is how a package says that it re-exports"
            seen[alias.name] = str(node.module)
    homes = {name: module for module, names in vllm_cp._HOMES.items() for name in names}
    assert homes == seen
    assert set(vllm_cp.__all__) == {*homes, "__version__"}
    assert list(vllm_cp.__all__) == sorted(vllm_cp.__all__)
    for name, module in homes.items():
        assert getattr(vllm_cp, name) is getattr(sys.modules[module], name)
        assert name in sys.modules[module].__all__
    assert set(homes) <= set(dir(vllm_cp))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = vllm_cp.Nothing


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import vllm_cp", ["grpc", "google.protobuf", "click", "rich", "dataclasses", "vllm_cp.errors"]),
        ("import vllm_cp.errors", ["grpc", "google.protobuf", "vllm_cp.config"]),
        ("from vllm_cp import Connection, ServerInfo", ["grpc", "google.protobuf", "vllm_cp.client"]),
        ("import vllm_cp.episodes", ["grpc", "google.protobuf", "vllm_cp.client"]),
        ("from vllm_cp import ControlClient", ["aiohttp", "prometheus_client", "click", "rich", "yaml"]),
    ],
)
def test_importing_is_cheap(statement: str, absent: list[str]) -> None:
    """Importing a room loads that room, and none of the heavy ones it can do without."""
    script = f"{statement}\nimport sys\nprint(*sorted(set({absent!r}) & set(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


# -- who may import whom --------------------------------------------------------------------


def test_the_generated_code_has_two_readers() -> None:
    """Protobuf is known to the wire module and to the fakes, and to nobody else."""
    readers = {path for path in production() if within(imports(path), "vllm_cp._proto")}
    assert {path.parent for path in readers if SDK / "testing" not in path.parents} == {SDK / "_wire"}


def test_production_does_not_import_testing() -> None:
    """The fakes are for tests: no production module needs them."""
    guilty = {path for path in production() if within(imports(path), "vllm_cp.testing")}
    assert {path for path in guilty if SDK / "testing" not in path.parents} == set()


def test_the_daemon_uses_public_names_only() -> None:
    """Nothing private of the SDK is imported by the daemon, and the SDK knows nothing of the daemon."""
    private = re.compile(r"vllm_cp\.(.*\.)?_[a-z]")
    guilty = {path.name: names for path in files(DAEMON) if (names := [n for n in imports(path) if private.match(n)])}
    assert guilty == {}
    assert [path for path in files(SDK) if within(imports(path), "vllm_cp_exporter")] == []


def test_layers_hold() -> None:
    """The import contracts in pyproject.toml are kept."""
    pytest.importorskip("importlinter", reason="the import linter is in the dev extra")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- files ----------------------------------------------------------------------------------


def test_no_file_is_too_long() -> None:
    """A file of more than 400 lines has more than one subject."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in files(ROOT)
        if SDK / "_proto" not in path.parents and (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_every_test_says_what_it_shows() -> None:
    """A test's docstring is the sentence you would say aloud."""
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in files(ROOT / "tests", "test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


TEXT = {".py", ".pyi", ".toml", ".md", ".yml", ".yaml", ".json", ".proto", ".cfg", ".txt", ".sh", ""}
#: Put together here, so that this file does not hold them itself.
ABROAD = re.compile("|".join([r"\.\./" + "shared", r"(?<![\w.:/-])/(?:" + "|".join(["work", "root"]) + r")/\w"]))
SOMEBODYS_HOME = re.compile(r"(?<![\w.:/-])/(?:" + "|".join(["home", "Users"]) + r")/\w+/")


def test_nothing_points_outside_the_project() -> None:
    """No file refers to a neighbour of the project or to a place on the machine it was written on."""
    guilty = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in files(ROOT, "*")
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if ABROAD.search(line) or SOMEBODYS_HOME.search(line)
    ]
    assert guilty == []
