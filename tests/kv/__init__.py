"""Tests of vllm_cp.kv."""
