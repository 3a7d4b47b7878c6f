# ruff: noqa: ASYNC240  (small files on a local disk)
"""Targets from real files in Prometheus' file_sd format."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.certs import make_certs
from tests.discovery.following import FakeClock, Following
from vllm_cp import ConfigError
from vllm_cp.discovery import DiscoveredTarget, DiscoveryFailed, FileDiscoverer, Overrides

CHAT = '[{"targets": ["a:1"], "labels": {"pool": "chat"}}]'


def read(path: Path, text: str, **options: object) -> list[DiscoveredTarget]:
    path.write_text(text)
    return list(FileDiscoverer([path], **options).look().targets)  # type: ignore[arg-type]


def one(path: Path, target: str = "a:1", **labels: object) -> DiscoveredTarget:
    (found,) = read(path, json.dumps([{"targets": [target], "labels": labels}]))
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "targets.json"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def watching(clock: FakeClock, *files: Path | str) -> FileDiscoverer:
    return FileDiscoverer(files, poll_s=5.0, sleep=clock.sleep, now=clock.now)


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    """Both forms of the format give the same targets; a YAML number is as good as its text."""
    yaml = "- targets: ['a:1', \"[::1]:2\"]\n  labels:\n    pool: chat\n    __http_port__: 8000\n"
    groups = [{"targets": ["a:1", "[::1]:2"], "labels": {"pool": "chat", "__http_port__": "8000"}}]
    from_json = read(tmp_path / "t.json", json.dumps(groups))
    assert from_json == read(tmp_path / "t.yml", yaml) == read(tmp_path / "t.yaml", yaml)
    assert [(t.key, t.pool, t.http_url) for t in from_json] == [
        ("a:1", "chat", "http://a:8000"),
        ("[::1]:2", "chat", "http://[::1]:8000"),
    ]


def test_a_file_written_for_scraping_serves_as_well(file: Path) -> None:
    """The target is vLLM's HTTP address; a label gives the gRPC port, Prometheus' own labels do no harm."""
    found = one(file, "10.0.0.1:8000", __grpc_port__="8001", __http_port__="8000", __scheme__="https", job="vllm")
    assert (found.key, found.target, found.http_url) == ("10.0.0.1:8000", "10.0.0.1:8001", "https://10.0.0.1:8000")
    assert dict(found.labels) == {"__scheme__": "https", "job": "vllm"}


def test_labels_of_one_worker(file: Path) -> None:
    """Key, gRPC target and URL can be given outright; Kubernetes' meta labels say where it is."""
    found = one(
        file,
        "name-only",
        __worker__="ml/llama-0",
        __grpc_target__="[fd00::5]:9",
        __http_url__="http://proxy/llama-0",
        __meta_kubernetes_namespace="ml",
        __meta_kubernetes_pod_name="llama-0",
        __meta_kubernetes_pod_node_name="gpu-1",
        __canary__="on",
    )
    assert (found.key, found.target, found.http_url) == ("ml/llama-0", "[fd00::5]:9", "http://proxy/llama-0")
    assert (found.namespace, found.pod, found.node) == ("ml", "llama-0", "gpu-1")
    assert found.overrides == Overrides(canary=True)


def test_tls_and_token_of_one_target(file: Path, tmp_path: Path) -> None:
    """Paths are relative to the file, so that a directory can be mounted anywhere."""
    certs = make_certs(tmp_path / "tls")
    (tmp_path / "token").write_text("secret")
    found = one(
        file,
        __tls_ca_file__="tls/ca.pem",
        __tls_cert_file__="tls/client.pem",
        __tls_key_file__="tls/client-key.pem",
        __tls_server_name__="worker.internal",
        __token_file__="token",
    ).overrides
    assert found.tls is not None
    assert (found.tls.ca_file, found.tls.cert_file) == (certs.ca, certs.client_cert)
    assert (found.server_name, found.token_file) == ("worker.internal", tmp_path / "token")


def test_tls_can_be_switched_per_target(file: Path, tmp_path: Path) -> None:
    """off is plaintext whatever the source says; a bare on takes the files of the source, if it has any."""
    from vllm_cp import Tls

    base = Overrides(tls=Tls(ca_file=make_certs(tmp_path / "tls").ca), server_name="w")
    groups = [{"targets": [f"{word}:1"], "labels": {"__tls__": word}} for word in ("on", "off")]
    on, off = read(file, json.dumps(groups), overrides=base)
    assert on.overrides == base
    assert off.overrides == Overrides(plaintext=True)
    assert one(file, __tls__="on").overrides.tls == Tls()


