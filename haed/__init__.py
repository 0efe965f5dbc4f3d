"""The models and losses: tensors in, tensors out."""
