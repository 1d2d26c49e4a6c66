"""Tensor parallelism: layers of which each rank holds slices."""
