"""Parallelism of a model over ranks, and the cost of tensor, pipeline and data parallel layouts by formulas."""
