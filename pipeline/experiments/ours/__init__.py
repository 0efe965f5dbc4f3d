"""Comparisons of our own: all systems, and public packages beside them."""
