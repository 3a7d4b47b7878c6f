"""Runs every benchmark here, each in a process of its own, prints one table and writes ``bench/out.json``.

python -m bench [--quick] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

HERE = Path(__file__).parent


def names() -> list[str]:
    """The benchmarks that are here."""
    texts = {path.stem: path.read_text() for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("_")}
    return [name for name, text in texts.items() if '__name__ == "__main__"' in text]


def takes_part(name: str) -> bool:
    """Whether it speaks the common language; else it is a program of its own kind."""
    return "bench.program(" in (HERE / f"{name}.py").read_text()


def run(name: str, quick: bool) -> dict[str, Any]:
    """One benchmark, to its end."""
    command = [sys.executable, "-m", f"bench.{name}"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "figures.json"
        if takes_part(name):
            command += ["--json", str(written), *(["--quick"] if quick else [])]
        done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=False)
        figures = json.loads(written.read_text()) if written.exists() else None
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "exit": done.returncode}
    return {**found, "figures": figures} if figures is not None else {**found, "printed": done.stdout.splitlines()}


def shown(name: str, found: dict[str, Any]) -> str:
    """What a benchmark found, for people."""
    head = f"== {name}: {found['seconds']} s{'' if found['exit'] == 0 else ', exit ' + str(found['exit'])}"
    if "figures" not in found:
        return "\n".join([head, *found["printed"]])
    fields = bench.Figure.__dataclass_fields__
    figures = [
        bench.Figure(**{key: value for key, value in each.items() if key in fields}) for each in found["figures"]
    ]
    return f"{head}\n{bench.table(figures)}"


def main() -> int:
    """Run them; 1 when a promise was missed or one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; default: all")
    parser.add_argument("--quick", action="store_true", help="small runs: does it work, not how fast is it")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    found = {}
    for name in options.names or names():
        found[name] = run(name, options.quick)
        print(shown(name, found[name]), end="\n\n", flush=True)
    out = {"machine": bench.machine(), "quick": options.quick, "benches": found}
    (HERE / "out.json").write_text(json.dumps(out, indent=2) + "\n")
    return int(any(each["exit"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
