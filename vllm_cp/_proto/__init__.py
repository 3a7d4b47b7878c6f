"""Generated from protos/ by protos/generate.py; only vllm_cp._wire and vllm_cp.testing may import it."""
