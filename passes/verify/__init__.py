"""What must hold of a graph after every pass."""
