"""Facts and the three weights of the frozen target, read from its directory."""
