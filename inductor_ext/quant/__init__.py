"""Products with weights of few bits."""
