"""Spaces of vectors of a run: their files, exact and approximate search, what may be asked, and answers."""
