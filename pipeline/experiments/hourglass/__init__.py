"""Nawrot et al. 2021, "Hierarchical Transformers Are More Efficient Language Models"."""
