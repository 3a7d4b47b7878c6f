"""The wire contract: bytes to models and arguments to bytes, against bytes that our generated code did not write."""