@pytest.mark.parametrize(
    ("target", "labels", "words"),
    [
        ("http://h:1", {}, "is a URL; write h:1"),
        ("h:99999", {}, "a port is a number from 1 to 65535"),
        ("fd00::5:50051", {}, "IPv6 without brackets"),
        ("h:1", {"__grpc_port__": "grpc"}, "port 'grpc'"),
        ("h:1", {"__http_port__": "0"}, "port '0'"),
        ("unix:/run/v.sock", {"__http_port__": "80"}, "needs a target with a host"),
        ("h:1", {"__tls__": "maybe"}, "write on or off"),
        ("h:1", {"__canary__": "maybe"}, "write on or off"),
        ("h:1", {"__tls_ca_file__": "gone.pem"}, "cannot read TLS CA file"),
        ("h:1", {"__tls__": "off", "__tls_ca_file__": "ca.pem"}, "drop the one or the others"),
        ("h:1", {"__tls__": "off", "__tls_server_name__": "x"}, "no sense with plaintext"),
        ("h:1", {"__tls_cert_file__": "only.pem"}, "belong together"),
    ],
)
def test_a_mistake_with_one_target_costs_that_target(file: Path, target: str, labels: object, words: str) -> None:
    """It is there and says what is wrong with it, and the others are not disturbed."""
    groups = [{"targets": [target], "labels": labels}, {"targets": ["good:1"]}]
    bad, good = read(file, json.dumps(groups))
    assert bad.target is None
    assert words in bad.problem
    assert good == DiscoveredTarget(key="good:1", target="good:1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty: write []"),
        ("null", "it is empty"),
        ('[{"targets": ["a:1"', "it is not JSON"),
        ('{"targets": []}', "no list of target groups"),
        ("[3]", "group 1: it is no mapping"),
        ('[{"targets": []}, {"target": ["a:1"]}]', "group 2: unknown key 'target'"),
        ('[{"targets": "a:1"}]', "targets is no list of texts"),
        ('[{"targets": [1]}]', "targets is no list of texts"),
        ('[{"targets": ["a:1"], "labels": []}]', "labels is no mapping"),
        ('[{"targets": ["a:1"], "labels": {"pool": null}}]', "label 'pool' has a value that is no text"),
        ('[{"targets": ["a:1"], "labels": {"__http_prot__": "1"}}]', "unknown label '__http_prot__'"),
        ('[{"targets": ["a:1"], "labels": {"x": "\\ud800"}}]', "not Unicode"),
        ('[{"targets": ["a:1", "b:1"], "labels": {"__worker__": "w"}}]', "give each target a group of its own"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_file_says_what_is_wrong_with_it(file: Path, text: str, words: str) -> None:
    """Whatever is no target group is refused as a whole: a typo must not lose half of a fleet in silence."""
    file.write_text(text)
    source = FileDiscoverer([file])
    with pytest.raises(DiscoveryFailed, match=r"targets\.json"):
        source.look()
    assert words in (source.status.error or "")
    assert source.status.last_success is None


def test_broken_yaml_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Both are told from a syntax error in JSON."""
    for name, content, words in [("a.yml", b"- targets: [", "not YAML"), ("b.json", b"\xff\xfe", "not UTF-8")]:
        (tmp_path / name).write_bytes(content)
        source = FileDiscoverer([tmp_path / name])
        with pytest.raises(DiscoveryFailed, match=words):
            source.look()


async def test_a_broken_file_keeps_its_last_good_set(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so in the status and once in the log, keeps the time of the last success, and recovers by itself."""
    file.write_text(CHAT)
    source = watching(clock, file)
    async with Following(source) as seen:
        await seen.count(1)
        good = source.status
        file.write_text('[{"targets":')
        with caplog.at_level(logging.INFO, "vllm_cp.discovery"):
            await clock.advance(60.0)
            assert "not JSON" in (source.status.error or "")
            assert source.status.last_success == good.last_success
            assert len(seen.sets) == 1
            file.write_text('[{"targets": ["b:1"]}]')
            await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == ["b:1"]
        assert source.status.error is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_broken_file_beside_a_good_one(tmp_path: Path, clock: FakeClock) -> None:
    """One file's trouble stops neither the other's targets nor its changes."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(CHAT)
    bad.write_text("nonsense")
    source = watching(clock, good, bad)
    async with Following(source) as seen:
        await seen.count(1)
        assert "bad.json" in (source.status.error or "")
        good.write_text("[]")
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == []


async def test_reload_is_by_content(file: Path, clock: FakeClock) -> None:
    """A file that was written anew with the same content is no news."""
    file.write_text(CHAT)
    async with Following(watching(clock, file)) as seen:
        await seen.count(1)
        os.utime(file, (1.0, 1.0))
        await clock.advance(5.0)
        file.write_text(CHAT)
        await clock.advance(5.0)
        assert len(seen.sets) == 1


async def test_a_second_write_in_one_tick_of_the_clock_is_seen(file: Path, clock: FakeClock) -> None:
    """A fresh file is read again although time, size and inode are as before."""
    file.write_text(CHAT)
    now = file.stat().st_mtime_ns
    source = watching(clock, file)
    async with Following(source) as seen:
        await seen.count(1)
        file.write_text(CHAT.replace("a:1", "b:1"))
        os.utime(file, ns=(now, now))
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == ["b:1"]


async def test_a_settled_file_is_not_read_again(file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file costs one stat, not a read, every few seconds."""
    file.write_text(CHAT)
    os.utime(file, (1.0, 1.0))
    async with Following(watching(clock, file)) as seen:
        await seen.count(1)
        monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("read again"))
        await clock.advance(60.0)
        assert len(clock.naps) == 13


