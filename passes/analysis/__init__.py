"""Cost, time and memory of graphs, from fake tensors."""
