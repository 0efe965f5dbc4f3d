"""Vector indexes of a run: their files, exact and approximate search, queries and results."""
