"""``completion`` (B37): a script and nothing else, candidates and nothing else, no worker asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.process import COMMAND, Ended, environment, run
from vllm_cp.testing import FakeWorker

BASH = shutil.which("bash")


def _candidates(words: str, *, env: dict[str, str] | None = None, shell: str = "bash") -> Ended:
    count = len(words.split(" ")) - 1
    return run(
        env={"_VLLM_CP_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": str(count), **(env or {})}
    )


def _words(words: str, **settings: dict[str, str]) -> list[str]:
    got = _candidates(words, env=settings.get("env"))
    assert (got.code, got.err) == (0, "")
    return [line.removeprefix("plain,") for line in got.out.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_and_nothing_else(shell: str) -> None:
    """The script is on standard output, nothing is on standard error, whatever the colours say."""
    plain = run("completion", shell)
    assert (plain.code, plain.err) == (0, "")
    assert f"_VLLM_CP_COMPLETE={shell}_complete" in plain.out
    assert "\x1b" not in plain.out
    assert run("completion", shell, env={"FORCE_COLOR": "1"}).out == plain.out


def test_shells_that_are_known(cli: Cli) -> None:
    """Another shell is a usage error that names the three; so is none."""
    ended = cli("completion", "tcsh")
    assert (ended.code, ended.out) == (2, "")
    assert "'bash', 'zsh', 'fish'" in ended.err
    assert cli("completion").code == 2
    assert "bash 4.4 and later, zsh and fish" in " ".join(cli("completion", "--help").out.split())


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_in_a_real_bash(tmp_path: Path) -> None:
    """The script loads in bash, and completes a half-written noun there."""
    command = tmp_path / "vllm-cp"
    command.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    script = """
eval "$(vllm-cp completion bash)"
COMP_WORDS=(vllm-cp wa); COMP_CWORD=1; COMPREPLY=()
_vllm_cp_completion vllm-cp
printf '%s\\n' "${COMPREPLY[@]}"
complete -p vllm-cp
"""
    env = environment({"PATH": f"{tmp_path}:{environment()['PATH']}"})
    done = subprocess.run([str(BASH), "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines()[:3] == ["wait", "wake", "watch"]
    assert "-F _vllm_cp_completion vllm-cp" in done.stdout


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_old_bash_is_told(tmp_path: Path) -> None:
    """A bash too old for it says so in one line and completes as before; it is not left with a broken function."""
    script = run("completion", "bash").out.replace("BASH_VERSINFO[0]", "OLD[0]").replace("BASH_VERSINFO[1]", "OLD[1]")
    done = subprocess.run(
        [str(BASH), "-c", f"OLD=(3 2)\n{script}\ntype _vllm_cp_completion"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr.splitlines()[0].startswith("vllm-cp: completion takes bash 4.4 or later, and this is ")
    assert "not found" in done.stderr


def test_candidates() -> None:
    """Nouns, verbs, choices and flags."""
    assert _words("vllm-cp w") == ["wait", "wake", "watch", "weights"]
    assert _words("vllm-cp lora ") == ["list", "load", "unload"]
    assert _words("vllm-cp pause --mode ") == ["abort", "wait", "keep"]
    assert _words("vllm-cp wait --for s") == ["serving"]
    assert "--clear-cache" in _words("vllm-cp pause --c")


def test_contexts_are_candidates(tmp_path: Path) -> None:
    """After --context it is the contexts there are."""
    path = tmp_path / "contexts.json"
    settings = {"targets": ["a"]}
    path.write_text(json.dumps({"version": 1, "current": None, "contexts": {"prod": settings, "dev": settings}}))
    assert _words("vllm-cp health --context ", env={"VLLM_CP_CONTEXT_FILE": str(path)}) == ["dev", "prod"]
    assert _words("vllm-cp --context p", env={"VLLM_CP_CONTEXT_FILE": str(path)}) == ["prod"]


def test_a_broken_file_and_no_network_do_not_matter(tmp_path: Path, worker: FakeWorker) -> None:
    """Completing works beside a broken context file and wrong variables, and asks no worker."""
    path = tmp_path / "contexts.json"
    path.write_text("{")
    env = {"VLLM_CP_CONTEXT_FILE": str(path), "VLLM_CP_TARGET": worker.target, "VLLM_CP_TIMEOUT": "soon"}
    assert _words("vllm-cp health --context ", env=env) == []
    assert _words("vllm-cp prob", env=env) == ["probe"]
    assert _words(f"vllm-cp --target {worker.target} heal", env=env) == ["health"]
    assert worker.calls == []


def test_unknown_question() -> None:
    """A question that no script of ours asks is 2, with nothing on standard output."""
    for instruction in ("tcsh_complete", "bash_lunch", "x"):
        got = run(env={"_VLLM_CP_COMPLETE": instruction})
        assert (got.code, got.out) == (2, "")


def test_answers_without_grpc() -> None:
    """Completing loads no gRPC."""
    probe = "import sys; from vllm_cp.cli import main; main([]); print('grpc' in sys.modules, file=sys.stderr)"
    env = environment({"_VLLM_CP_COMPLETE": "bash_complete", "COMP_WORDS": "vllm-cp pa", "COMP_CWORD": "1"})
    done = subprocess.run(
        [sys.executable, "-c", probe], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert (done.stdout, done.stderr) == ("plain,pause\n", "False\n")
