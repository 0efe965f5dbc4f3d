"""The Implicit Embedding Matrix loss of phase one, its candidates, and the objective of chunk models."""
