"""The daemon as a process: flags, exit codes, signals, and what it says on which stream."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exporter.process import COMMAND, Exporter, run
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.config import Listen
from vllm_cp_exporter.listen import bind

#: Nobody listens there.
NOBODY = "127.0.0.1:9"
READY = 'vllm_cp_worker_ready{pool="default",worker="%s"} 1.0\n'
# The stop is promised within 2 s of the signal; the rest is a machine that has much else to do.
PROMISED_S = 2.5


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker() as made:
        yield made


# -- what is wrong before anything runs -------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no worker to watch: give --target [NAME=]HOST:PORT"),
        (["--target", ""], "the target is empty"),
        (["--target", "a:1", "--nonsense"], "No such option"),
        (["--target", "http://a:1"], "write NAME=HTTP_URL"),
        (["--target", "https://a:1/x,http://b"], "write NAME=HTTP_URL"),
        (["--target", "a:1,ftp://b"], "is no HTTP URL"),
        (["--target", "=a:1"], "has an empty name"),
        (["--target", "a:"], "ends without a port"),
        (["--target", "::1:5"], "IPv6 without brackets"),
        (["--target", "a:99999"], "a port is a number from 1 to 65535"),
        (["--target", "a:1", "--target", "a:1"], "two workers are called 'a:1'"),
        (["--target", "a:1", "extra"], "extra"),
        (["--target", "a:1", "--listen", "9400"], "has no port"),
        (["--target", "a:1", "--listen", ":::9400"], "IPv6 without brackets; write [::]:9400"),
        (["--target", "a:1", "--listen", "0.0.0.0:70000"], "has no port from 0 to 65535"),
        (["--target", "a:1", "--min-ready", "-1"], "min-ready"),
        (["--target", "a:1", "--min-ready", "two"], "min-ready"),
        (["--target", "a:1", "--ready-rung", "top"], "ready-rung"),
        (["--target", "a:1", "--expect", "much"], "expect"),
        (["--target", "a:1", "--probe-interval", "0"], "is no number of seconds above 0"),
        (["--target", "a:1", "--probe-interval", "nan"], "is no number of seconds above 0"),
        (["--target", "a:1", "--answer-within", "inf"], "is no number of seconds above 0"),
        (["--target", "a:1", "--info-interval", "1m"], "is no number of seconds above 0"),
        (["--target", "a:1", "--timeout", "-1"], "is no number of seconds above 0"),
        (["--target", "a:1", "--log-level", "loud"], "log-level"),
        (["--target", "a:1", "--log-format", "xml"], "log-format"),
        (["--target", "a:1", "--tls-ca", "/no/such/file"], "cannot read TLS CA file '/no/such/file'"),
        (["--target", "a:1", "--tls-cert", "x"], "--tls-cert and --tls-key belong together"),
        (["--target", "a:1", "--server-name", "x"], "--server-name is a name in a TLS certificate"),
        (["--target", "a:1", "--token-file", "/no/such"], "would cross the network in plaintext"),
        (["--target", "a:1", "--token-file", "/no/such", "--insecure-token"], "cannot read token file '/no/such'"),
        (["--target", "a\udcff:1"], "unprintable"),
        (["--target", "a:1", "--\udcff"], "No such option"),
    ],
)
def test_a_wrong_flag(args: list[str], said: str) -> None:
    """A flag that is wrong is one line that says what to write, exit code 2, and nothing on standard output."""
    ended = run(*args)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("vllm-cp-exporter: ")
    assert said in line


def test_a_wrong_variable() -> None:
    """What is wrong in the environment is said in the same way."""
    ended = run(VLLM_CP_EXPORTER_TARGET="a:1", VLLM_CP_EXPORTER_TIMEOUT="soon")
    assert ended.returncode == 2
    assert "'soon' is no number of seconds" in ended.stderr


def test_help_and_version() -> None:
    """Help and version go to standard output, exit code 0."""
    helped = run("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--probe-interval" in helped.stdout
    versioned = run("--version")
    assert (versioned.returncode, versioned.stderr) == (0, "")
    assert versioned.stdout.startswith("vllm-cp-exporter, version ")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_b35_a_busy_port(worker: FakeWorker, host: str) -> None:
    """A busy port is one line with address and port, exit code 1, and no worker was asked."""
    (taken,) = bind(Listen(host, 0))
    where = str(Listen(host, taken.getsockname()[1]))
    with taken:
        ended = run("--target", worker.target, "--listen", where)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"vllm-cp-exporter: cannot listen on {where}: Address already in use\n"
    assert not worker.calls


# -- the running daemon -----------------------------------------------------------------------


def test_it_watches_and_publishes(worker: FakeWorker) -> None:
    """Targets from the environment as well as from flags are watched, and the page says what they are."""
    with Exporter("--min-ready", "2", VLLM_CP_EXPORTER_TARGET=f"one={worker.target} two={NOBODY}") as exporter:
        page = exporter.eventually(lambda text: READY % "one" in text and 'worker_kv_blocks{pool="default"' in text)
        assert 'vllm_cp_worker_not_ready{pool="default",reason="unreachable",worker="two"} 1.0' in page
        assert 'vllm_cp_pool_min_ready{pool="default"} 2.0' in page
        exporter.eventually(lambda text: text == "ready\n", "/-/ready")
        assert exporter.get("/-/healthy") == "healthy\n"
        assert "one" in exporter.get("/")
        assert exporter.stop()[0] == 0
        assert exporter.stdout == ""


def test_a_worker_that_is_not_there_is_no_failure() -> None:
    """Workers that cannot be reached, resolved or understood are facts on the page; the daemon runs."""
    (listener,) = bind(Listen("127.0.0.1", 0))
    mute = f"127.0.0.1:{listener.getsockname()[1]}"
    with (
        listener,
        Exporter("--target", NOBODY, "--target", "no-such-host.invalid", "--target", f"mute={mute}") as exporter,
    ):
        page = exporter.eventually(lambda text: f'reason="unreachable",worker="{NOBODY}"}} 1.0' in text)
        assert page.count("vllm_cp_worker_ready{") == 3
        code, took = exporter.stop()
        assert code == 0
        assert took < PROMISED_S
        assert not [line for line in exporter.lines if "Traceback" in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b15_stopping_with_streams_open(worker: FakeWorker, number: signal.Signals) -> None:
    """Asked to stop while streams are open, an engine is silent and a worker absent: gone within 2 s, exit code 0."""
    with FakeWorker() as silent:
        silent.hang()
        targets = [f"--target={target}" for target in (worker.target, f"silent={silent.target}", NOBODY)]
        with Exporter(*targets) as exporter:
            exporter.eventually(lambda text: READY % worker.target in text)
            silent.wait_for_call("IsPaused")
            code, took = exporter.stop(number)
            assert code == 0
            assert took < PROMISED_S
            assert exporter.event("stopping")["signal"] == number.name
            exporter.event("stopped")
            assert not [line for line in exporter.lines if "Traceback" in line or "rror" in line]
            assert exporter.stdout == ""


def test_b15_stopping_while_starting() -> None:
    """A signal while the daemon is still starting ends it, too: exit code 0 and not a word."""
    script = """
