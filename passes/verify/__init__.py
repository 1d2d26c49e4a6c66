"""Rules that a graph must meet after every pass."""
