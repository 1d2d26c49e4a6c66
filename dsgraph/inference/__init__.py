"""Generation with a static cache and compiled graphs, and quantized weights."""
