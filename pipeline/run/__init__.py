"""A run: its folder, checkpoints, metrics, shards, and the run opened for use."""
