"""``python -m tests.real.sim``: engines in a process of their own, see control.py."""

import sys

from tests.real.sim.control import main

if __name__ == "__main__":
    sys.exit(main())
