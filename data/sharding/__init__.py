"""Conversion of a source into a corpus of shards."""
