"""Sources of documents, and the files that they read."""
