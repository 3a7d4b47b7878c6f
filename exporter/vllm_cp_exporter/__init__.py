"""vllm-cp-exporter: watches vLLM workers over their gRPC control plane and publishes what it finds to Prometheus."""