import os, signal, sys
from vllm_cp_exporter import app

app._settings = lambda args: os.kill(os.getpid(), signal.SIG%s) or signal.pause()
sys.exit(app.main())
"""
    for name in ("TERM", "INT"):
        ended = subprocess.run([sys.executable, "-c", script % name], capture_output=True, timeout=30, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_b15_a_second_signal_does_not_wait() -> None:
    """A daemon whose clean-up hangs goes at the second signal at once."""
    with Exporter("--target", NOBODY, command=_with_a_watcher_that_hangs()) as exporter:
        exporter.event("started")
        os.kill(exporter.process.pid, signal.SIGINT)
        exporter.event("stopping")
        code, took = exporter.stop(signal.SIGINT)
        assert code == 1
        assert took < 1.0


def test_b15_a_hanging_clean_up() -> None:
    """Whatever hangs while it stops, the daemon is gone within 2 s."""
    with Exporter("--target", NOBODY, command=_with_a_watcher_that_hangs()) as exporter:
        exporter.event("started")
        code, took = exporter.stop()
        assert code == 0
        assert took < PROMISED_S
        exporter.event("watchers_hang")


def _with_a_watcher_that_hangs() -> list[str]:
    script = """
import asyncio, sys
from vllm_cp_exporter import app, watch

async def run(self):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

