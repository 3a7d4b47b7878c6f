#!/usr/bin/env python3
"""Generate vllm_cp/_proto from protos/vllm_cp/wire.

    python protos/generate.py           write the generated files
    python protos/generate.py --check   exit 1 when the committed files differ from what the sources give

The generator is pinned to the oldest grpcio-tools we support, because generated code refuses a protobuf runtime
older than its generator and loads on newer ones: what 1.62.3 writes loads on protobuf 4.25 to 7. The pinned
tool is installed into a throw-away environment, so it never meets the project's own grpcio.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos" / "vllm_cp" / "wire"
TARGET = ROOT / "vllm_cp" / "_proto"
# setuptools brings the pkg_resources that this old grpcio-tools still imports.
PINNED = ("grpcio-tools==1.62.3", "setuptools<81")
NAMES = ("control", "health", "inference")
# The name under which the files register in protobuf's process-wide pool: ours alone, so nothing can clash with it.
VIRTUAL = "vllm_cp/_proto"


def generate(out: Path) -> None:
    """Write the modules and their type stubs below ``out``, in the folder ``vllm_cp/_proto``."""
    with tempfile.TemporaryDirectory() as tools:
        venv.create(tools, with_pip=True)
        python = Path(tools, "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINNED], check=True)
        subprocess.run(
            [
                python,
                "-m",
                "grpc_tools.protoc",
                f"-I{VIRTUAL}={SOURCES}",
                f"--python_out={out}",
                f"--pyi_out={out}",
                *(f"{VIRTUAL}/{name}.proto" for name in NAMES),
            ],
            check=True,
        )


def main() -> int:
    """Run as a command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on any difference")
    check = parser.parse_args().check
    files = [f"{name}_pb2{suffix}" for name in NAMES for suffix in (".py", ".pyi")]
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made = Path(scratch, VIRTUAL)
        if check:
            _, differ, missing = filecmp.cmpfiles(made, TARGET, files, shallow=False)
            if stale := differ + missing:
                print(f"stale: {', '.join(stale)}; run: python protos/generate.py", file=sys.stderr)
                return 1
            print(f"{TARGET.relative_to(ROOT)} is what the sources give")
            return 0
        for name in files:
            (TARGET / name).write_bytes((made / name).read_bytes())
        print(f"wrote {len(files)} files to {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
