"""``--via`` and ``episodes``: what a daemon knows, in the same records as from the workers themselves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.facts import RICH, RICH_MODEL, RICH_SOURCES
from tests.cli.held import FORMATS, held
from tests.cli.process import start
from tests.cli.test_watch import Lines
from tests.exporter.process import Exporter
from tests.exporter.views import GONE, UP, WALL, life, view
from vllm_cp.cli import _output, _times
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.landing import episodes
from vllm_cp_exporter.records import worker_record
from vllm_cp_exporter.snapshot import Facts, Snapshot

EPISODES = (
    Episode(
        cause=Cause.ENGINE_SILENT,
        start=WALL,
        end=WALL + 12.5,
        kind=EndKind.REPLACED,
        duration_s=12.5,
        instance_id="first",
    ),
    Episode(cause=Cause.UNREACHABLE, start=WALL + 60.0, detail="connection refused"),
)
URL = "http://127.0.0.1:09838"


class FakeDaemon:
    """A daemon with three workers: one that serves, one that is gone, one that is watched over HTTP only."""

    def __init__(self) -> None:
        facts = Facts(server=RICH, model=RICH_MODEL, sources=RICH_SOURCES)
        views = [
            view(key="ml/llama-0", target="10.0.0.1:8001", facts=facts, state=life(UP), episodes=EPISODES[:1]),
            view(
                key="ml/llama-1",
                target="10.0.0.2:8001",
                pool="code",
                state=life(UP, GONE, GONE),
                facts=Facts(sources_problem="not supported"),
                episodes=EPISODES[1:],
            ),
            view(key="web", target="", http_url="http://web:8000", state=life()),
        ]
        snapshot = Snapshot(workers=MappingProxyType({each.key: each for each in views}))
        self.pages: dict[str, Mapping[str, Any]] = {
            "/api/v1/workers": {"schema": 1, "workers": [worker_record(each, WALL + 90) for each in views]},
            "/api/v1/episodes": {"schema": 1, "episodes": episodes(snapshot)},
        }
        self.asked: list[str] = []
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                daemon.asked.append(self.path)
                page = daemon.pages.get(self.path)
                body = json.dumps(page).encode()
                self.send_response(200 if page is not None else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """The daemon, running."""
    made = FakeDaemon()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


VERBS = {
    "health": ("health",),
    "info": ("info",),
    "model": ("model",),
    "kv-sources": ("kv", "sources"),
    "ready": ("ready",),
    "episodes": ("episodes",),
}


@pytest.mark.parametrize("verb", VERBS)
def test_output_is_as_written_down(verb: str, daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each format, and on a terminal of 80 columns; what the daemon does not know has the reason why."""
    monkeypatch.setattr(_times, "local", lambda _: "03:04:05 UTC")
    for output in (*FORMATS, "80"):
        if output == "80":
            monkeypatch.setattr(_output, "terminal_width", lambda: 80)
        ended = cli(*VERBS[verb], "--via", daemon.url, *(() if output == "80" else ("-o", output)))
        held(f"via-{verb}.{output}", ended.out.replace(daemon.url, URL))
        assert ended.code == (0 if verb == "episodes" else 6)
        assert output != "80" or max(map(len, ended.out.splitlines())) <= 80
    held(f"via-{verb}.talk", ended.err.replace(daemon.url, URL))


def test_records_are_those_of_the_workers_themselves(cli: Cli) -> None:
    """Through the real daemon each read gives what the worker itself gives, apart from the times."""
    with (
        FakeWorker(info=RICH, model=RICH_MODEL, kv_sources=RICH_SOURCES) as worker,
        Exporter("--target", f"llama-0={worker.target}") as exporter,
    ):
        via = ("--via", f"http://{exporter.event('started')['listen']}")
        exporter.eventually(lambda page: '"model_id"' in page, "/api/v1/workers")
        exporter.eventually(lambda page: '"ready": true' in page, "/api/v1/workers")
        for verb in ("health", "info", "model", "kv-sources", "ready"):
            own = json.loads(cli(*VERBS[verb], "--target", worker.target, "-o", "json").out)
            told = json.loads(cli(*VERBS[verb], "--target", worker.target, "-o", "json", *via).out)
            assert [row.pop("target") for row in told] == ["llama-0"]
            assert [row.pop("target") for row in own] == [worker.target]
            assert _untimed(told) == _untimed(own), verb
        assert cli("episodes", *via) == (0, "", "")


def _untimed(thing: Any) -> Any:
    """Without times, and without proof and why: the daemon may have another proof."""
    if isinstance(thing, dict):
        told = {key: _untimed(value) for key, value in thing.items()}
        return {key: told[key] for key in told if key not in ("since", "proved_at", "why", "proof")}
    return [_untimed(each) for each in thing] if isinstance(thing, list) else thing


