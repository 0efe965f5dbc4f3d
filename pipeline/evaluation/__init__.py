"""Exact likelihood of a split, and the baselines it is compared with."""
