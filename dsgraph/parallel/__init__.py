"""Parallelism of a model over ranks: what a layout of tensor, pipeline and data parallelism takes, by formulas."""
