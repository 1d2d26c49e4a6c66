"""Equal parts of a graph are compiled once: where they are, and how they are called."""
