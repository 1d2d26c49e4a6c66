"""A step as one graph: calls of units, with the gathers and reductions between them."""
