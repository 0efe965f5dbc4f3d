"""The chunk model: packed chunks, encoder, main model, decoder, mixture."""
