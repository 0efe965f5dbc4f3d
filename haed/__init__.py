"""Models and losses that map tensors to tensors."""
