"""What the page of a flow run shows while it runs, and says when it has ended."""
