"""``python -m vllm_cp_exporter``."""

import sys

from vllm_cp_exporter.app import main

sys.exit(main())
