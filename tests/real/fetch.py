"""Fetch the genuine ``vllm-rs`` of named vLLM versions out of their wheels (about 310 MB each; nothing is installed).

    python -m tests.real.fetch                  the versions the tests use
    python -m tests.real.fetch 0.31.0 0.32.0    these

They land as ``<version>/vllm-rs`` in ``$VLLM_CP_VLLM_RS_DIR``, else in ``$XDG_CACHE_HOME/vllm-cp/vllm-rs``, else in
``~/.cache/vllm-cp/vllm-rs``.  What is there already is kept.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# The oldest server that speaks vllm.Control, the first with an engine round trip (IsPaused), the newest.
VERSIONS = ("0.27.0", "0.28.0", "0.33.0")

MEMBER = "vllm/vllm-rs"


class FetchError(Exception):
    """The binary could not be had; one line says why."""


def cache_dir() -> Path:
    """Where the binaries are kept."""
    own = os.environ.get("VLLM_CP_VLLM_RS_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "vllm-cp" / "vllm-rs"


def binary_path(version: str) -> Path:
    """Where the binary of ``version`` is, or would be."""
    return cache_dir() / version / "vllm-rs"


def is_fetched(version: str) -> bool:
    """Whether the binary of ``version`` is there and can be run."""
    path = binary_path(version)
    return path.is_file() and os.access(path, os.X_OK)


def fetch(version: str) -> Path:
    """Make sure that the binary of ``version`` is in the cache; several processes may do so at once."""
    target = binary_path(version)
    if is_fetched(version):
        return target
    cache_dir().mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename at the end stays within one file system and is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir()) as scratch:
        draft = Path(scratch) / "vllm-rs"
        _extract(_download(version, Path(scratch)), draft)
        draft.chmod(0o755)
        target.parent.mkdir(exist_ok=True)
        draft.replace(target)
    return target


def _download(version: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--retries", "2", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
    command += ["--platform", f"manylinux_2_28_{platform.machine()}", f"vllm=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {done.returncode}"
        raise FetchError(f"cannot download vllm {version} (no such version, or offline): {reason}")
    return next(into.glob("vllm-*.whl"))


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        try:
            source = archive.open(MEMBER)
        except KeyError:
            raise FetchError(f"{wheel.name} holds no {MEMBER}") from None
        with source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch and print one path per line; 1 and one line on stderr when that fails."""
    parser = argparse.ArgumentParser(prog="tests.real.fetch", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help="default: those of the tests")
    for version in parser.parse_args(argv).versions:
        try:
            path = fetch(version)
        except (FetchError, OSError) as error:
            sys.stderr.write(f"fetch: {error}\n")
            return 1
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
