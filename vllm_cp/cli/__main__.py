"""``python -m vllm_cp.cli``, the same as ``vllm-cp``."""

import sys

from vllm_cp.cli import main

sys.exit(main())
