"""The configuration file: its form, its mistakes, and who wins over it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.exporter.process import run
from vllm_cp import ConfigError
from vllm_cp.discovery import DnsKind
from vllm_cp.models.ladder import Expect, Rung
from vllm_cp_exporter.config import Canary, ExporterConfig, Listen
from vllm_cp_exporter.configdump import redacted
from vllm_cp_exporter.docs import README
from vllm_cp_exporter.flags import command
from vllm_cp_exporter.lined import Mistakes
from vllm_cp_exporter.sources import DnsSource, FileSource, KubernetesSource

PEM = "-----BEGIN CERTIFICATE-----\n"
SECRET = "s3cr3t-t0k3n"


def write(directory: Path, text: str) -> Path:
    """A configuration file, with the files that it may name beside it."""
    (directory / "ca.pem").write_text(PEM)
    (directory / "token").write_text(f"{SECRET}\n")
    path = directory / "exporter.yaml"
    path.write_text(text)
    return path


def settings(*args: str | Path) -> ExporterConfig:
    """What a command line says."""
    chosen = command.main([str(arg) for arg in args], standalone_mode=False)
    exporter: ExporterConfig = chosen.exporter
    return exporter


def load(directory: Path, text: str, *flags: str) -> ExporterConfig:
    """What a file says, under some flags."""
    return settings("--config", write(directory, text), *flags)


def example() -> str:
    """The file that the README shows."""
    found = re.search(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


# -- what a file can say ---------------------------------------------------------------------


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """The file that the README shows is right, and says what it seems to say."""
    told = load(tmp_path, example())
    assert told.listen == Listen("::", 9645)
    assert (told.info_interval_s, told.engine_recovery_timeout_s) == (60, 120)
    assert (told.log_format, told.state_file) == ("json", tmp_path / "state.json")
    plain, chat, local = told.workers
    assert (plain.key, plain.source) == ("worker-0.ml.internal:8001", "config")
    assert plain.connection is not None
    assert plain.connection.token_file == tmp_path / "token"
    assert (chat.pool, chat.canary, chat.http and chat.http.url) == (
        "chat",
        Canary.OFF,
        "http://worker-1.ml.internal:8000",
    )
    assert chat.connection is not None
    assert chat.connection.server_name == "worker-1"
    assert (local.pool, local.rules.ready_rung, local.rules.answer_within_s) == ("batch", Rung.ANSWERING, 60)
    assert local.connection is not None
    assert local.connection.target == "127.0.0.1:8001"
    assert dict(told.min_ready) == {"chat": 2, "batch": 1}
    assert told.pools["standby"].expect is Expect.SUSPENDED
    files, dns, pods = told.sources
    assert isinstance(files, FileSource)
    assert files.files == (str(tmp_path / "targets.d" / "*.json"),)
    assert isinstance(dns, DnsSource)
    assert dns.dns.kind is DnsKind.SRV
    assert isinstance(pods, KubernetesSource)
    assert (pods.namespace, pods.label_selector, pods.window_s) == ("ml", "app=vllm", 30)
    assert (told.modules["edge"].rung, told.modules["edge"].timeout_s) == (Rung.ANSWERING, 3)
    assert told.probe_allow == ("*.ml.internal", "10.20.0.0/16")


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    """A file that says nothing leaves everything as it is, and workers may come later."""
    for text in ("", "# nothing\n", "pools:\ntargets:\n"):
        assert load(tmp_path, text) == ExporterConfig()


def test_it_is_dumped_as_it_is_read(tmp_path: Path) -> None:
    """What is dumped of the settings in force is a file that says the same, with the names of secret files only."""
    text = example().replace(
        "  kubernetes:\n", "  kubernetes:\n    name: ml\n    canary: on\n    tls: {ca_file: ca.pem}\n"
    )
    told = load(tmp_path, text)
    dumped = yaml.safe_dump(redacted(told))
    assert str(tmp_path / "token") in dumped
    assert SECRET not in dumped + repr(told) + repr(told.sources)
    assert load(tmp_path, dumped) == told
    assert load(tmp_path, yaml.safe_dump(redacted(ExporterConfig()))) == ExporterConfig()


def test_http_only_targets(tmp_path: Path) -> None:
    """A worker without gRPC is a name and a URL, in either form."""
    told = load(tmp_path, "targets: [a=http://a:8000, {name: b, http: 'https://b:8000', tls: {ca_file: ca.pem}}]")
    a, b = told.workers
    assert (a.connection, a.http and a.http.url) == (None, "http://a:8000")
    assert b.http is not None
    assert b.http.tls is not None
    assert load(tmp_path, yaml.safe_dump(redacted(replace(told, workers=(a,))))).workers == (a,)


def test_yaml_words_are_words(tmp_path: Path) -> None:
    """YAML takes no, on and 8001 for something else; a name stays a name and off is a choice like any other."""
    told = load(
        tmp_path, "defaults: {canary: off}\npools: {no: {min_ready: 1}}\ntargets: [{name: 12, grpc: a, pool: no}]"
    )
    assert (told.workers[0].key, told.workers[0].pool, dict(told.min_ready)) == ("12", "no", {"no": 1})


def test_a_node_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file serves every node of a DaemonSet."""
    text = "discovery: {kubernetes: {namespace: '*', node_from_env: NODE}}"
    with pytest.raises(Mistakes, match="NODE is not set"):
        load(tmp_path, text)
    monkeypatch.setenv("NODE", "gpu-7")
    (source,) = load(tmp_path, text).sources
    assert isinstance(source, KubernetesSource)
    assert (source.node, source.namespace) == ("gpu-7", None)


