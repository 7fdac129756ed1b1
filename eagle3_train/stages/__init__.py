"""One file per verb; stages never import one another."""
