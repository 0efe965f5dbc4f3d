"""Layers that the parts are made of: attention, LSTM."""
