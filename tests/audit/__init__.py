"""The audit: ports, TLS, HTTP, the whole, and its verb."""
