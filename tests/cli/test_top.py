"""``top``: the fleet on one screen, on any terminal, and as one frame where there is none."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.held import FORMATS, held
from tests.cli.process import COMMAND, Terminal, environment, run
from vllm_cp.cli import _output, _top_screen
from vllm_cp.cli._top_live import keys_of
from vllm_cp.cli._top_screen import VIEW, Screen
from vllm_cp.testing import FakeHttp, FakeWorker

NOW = 1_700_000_000.0


def _record(name: str, *, state: str = "ready", **facts: Any) -> dict[str, Any]:
    up = state == "ready"
    return {
        "target": name,
        "ready": up,
        "state": state,
        "rungs": {
            "reachable": up,
            "serving": up,
            "answering": up,
            "admitting": up,
            "warm": None if up else False,
        },
        "why": "" if up else "connection refused",
        "kv_blocks": 4096 if up else None,
        "running": None,
        "waiting": None,
        "kv_used_ratio": None,
        "faults": 0,
        "fault_since": None,
        "last_recovery_s": None,
        "restarts": 0,
        "engine_version": "0.33.0",
        "instance_id": "first",
        **facts,
    }


FLEET = [
    _record("ml/llama-0", running=12, waiting=3, kv_used_ratio=0.625),
    _record("ml/llama-1", running=2, waiting=0, kv_used_ratio=0.1, faults=2, last_recovery_s=12.5),
    _record("ml/llama-with-a-name-that-is-longer-than-others-2", state="unreachable", faults=1),
    _record("ml/llama-3", state="engine_silent"),
]


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_top_screen, "local_now", lambda _: "03:04:05 UTC")


def _screen(*keys: str) -> Screen:
    screen = Screen(colour=False)
    for key in keys:
        screen.press(key)
    return screen


def _names(frame: str) -> list[str]:
    return re.findall(r"ml/llama-(\d|with)", frame)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (132, 12)])
def test_frames_are_as_written_down(width: int, height: int) -> None:
    """At 80 columns, at 40 and at 132: no line is wider, and there are as many as the terminal has."""
    frame = _screen().frame(FLEET, width, height, NOW)
    assert len(frame.split("\n")) == height
    assert max(map(len, frame.split("\n"))) <= width
    held(f"top-frame.{width}", frame + "\n")


def test_colour_takes_no_room() -> None:
    """With colours it is the same frame."""
    painted = Screen(colour=True).frame(FLEET, 80, 24, NOW)
    assert "\x1b[32mready" in painted
    assert re.sub(r"\x1b\[\d*m", "", painted) == _screen().frame(FLEET, 80, 24, NOW)


def test_order() -> None:
    """s goes through the columns, S back, r turns the order; what is unknown is last."""
    assert _names(_screen().frame(FLEET, 132, 24)) == ["0", "1", "with", "3"]
    assert _names(_screen("s").frame(FLEET, 132, 24)) == ["0", "1", "3", "with"]
    assert _names(_screen("s", "r").frame(FLEET, 132, 24)) == ["with", "3", "1", "0"]
    by_faults = _screen(*["S"] * 2)
    assert "sort: faults" in by_faults.frame(FLEET, 132, 24)
    assert _names(by_faults.frame(FLEET, 132, 24)) == ["1", "with", "0", "3"]
    every = _screen(*["s"] * 10)
    assert "sort: as given" in every.frame(FLEET, 132, 24)


def test_filter() -> None:
    """/ filters by name or state as it is typed; enter keeps it, escape goes back, escape again shows all."""
    screen = _screen("/", *"UNREACH")
    assert _names(screen.frame(FLEET, 132, 24)) == ["with"]
    assert "filter: UNREACH_" in screen.frame(FLEET, 132, 24)
    screen.press("back")
    screen.press("enter")
    assert "(1 of 4)" in screen.frame(FLEET, 132, 24)
    for key in ("/", "x", "esc"):
        screen.press(key)
    assert _names(screen.frame(FLEET, 132, 24)) == ["with"]
    screen.press("esc")
    assert len(_names(screen.frame(FLEET, 132, 24))) == 4
    assert not screen.done
    screen.press("q")
    assert screen.done


def test_q_in_a_filter_is_a_letter() -> None:
    """While a filter is typed q is a letter of it."""
    assert not _screen("/", "q").done


def test_moving() -> None:
    """A fleet that is longer than the screen is moved through, no further than its ends; columns keep their places."""
    fleet = [_record(f"ml/llama-{number}") for number in range(9)]
    screen = _screen()
    assert _names(screen.frame(fleet, 80, 6)) == ["0", "1", "2"]
    assert "1-3 of 9" in screen.frame(fleet, 80, 6)
    for key, first in (("down", "1"), ("pgdn", "4"), ("pgdn", "6"), ("j", "6"), ("k", "5"), ("pgup", "2"), ("up", "1")):
        screen.press(key)
        assert _names(screen.frame(fleet, 80, 6))[0] == first
    assert _names(screen.frame(fleet, 80, 24)) == [str(number) for number in range(9)]


def test_what_is_not_known_of_all_is_no_sum() -> None:
    """A sum over a part of the fleet says that it is one, and one over nobody is not there."""
    assert "14 running+" in _screen().frame(FLEET, 132, 24)
    assert "14 running," in _screen().frame(FLEET[:2], 132, 24)
    assert "running" not in _screen().frame(FLEET[2:], 132, 24)


def test_forged_names_move_no_cursor() -> None:
    """Text of a worker is shown as text."""
    assert "\x1b" not in _screen().frame([_record("a\x1b[2Jb", why="\x1b]0;title\x07")], 132, 24)


@pytest.mark.parametrize(
    ("text", "keys", "rest"),
    [
        ("sr", ["s", "r"], ""),
        ("\x1b[A\x1bOBq", ["up", "down", "q"], ""),
        ("\x1b[5~\x1b[6~", ["pgup", "pgdn"], ""),
        ("\x1b", [], "\x1b"),
        ("a\x1b[", ["a"], "\x1b["),
        ("\x1b[1;5Cq", ["q"], ""),
        ("\r\x7f", ["enter", "back"], ""),
        ("é", ["é"], ""),
    ],
)
def test_keys(text: str, keys: list[str], rest: str) -> None:
    """What terminals send for keys; a sequence that is not known is swallowed whole."""
    assert keys_of(text) == (keys, rest)


def test_one_frame(cli: Cli, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--once gives records like any verb, with the load joined from /metrics where there is an HTTP server."""
    with FakeWorker(info=None) as worker, FakeHttp(kind="rust") as http:
        worker.set(total_kv_blocks=4096, instance_id="first")
        http.set(running=3, waiting=1, generation_tokens=10, kv_cache_usage=0.25)
        targets = ("--target", worker.target, "--target", nobody)
        names = {worker.target: "127.0.0.1:11111", nobody: "127.0.0.1:22222"}
        port = http.url.rpartition(":")[2]
        for output in (*FORMATS, "80"):
            if output == "80":
                monkeypatch.setattr(_output, "terminal_width", lambda: 80)
            flags = () if output == "80" else ("-o", output)
            got = cli("top", "--once", *targets, "--http-url", f"http://{{host}}:{port}", *flags)
            text = got.out
            for target, name in names.items():
                text = text.replace(target.ljust(len(name)), name.ljust(len(target))).replace(target, name)
            assert got.code == 6
            held(f"top-once.{output}", re.sub(r"ipv4:[\d.:]+", "ipv4:127.0.0.1:22222", text))


