"""The deployment lock: its facts, its text, its two verbs."""
