"""Models of the tokens themselves: windows as sequences, and the systems that shorten and lengthen them."""
