"""Phase one: the Implicit Embedding Matrix loss and its candidates."""
