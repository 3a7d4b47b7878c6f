"""Frozen facts, one file per noun. ``None`` is unknown; it is never a number."""