# -- who wins --------------------------------------------------------------------------------


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag beats its variable, a variable beats the file, and the file beats the default."""
    text = "probe_interval: 7\ninfo_interval: 70\nlisten: ':1'\ndefaults: {answer_within: 20, timeout: 2}"
    monkeypatch.setenv("VLLM_CP_EXPORTER_PROBE_INTERVAL", "8")
    monkeypatch.setenv("VLLM_CP_EXPORTER_INFO_INTERVAL", "80")
    told = load(tmp_path, text, "--info-interval", "90", "--answer-within", "15", "--target", "a")
    assert (told.probe_interval_s, told.info_interval_s, told.listen.port) == (8, 90, 1)
    assert told.workers[0].rules.answer_within_s == 15, "said aloud, a default wins too"
    assert told.connection.timeout_s == 2


def test_a_pool_wins_over_the_default_of_all_pools(tmp_path: Path) -> None:
    """What a pool says for itself holds, whoever sets the default."""
    text = "pools: {slow: {answer_within: 60}, fast: {}}\ntargets: [{grpc: a, pool: slow}, {grpc: b, pool: fast}]"
    told = load(tmp_path, text, "--answer-within", "10")
    assert [worker.rules.answer_within_s for worker in told.workers] == [60, 10]


def test_targets_of_flags_and_file(tmp_path: Path) -> None:
    """Both are watched; of two with one name the flag's is."""
    told = load(
        tmp_path,
        "targets: [w=a:1, v=b:1]\npools: {p: {min_ready: 1}}",
        "--target",
        "w=c:1",
        "--pool",
        "p",
        "--min-ready",
        "3",
    )
    assert [(worker.key, worker.source) for worker in told.workers] == [("w", "flags"), ("v", "config")]
    assert dict(told.min_ready) == {"p": 3}


