"""From a source to a corpus of shards."""
