"""Tests of the daemon; what they share is in ``views``, ``pages`` and ``process``."""
