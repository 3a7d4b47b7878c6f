"""The genuine ``vllm-rs`` with our engine simulator behind it."""
