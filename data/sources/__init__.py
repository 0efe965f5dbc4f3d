"""Where bytes come from: kinds of source, and the files they read."""
