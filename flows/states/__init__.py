"""Endings of flow runs from outside: signals, pauses, and killed processes."""
