"""Exact likelihood of a split, and what it is compared with."""