def test_no_terminal(worker: FakeWorker) -> None:
    """In a pipe it says so and prints one frame, without a colour or a cursor in it."""
    got = run("top", "--target", worker.target)
    assert got.code == 0
    assert got.err == "vllm-cp: standard output is no terminal that can be painted: this is one frame\n"
    assert worker.target in got.out
    assert "\x1b" not in got.out


def test_live(worker: FakeWorker) -> None:
    """It takes a screen of its own, follows a pause, a key and a resize, and gives the screen back."""
    with Terminal("top", "--target", worker.target, "--every", "0.2", env={"NO_COLOR": "1"}) as terminal:
        shown = terminal.expect("####?")
        assert "\x1b[?1049h" in shown
        worker.fail("IsPaused", "INTERNAL", "engine failed: gone")
        terminal.expect("engine_error")
        terminal.press("s")
        terminal.expect("sort: target")
        terminal.resize(132)
        terminal.expect("WHY")
        terminal.press("q")
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_end_by_signal(number: signal.Signals, code: int, worker: FakeWorker, silent: str) -> None:
    """A signal ends it within three seconds with its own code, the screen given back, also beside a silent worker."""
    with Terminal("top", "--target", worker.target, "--target", silent) as terminal:
        terminal.expect("LADDER")
        began = time.monotonic()
        terminal.signal(number)
        assert terminal.end() == code
        assert time.monotonic() - began < 3
        assert "\x1b[?1049l" in terminal.shown
        assert "Traceback" not in terminal.shown


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here: the pseudo-terminal tests stand alone")
def test_in_tmux(worker: FakeWorker, tmp_path: Any) -> None:
    """What a person sees in tmux at 80 columns: the fleet, a filter as it is typed, and the shell's screen after q."""
    socket = str(tmp_path / "tmux")

    def tmux(*args: str) -> str:
        done = subprocess.run(["tmux", "-S", socket, *args], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout

    def sees(text: str) -> str:
        deadline = time.monotonic() + 15
        while text not in (pane := tmux("capture-pane", "-p")):
            assert time.monotonic() < deadline, pane
            time.sleep(0.05)
        return pane

    command = shlex.join([*COMMAND, "top", "--target", worker.target])
    script = f"echo before; {command}; echo ended with $?; sleep 60"
    plain = environment()
    subprocess.run(
        ["tmux", "-S", socket, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "10", script],
        env=plain,
        check=True,
        timeout=10,
    )
    try:
        pane = sees("####?")
        assert "before" not in pane
        assert max(map(len, pane.splitlines())) <= 80
        assert "q quit" in pane.splitlines()[-1]
        tmux("send-keys", "/", "x", "y", "z")
        assert worker.target not in sees("filter: xyz_")
        tmux("send-keys", "Escape")
        sees("q quit")
        tmux("send-keys", "q")
        pane = sees("ended with 0")
        assert "before" in pane
        assert "LADDER" not in pane
    finally:
        tmux("kill-server")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--target", "h", "--every", "0"), "no number of seconds"),
        (("--target", "h", "--http-url", "h:1"), "is no HTTP base URL"),
        (("--target", "g", "--target", "h", "--http-url", "http://h:1"), "write {host} in it"),
        (("--target", "h", "--sort", "lunch"), "no column is called 'lunch'"),
    ],
)
def test_usage(flags: tuple[str, ...], said: str, cli: Cli) -> None:
    """A command line that can't be meant asks nobody."""
    got = cli("top", "--once", *flags)
    assert (got.code, got.out) == (2, "")
    assert said in got.err


def test_every_column_has_a_place_in_the_records() -> None:
    """No column of the view is a misspelt key."""
    (row,) = VIEW.rows(FLEET[0])
    assert {column.path for column in VIEW.columns} <= set(row)
    json.dumps(row)
