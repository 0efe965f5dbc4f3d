"""Data from bytes to chunks and back: sources, chunkers, WebDataset shards and the loader."""
