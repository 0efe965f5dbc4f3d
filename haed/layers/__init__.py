"""Layers that the models are made of: attention, transformer blocks, LSTM, n-gram tables."""
