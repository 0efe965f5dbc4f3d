"""Questions to a trained run: index, neighbours, samples."""
