"""Queries to a trained run: index, neighbours, next chunks, samples, analysis."""