async def test_an_atomic_replacement_is_seen(tmp_path: Path, clock: FakeClock) -> None:
    """A ConfigMap is a link to a directory that is swapped: the path stays, everything behind it is new."""
    for name, target in [("one", "a:1"), ("two", "b:1")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.json").write_text(json.dumps([{"targets": [target]}]))
    link = tmp_path / "current"
    link.symlink_to("one")
    async with Following(watching(clock, link / "t.json")) as seen:
        await seen.count(1)
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").replace(link)
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == ["b:1"]


async def test_a_named_file_that_is_gone_keeps_its_targets(file: Path, clock: FakeClock) -> None:
    """Somebody named it, so its absence is trouble, not an empty fleet; an empty list is an empty fleet."""
    file.write_text(CHAT)
    source = watching(clock, file)
    async with Following(source) as seen:
        await seen.count(1)
        file.unlink()
        await clock.advance(5.0)
        assert "cannot read it: No such file" in (source.status.error or "")
        assert seen.keys == ["a:1"]
        file.write_text("[]")
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == []


async def test_files_come_and_go_with_a_pattern(tmp_path: Path, clock: FakeClock) -> None:
    """Files of a pattern are found while it runs, in the order of their names, and take their targets with them."""
    source = watching(clock, str(tmp_path / "*.json"), str(tmp_path / "z.yml"))
    (tmp_path / "z.yml").write_text("- targets: ['z:1']")
    async with Following(source) as seen:
        await seen.count(1)
        (tmp_path / "b.json").write_text('[{"targets": ["b:1"]}]')
        (tmp_path / "a.json").write_text('[{"targets": ["a:1"]}]')
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == ["a:1", "b:1", "z:1"]
        (tmp_path / "b.json").unlink()
        await clock.advance(5.0)
        await seen.count(3)
        assert seen.keys == ["a:1", "z:1"]
    assert source.status.error is None


async def test_a_worker_in_two_files_is_told(tmp_path: Path, clock: FakeClock) -> None:
    """The first file wins, whose name comes first; the status names the worker."""
    (tmp_path / "a.json").write_text(CHAT)
    (tmp_path / "b.json").write_text(CHAT.replace("chat", "other"))
    source = watching(clock, str(tmp_path / "*.json"))
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.targets["a:1"].pool == "chat"
        assert source.status.error == "a:1: named more than once, first one used"


async def test_a_certificate_that_comes_later_heals_its_target(file: Path, clock: FakeClock, tmp_path: Path) -> None:
    """The list hasn't changed, what it refers to has."""
    file.write_text('[{"targets": ["a:1"], "labels": {"__tls_ca_file__": "tls/ca.pem"}}]')
    os.utime(file, (1.0, 1.0))
    async with Following(watching(clock, file)) as seen:
        await seen.count(1)
        assert "cannot read TLS CA file" in seen.targets["a:1"].problem
        make_certs(tmp_path / "tls")
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.targets["a:1"].target == "a:1"


def test_without_a_loop_a_look_reads_at_most_once_per_interval(file: Path, clock: FakeClock) -> None:
    """look is what a synchronous fleet calls before each use, so it is cheap to call often."""
    file.write_text(CHAT)
    source = watching(clock, file)
    first = source.look()
    file.write_text("[]")
    assert source.look() is first
    clock.time += 5.0
    assert source.look().targets == ()


@pytest.mark.parametrize(
    ("files", "words"),
    [([], "at least"), (["targets.txt"], "must end in .json, .yml, .yaml"), (["dir/*"], "must end in")],
)
def test_names_that_could_never_be_read_are_refused(files: list[str], words: str) -> None:
    """A mistake in the configuration is told at once."""
    with pytest.raises(ConfigError, match=words):
        FileDiscoverer(files)
