"""Generation with a static cache and compiled graphs, and weights of few bits."""
