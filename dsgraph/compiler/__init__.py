"""Graph in, compiled graph out: the backend, what it knows of a capture, its options and code generators."""
