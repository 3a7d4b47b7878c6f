"""Three fake workers with a scripted life, and the exporter watching them. Stops on Ctrl-C.

    python examples/demo.py [--listen 127.0.0.1:9645] [--rounds N]

chat-0 is healthy throughout. chat-1's engine dies and says so, then a new instance takes its place. chat-2's engine
freezes while health goes on saying SERVING, then thaws.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
import urllib.request

from vllm_cp import ServerInfo
from vllm_cp.testing import FakeWorker

SCRIPT = """\
The exporter watches three workers: http://{listen}/  and  http://{listen}/metrics

    curl -s http://{listen}/metrics | grep -E '^vllm_cp_worker_(ready|not_ready|kv_blocks|fault)' | grep -v ' 0.0$'

What to see, again and again (times are short here; by default a silent engine is accused after 15 s):
"""
PACE = ["--probe-interval", "1", "--answer-within", "3"]


def main() -> int:
    """Run the play until Ctrl-C; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:9645", help="where the exporter serves")
    parser.add_argument("--rounds", type=int, help="stop after this many rounds (default: until Ctrl-C)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with FakeWorker(info=ServerInfo(total_kv_blocks=4096)) as zero, FakeWorker() as one, FakeWorker(ranks=2) as two:
        workers = {"chat-0": zero, "chat-1": one, "chat-2": two}
        targets = [f"--target={name}={worker.target}" for name, worker in workers.items()]
        command = [sys.executable, "-m", "vllm_cp_exporter", *targets, "--pool=chat", f"--listen={args.listen}", *PACE]
        # Ctrl-C reaches every process of the terminal, and for the exporter a second signal means: at once.
        exporter = subprocess.Popen(command, start_new_session=True)
        try:
            wait_until_up(args.listen, exporter)
            print(SCRIPT.format(listen=args.listen), flush=True)
            rounds = itertools.count() if args.rounds is None else range(args.rounds)
            for number in rounds:
                play(one, two, number)
            time.sleep(8)
        except KeyboardInterrupt:
            print("\nstopping", flush=True)
        finally:
            exporter.terminate()
            code = exporter.wait(10)
        return code


def play(one: FakeWorker, two: FakeWorker, number: int) -> None:
    """One round of the play."""
    act("chat-1: the engine dies and says so      -> ready 0 at once, reason not_serving")
    one.die(reported=True)
    act("chat-1: a new instance on the same port  -> ready 1, the fault ended as replaced")
    one.restart(instance_id=f"chat-1-instance-{number + 2}")
    act("chat-2: rank 1 freezes, health: SERVING  -> ready 0 within 4 s, reason engine_silent")
    two.hang(1)
    act("chat-2: it thaws                         -> ready 1, the fault ended as resumed")
    two.unhang()


def act(what: str) -> None:
    """Give people time to see the last act, then announce the next."""
    time.sleep(8)
    print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)


def wait_until_up(listen: str, exporter: subprocess.Popen[bytes]) -> None:
    """Until the exporter is ready. Raises SystemExit when it ended instead; it said why."""
    for _ in range(100):
        if exporter.poll() is not None:
            raise SystemExit(exporter.returncode)
        try:
            with urllib.request.urlopen(f"http://{listen}/-/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the exporter did not become ready on {listen}")


if __name__ == "__main__":
    sys.exit(main())
