"""The spine, end to end: a genuine frontend with four ranks, the daemon as a process, and Debian's own Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.process import Exporter
from tests.real.ports import HOST, Ports
from tests.real.processes import Child
from tests.real.stack import EngineFacts, Stack, StackFactory
from tests.real.waiting import eventually
from tests.recovery.pace import IN_CI, PATIENCE_S

RANKS, BLOCKS = 4, 1001


def tool(name: str) -> str:
    """Where it is; skip when it is not there, fail instead where a skip would go unseen."""
    path = shutil.which(name)
    if path is None:
        word = f"{name} is not installed (Debian: prometheus)"
        if IN_CI or os.environ.get("VLLM_CP_REQUIRE_REAL") == "1":
            pytest.fail(word, pytrace=False)
        pytest.skip(word)
    return path


class Prometheus:
    """A running server, asked over its API."""

    def __init__(self, base: str) -> None:
        self._base = base

    def ask(self, path: str, **query: str) -> Any:
        """An answer of its API."""
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """The one value of an instant query; ``None`` while there is none."""
        found = self.ask("query", query=query)["result"]
        assert len(found) < 2, f"{query} is ambiguous: {found}"
        return float(found[0]["value"][1]) if found else None

    def until(self, query: str, check: Callable[[float], bool]) -> float:
        """The value of a query, once it is so."""

        def found() -> tuple[float] | None:
            value = self.value(query)
            return (value,) if value is not None and check(value) else None

        answer = eventually(found, PATIENCE_S, query, every=0.05)
        assert answer is not None
        return answer[0]


class Relay(ThreadingHTTPServer):
    """Stands between Prometheus and the daemon: passes on what Prometheus accepts, or asks for something else, and
    remembers what came. Old versions of Prometheus cannot be told which protocol to ask for."""

    def __init__(self, page: str, accept: str | None = None) -> None:
        super().__init__((HOST, 0), _RelayHandler)
        self.page = page
        self.accept = accept
        self.came: set[str] = set()

    @property
    def listen(self) -> str:
        """``host:port``."""
        return f"{HOST}:{self.server_address[1]}"

    def __enter__(self) -> Relay:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _RelayHandler(BaseHTTPRequestHandler):
    server: Relay

    def do_GET(self) -> None:
        accept = self.server.accept or self.headers["Accept"]
        with urllib.request.urlopen(urllib.request.Request(self.server.page, headers={"Accept": accept})) as answer:
            body, kind = answer.read(), answer.headers["Content-Type"]
        self.server.came.add(kind.partition(";")[0])
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def config(targets: Mapping[str, str]) -> str:
    """One job per name. JSON is YAML too."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [listen]}]} for job, listen in targets.items()]
    return json.dumps({"global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"}, "scrape_configs": jobs})


@contextmanager
def scraping(targets: Mapping[str, str], directory: Path, ports: Ports) -> Iterator[Prometheus]:
    """Prometheus over these addresses, by the name of their job."""
    binary, (port,) = tool("prometheus"), ports.take()
    path = directory / "prometheus.yml"
    path.write_text(config(targets))
    command = [binary, f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address={HOST}:{port}"]
    log = directory / "prometheus.log"
    with ExitStack() as after:
        child = Child(command, log)
        after.callback(child.stop, grace=2.0)
        base = f"http://{HOST}:{port}"

        def up() -> bool:
            if child.exit_code is not None:
                raise RuntimeError(f"prometheus ended with {child.exit_code}: {log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{base}/-/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        eventually(up, 2 * PATIENCE_S, "prometheus to be ready", every=0.05)
        yield Prometheus(base)


@pytest.fixture
def frontend(stack: StackFactory) -> Stack:
    """Four ranks that publish KV events."""
    return stack(engines=RANKS, kv_events=True, facts=EngineFacts(num_gpu_blocks=BLOCKS, instance_id="first"))


def test_from_the_genuine_frontend_to_prometheus(frontend: Stack, tmp_path: Path, ports: Ports) -> None:
    """Prometheus has the KV blocks of four ranks summed once, their four sources, and the fault of one that dies, in
    either format of the page, and finds no fault with it."""
    tool("prometheus")
    arguments = ["--probe-interval", "0.2", "--answer-within", "1", f"--target=w={frontend.target}"]
    with Exporter(*arguments) as exporter:
        exporter.eventually(lambda text: 'vllm_cp_worker_ready{pool="default",worker="w"} 1.0' in text)
        page = f"http://127.0.0.1:{exporter.event('started')['listen'].rpartition(':')[2]}/metrics"
        with Relay(page) as own, Relay(page, "text/plain;version=0.0.4") as text:
            relays = {"openmetrics": own, "text": text}
            with scraping({job: relay.listen for job, relay in relays.items()}, tmp_path, ports) as server:
                for job in relays:
                    _serves(server, job)
                frontend.die(1)
                for job in relays:
                    _has_a_fault(server, job)
                for target in server.ask("targets")["activeTargets"]:
                    assert (target["health"], target["lastError"]) == ("up", "")
            assert (own.came, text.came) == ({"application/openmetrics-text"}, {"text/plain"})
        assert not [line for line in exporter.lines if "level=error" in line]
    said = (tmp_path / "prometheus.log").read_text().splitlines()
    assert not [line for line in said if "level=warn" in line and "scrape" in line]


def _serves(server: Prometheus, job: str) -> None:
    of = f'job="{job}",worker="w"'
    server.until(f"vllm_cp_worker_ready{{{of}}}", lambda value: value == 1)
    assert server.until(f"vllm_cp_worker_kv_blocks{{{of}}}", lambda value: value > 0) == RANKS * BLOCKS
    assert server.value(f"sum by (worker) (vllm_cp_worker_kv_blocks{{{of}}})") == RANKS * BLOCKS
    assert server.value(f"vllm_cp_worker_kv_event_sources{{{of}}}") == RANKS
    assert server.value(f'vllm_cp_worker_parallelism{{{of},dimension="data"}}') == RANKS
    assert server.value(f"sum(vllm_cp_worker_faults_total{{{of}}})") == 0
    assert server.value(f"count(vllm_cp_worker_not_ready{{{of}}} == 1)") is None


def _has_a_fault(server: Prometheus, job: str) -> None:
    of = f'job="{job}",worker="w"'
    server.until(f"vllm_cp_worker_ready{{{of}}}", lambda value: value == 0)
    server.until(f'vllm_cp_worker_not_ready{{{of},reason="not_serving"}}', lambda value: value == 1)
    # A counter that was there at zero shows its first fault as an increase.
    server.until(f"sum(increase(vllm_cp_worker_faults_total{{{of}}}[1m]))", lambda value: value > 0)
    assert server.value(f"sum(vllm_cp_worker_faults_total{{{of}}})") == 1
    # A dead engine still reports what it was configured with.
    assert server.value(f"vllm_cp_worker_kv_blocks{{{of}}}") == RANKS * BLOCKS


def test_promtool_has_nothing_to_say_about_the_live_page(frontend: Stack) -> None:
    """promtool check metrics is content with the page of a genuine worker, before and after its death."""
    promtool = tool("promtool")
    with Exporter("--probe-interval", "0.2", f"--target=w={frontend.target}") as exporter:
        exporter.eventually(lambda text: "vllm_cp_worker_kv_event_sources{" in text)
        for deed in (lambda: None, lambda: frontend.die(0)):
            deed()
            page = exporter.eventually(lambda text: 'rung="reachable"' in text)
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=30, check=False
            )
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
