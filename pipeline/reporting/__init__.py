"""Plots, reports and comparisons."""
