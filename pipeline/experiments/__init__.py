"""Tables and figures of the papers, one command each."""
