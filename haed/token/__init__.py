"""Models of tokens, which read windows as sequences of tokens: Hourglass, Top-down, Bottom-up, Retina, SpaceByte."""