def test_flags_give_what_the_file_needs(tmp_path: Path) -> None:
    """A token in the file is fine when a flag brings the TLS that it needs."""
    write(tmp_path, "")
    told = load(tmp_path, "defaults: {token_file: token}", "--tls-ca", str(tmp_path / "ca.pem"))
    assert told.connection.tls is not None


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("polls: {}", 1, "unknown key 'polls'; did you mean 'pools'?"),
        ("a: 1", 1, "unknown key 'a'; known here: listen, probe_interval"),
        ("\npools:\n  a:\n    min_redy: 1", 4, "unknown key 'min_redy' in pools.a; did you mean 'min_ready'?"),
        ("defaults: {token: x}", 1, "unknown key 'token' in defaults; did you mean 'token_file'?"),
        ("targets:\n- {grpc: a, pol: x}", 2, "unknown key 'pol' in targets[0]; did you mean 'pool'?"),
        ("pools: {a: {}}\npools: {}", 2, "pools: the key is there twice"),
        ("- a", 1, "the file is no mapping"),
        ("[1, 2]: x", 1, "a key is one word"),
        ("targets: a", 1, "targets: this is no list"),
        ("pools: [a]", 1, "pools: this is no mapping of keys to values"),
        ("targets: [[a]]", 1, "targets[0]: this is no mapping of keys to values"),
        ("listen: {a: b}", 1, "listen: write one value here, not a list or a mapping"),
        ("listen:", 1, "listen: it has no value"),
        ("listen: ''", 1, "listen: it is empty"),
        ("listen: here", 1, "listen: listen address 'here' has no port from 0 to 65535"),
        ("probe_interval: 5 minutes", 1, "probe_interval: '5 minutes' is no time above 0 and up to a day"),
        ("probe_interval: 0", 1, "probe_interval: '0' is no time above 0"),
        ("info_interval: 25h", 1, "info_interval: '25h' is no time above 0"),
        ("engine_recovery_timeout: .inf", 1, "engine_recovery_timeout: '.inf' is no time above 0"),
        ("log: {level: loud}", 1, "log.level: 'loud' is none of debug, info, warning, error"),
        ("log: {format: xml}", 1, "log.format: 'xml' is none of logfmt, json"),
        ("pools: {a: {min_ready: -1}}", 1, "pools.a.min_ready: '-1' is no whole number from 0 up"),
        ("pools: {a: {ready_rung: top}}", 1, "pools.a.ready_rung: 'top' is none of reachable, serving"),
        ("pools: {a: {expect: much}}", 1, "pools.a.expect: 'much' is none of serving, suspended, any"),
        ("pools: {a: {canary: maybe}}", 1, "pools.a.canary: 'maybe' is none of off, once, always"),
        ("defaults: {insecure_token: sure}", 1, "defaults.insecure_token: 'sure' is neither true nor false"),
        ("defaults:\n  tls: {ca_file: none.pem}", 2, "defaults.tls: cannot read TLS CA file"),
        ("defaults: {tls: {cert_file: ca.pem}}", 1, "a client certificate and its key belong together"),
        ("\ndefaults: {token_file: token}", 2, "defaults: the token would cross the network in plaintext: give tls"),
        ("defaults: {token_file: nope, insecure_token: true}", 1, "cannot read token file"),
        ("defaults: {server_name: x}", 1, "defaults: server_name is a name in a TLS certificate: give tls"),
        ("listen: !!python/object:os.system x", 1, "the tag tag:yaml.org,2002:python/object:os.system means nothing"),
        ("listen: !x y", 1, "listen: the tag !x means nothing here"),
        ("targets: [a:99999]", 1, "targets[0]: target 'a:99999' has port '99999'"),
        ("targets: [{name: x}]", 1, "targets[0]: give its address: grpc, http, or both"),
        ("targets: [{http: 'http://b'}]", 1, "targets[0]: a target without grpc needs a name"),
        ("targets: [{grpc: a, http: 'ftp://b'}]", 1, "targets[0]: URL 'ftp://b' is no HTTP base URL"),
        ("targets: [w=a, {name: w, grpc: b}]", 1, "targets[1]: two targets are called 'w'"),
        ("targets: [{grpc: a, canary: on}]", 1, "targets[0]: a canary is only sent to a worker that is idle"),
        ("defaults: {canary: once}\ntargets: [a]", 2, "targets[0]: a canary is only sent"),
        ("targets: [{grpc: a, tls: false, server_name: x}]", 1, "it makes no sense with plaintext"),
        (
            "targets: [{grpc: a, token_file: token}]",
            1,
            "targets[0]: a token for a would cross the network in plaintext",
        ),
        ("discovery: {file: []}", 1, "unknown key 'file' in discovery; did you mean 'file_sd'?"),
        ("discovery: {file_sd: [a.txt]}", 1, "must end in .json, .yml, .yaml"),
        ("discovery: {file_sd: []}", 1, "file_sd needs one file name or pattern at least"),
        ("discovery: {dns: [{name: a}]}", 1, "discovery.dns[0]: a: the gRPC port is missing"),
        ("discovery: {dns: [{name: a, kind: srv, port: 1}]}", 1, "a: SRV records bring the port: drop it"),
        ("discovery: {dns: [{port: 1}]}", 1, "discovery.dns[0]: give the name to resolve: name"),
        ("discovery: {dns: [{name: a, port: 0}]}", 1, "discovery.dns[0].port: '0' is no port from 1 to 65535"),
        ("discovery: {dns: [{name: a, port: 1}, {name: a, port: 1}]}", 1, "two sources are called dns:a:1"),
        ("discovery: {kubernetes: {}}", 1, "discovery.kubernetes: give a namespace, or '*' for all of them"),
        ("discovery: {kubernetes: [{namespace: a}, {namespace: b}]}", 1, "two sources are called kubernetes; give one"),
        ("discovery: {kubernetes: {namespace: a, node: b, node_from_env: C}}", 1, "exclude each other"),
        ("modules: {a: {rung: top}}", 1, "modules.a.rung: 'top' is none of"),
        ("modules: {a: {token_file: token}}", 1, "modules.a: the token would cross the network in plaintext"),
        ("modules:\n  a: {server_name: x}", 2, "modules.a: server_name is the name in a TLS certificate"),
        ("probe_allow: [10.0.0.1/8]", 1, "probe_allow[0]: '10.0.0.1/8' is no network"),
        ("probe_allow: ['a b']", 1, "probe_allow[0]: 'a b' holds spaces"),
        ("a: [1", 1, "this is no YAML"),
        ("a: b\n\tc: d", 2, "this is no YAML"),
        ("a: 1\n---\nb: 2", 2, "this is no YAML"),
        ("a: \x01", 1, "this is no YAML: unprintable character"),
    ],
)
def test_a_mistake(tmp_path: Path, text: str, line: int, said: str) -> None:
    """Each mistake has a message of its own, with the file and the line."""
    with pytest.raises(Mistakes) as caught:
        load(tmp_path, text)
    assert [
        found
        for found in caught.value.lines
        if found.startswith(f"{tmp_path / 'exporter.yaml'}:{line}: ") and said in found
    ], caught.value.lines
    assert SECRET not in str(caught.value)


