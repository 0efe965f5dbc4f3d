"""Maps of the embeddings in two dimensions, and an export for TensorBoard's projector."""
