"""The parts of ``vllm_cp.fleet``."""
