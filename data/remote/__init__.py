"""Shards behind a URL, and their cache on this machine."""
