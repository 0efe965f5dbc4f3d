"""What the embeddings of a run know, in figures: use and spelling, intrinsic checks, geometry, drift."""
