"""Embeddings as pictures: a map in two dimensions, and an export for TensorBoard's projector."""