def test_every_mistake_at_once(tmp_path: Path) -> None:
    """All mistakes of a file are told together, in the order of its lines, and none is told for another's sake."""
    text = "listen: x\ndefaults:\n  tls: {ca_file: gone.pem}\n  token_file: token\ntargets:\n- a:1\n- b:x\npool: {}\n"
    with pytest.raises(Mistakes) as caught:
        load(tmp_path, text)
    assert [line.split(":")[1] for line in caught.value.lines] == ["1", "3", "7", "8"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A file that can't be read is one mistake; so is one that is no text."""
    with pytest.raises(Mistakes, match=r"cannot read config file .*: No such file"):
        settings("--config", tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(Mistakes, match="is not UTF-8 text"):
        settings("--config", tmp_path / "bytes.yaml")


def test_deep_and_looping_files_end(tmp_path: Path) -> None:
    """A file made to hurt is a mistake like any other."""
    for text in ("[" * 5000, "pools: &a {x: *a}", "a: &a [*a]"):
        with pytest.raises(Mistakes):
            load(tmp_path, text)


def test_a_mistake_in_a_flag_is_not_the_files(tmp_path: Path) -> None:
    """What is wrong on the command line is said of the command line."""
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key belong together") as caught:
        load(tmp_path, "", "--tls-cert", "x")
    assert not isinstance(caught.value, Mistakes)


def test_check_config(tmp_path: Path) -> None:
    """--check-config says ok and 0, or all the mistakes and 2; it starts nothing."""
    right = run("--config", str(write(tmp_path, example())), "--check-config")
    assert (right.returncode, right.stdout, right.stderr) == (0, "ok: 3 targets, 3 discovery sources\n", "")
    wrong = run("--config", str(write(tmp_path, "listen: x\npol: y\n")), "--check-config")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    first, second = wrong.stderr.splitlines()
    assert "exporter.yaml:1: listen" in first
    assert "exporter.yaml:2: unknown key 'pol'" in second