def test_choice(daemon: FakeDaemon, cli: Cli) -> None:
    """--target chooses by name or address, --pool by pool; a name that the daemon does not watch is 5."""
    via = ("--via", daemon.url, "-o", "name")
    assert cli("info", *via, "--target", "ml/llama-0").out == "ml/llama-0\n"
    assert cli("info", *via, "--target", "10.0.0.1").out == "ml/llama-0\n"
    assert cli("info", *via, "--pool", "chat", "--target", "10.0.0.1:8001").out == "ml/llama-0\n"
    assert cli("episodes", *via, "--pool", "code").out == "ml/llama-1\n"
    ended = cli("info", *via, "--target", "ml/llama-0", "--target", "ml/llama-9")
    assert (ended.code, ended.out) == (6, "ml/llama-0\n")
    assert ended.err.startswith("vllm-cp: ml/llama-9: ")
    assert "it watches no such worker" in ended.err
    ended = cli("info", *via, "--pool", "cod")
    assert (ended.code, ended.out) == (2, "")
    assert "the daemon knows no worker in the pool 'cod'" in ended.err


def test_rungs(daemon: FakeDaemon, cli: Cli) -> None:
    """ready --rung judges by another rung than the daemon does."""
    flags = ("--via", daemon.url, "--target", "ml/llama-0")
    assert cli("ready", *flags).code == 0
    assert cli("ready", *flags, "--rung", "serving").code == 0
    ended = cli("ready", *flags, "--rung", "warm", "-o", "json")
    assert json.loads(ended.out)[0]["rung"] == "warm"


@pytest.mark.parametrize(
    "args",
    [
        ("pause", "--mode", "keep", "--keep-cache"),
        ("watch",),
        ("audit",),
        ("health", "vllm.Inference"),
        ("ready", "--canary"),
        ("ft", "status"),
    ],
)
def test_verbs_that_a_daemon_cannot_answer(args: tuple[str, ...], daemon: FakeDaemon, cli: Cli) -> None:
    """They say so, name those that it can, and ask nobody."""
    ended = cli(*args, "--via", daemon.url)
    assert (ended.code, ended.out, daemon.asked) == (2, "", [])
    assert ended.err.startswith("vllm-cp: --via: a daemon can't answer '")
    assert "(a daemon answers health, info, model, kv sources, ready and episodes)" in ended.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--via", "exporter"), "--via: URL 'exporter' is no HTTP base URL; write http://exporter"),
        (("--via", "http://e:1", "--file-sd", "f.json"), "--file-sd: a daemon has found its workers"),
    ],
)
def test_usage(flags: tuple[str, ...], said: str, cli: Cli) -> None:
    """What can't be meant is a usage error."""
    ended = cli("info", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_daemon_in_trouble(verb: str, daemon: FakeDaemon, nobody: str, worker: FakeWorker, cli: Cli) -> None:
    """Nobody there is 3; something else at that URL, or another format, is said as such."""
    ended = cli(*VERBS[verb], "--via", f"http://{nobody}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (3, "", 1)
    for page in ({"schema": 2, "workers": [], "episodes": []}, {"hello": "world"}, None):
        for path in daemon.pages:
            daemon.pages[path] = page  # type: ignore[assignment]
        ended = cli(*VERBS[verb], "--via", daemon.url)
        assert (ended.code, ended.out, ended.err.count("\n")) == (7 if page is None else 5, "", 1)
    assert "is this the base URL of a vllm-cp-exporter?" in ended.err


def test_a_context_may_be_a_daemon(daemon: FakeDaemon, cli: Cli) -> None:
    """A context of --via alone serves the reads, and says so for the rest."""
    assert cli("context", "add", "prod", "--via", daemon.url, "--use").code == 0
    assert cli("info", "-o", "name").out == "ml/llama-0\n"
    assert cli("info", "--pool", "chat", "-o", "name").out == "ml/llama-0\n"
    ended = cli("resume")
    assert ended.code == 2
    assert ended.err.startswith("vllm-cp: context 'prod': a daemon can't answer 'resume'")


def test_open_and_newest(daemon: FakeDaemon, cli: Cli) -> None:
    """--open leaves out what is over, --count all but the newest."""
    flags = ("--via", daemon.url, "-o", "name")
    assert cli("episodes", *flags).out == "ml/llama-1\nml/llama-0\n"
    assert cli("episodes", *flags, "--open").out == "ml/llama-1\n"
    assert cli("episodes", *flags, "--count", "1").out == "ml/llama-1\n"


def test_live(worker: FakeWorker) -> None:
    """Without a daemon a fault is a line when it opens and another when it is over."""
    process = start("episodes", "--target", worker.target, "-o", "jsonl", "--count", "2")
    lines = Lines(process)
    deadline = time.monotonic() + 15
    while not [call for call in worker.calls if call.method == "Control.IsPaused"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    worker.die(reported=True)
    opened = lines.record()
    assert (opened["target"], opened["cause"], opened["end"]) == (worker.target, "engine_reported", None)
    worker.restart(instance_id="next")
    closed = lines.record()
    assert (closed["kind"], closed["start"]) == ("replaced", opened["start"])
    assert closed["duration_s"] > 0
    assert process.wait(10) == 0
    process.communicate()
