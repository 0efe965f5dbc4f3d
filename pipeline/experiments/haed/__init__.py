"""Mujika 2023, "Hierarchical Attention Encoder Decoder"."""
