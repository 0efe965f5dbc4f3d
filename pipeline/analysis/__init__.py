"""Analysis of the chunk embeddings of a run: use and spelling, intrinsic checks, geometry, drift."""