watch.Watcher.run = run
sys.exit(app.main(sys.argv[1:]))
"""
    return [sys.executable, "-c", script]


def _can_be_process_one() -> bool:
    try:
        return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _can_be_process_one(), reason="unshare --pid is not allowed here")
def test_b15_as_process_one(worker: FakeWorker) -> None:
    """As process 1 of a container, for which signals have no default, it stops like anywhere else."""
    command = ["unshare", "--pid", "--fork", *COMMAND]
    with Exporter("--target", worker.target, command=command) as exporter:
        exporter.eventually(lambda text: READY % worker.target in text)
        child = Path(f"/proc/{exporter.process.pid}/task/{exporter.process.pid}/children").read_text()
        code, took = exporter.stop(pid=int(child))
        assert code == 0
        assert took < PROMISED_S


# -- what it says ---------------------------------------------------------------------------


def test_b37_every_line_is_json(worker: FakeWorker) -> None:
    """With JSON chosen every line on standard error is a JSON object, also when Python warns about all it can."""
    with Exporter(
        "--target", worker.target, "--log-format=json", "--log-level=debug", PYTHONWARNINGS="always"
    ) as exporter:
        exporter.eventually(lambda text: READY % worker.target in text)
        worker.die(reported=True)
        assert exporter.event("fault_opened")["worker"] == worker.target
        exporter.stop()
        for line in exporter.lines:
            assert {"ts", "level", "event"} <= json.loads(line).keys()
        assert exporter.stdout == ""


def test_a_token_is_never_shown(worker: FakeWorker, tmp_path: Path) -> None:
    """The token reaches the worker and nobody else: no log line, no page."""
    secret = "s3cr3t-t0k3n"
    (tmp_path / "token").write_text(secret)
    flags = ("--token-file", str(tmp_path / "token"), "--insecure-token", "--log-level", "debug")
    with Exporter("--target", worker.target, *flags) as exporter:
        exporter.eventually(lambda text: READY % worker.target in text)
        assert any(secret in str(call.metadata) for call in worker.calls)
        pages = [exporter.get(path) for path in ("/metrics", "/", "/api/v1/episodes", "/-/ready")]
        exporter.stop()
        assert not [text for text in (*pages, *exporter.lines) if secret in text]


def test_b29_a_name_with_an_undecodable_byte(worker: FakeWorker) -> None:
    """A worker name that is no UTF-8 is shown with a replacement character, in any locale."""
    with Exporter("--target", f"w\udcff={worker.target}", LC_ALL="C", PYTHONUTF8="0") as exporter:
        exporter.eventually(lambda text: READY % "w\ufffd" in text)
        assert exporter.stop()[0] == 0


def test_b10_all_addresses(worker: FakeWorker) -> None:
    """Listening on [::] serves IPv4 and IPv6, and the line at the start says where."""
    with Exporter("--target", worker.target, listen="[::]:0") as exporter:
        where = exporter.event("started")["listen"]
        assert where.startswith("[::]:")
        assert exporter.get("/-/healthy") == "healthy\n"
        socket.create_connection(("::1", int(where.rpartition(":")[2])), timeout=5).close()


def test_plaintext_across_a_network_is_loud() -> None:
    """A control port asked in plaintext across a network is a gauge and a warning; on loopback it is neither."""
    with Exporter("--target", "192.0.2.1", "--target", NOBODY, "--target", "unix:/tmp/none.sock") as exporter:
        assert "vllm_cp_insecure_control_ports 1.0\n" in exporter.get("/metrics")
        assert exporter.event("insecure_control_ports")["first"] == "192.0.2.1"


def test_an_open_fault_survives_a_restart(worker: FakeWorker, tmp_path: Path) -> None:
    """With a state file, a fault that was open when the daemon stopped is open when it is back; counters start anew."""
    flags = ("--target", f"w={worker.target}", "--state-file", str(tmp_path / "state.json"))
    with Exporter(*flags) as exporter:
        exporter.eventually(lambda text: READY % "w" in text)
        worker.die(reported=True)
        before = exporter.eventually(lambda text: "fault_start_timestamp_seconds{" in text)
        assert exporter.stop()[0] == 0
    with Exporter(*flags) as exporter:
        after = exporter.eventually(lambda text: "fault_start_timestamp_seconds{" in text)
        assert "vllm_cp_state_file_ok 1.0\n" in after
    (start,) = [line for line in before.splitlines() if line.startswith("vllm_cp_worker_fault_start")]
    assert start in after
