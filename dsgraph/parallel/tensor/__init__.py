"""Tensor parallelism: layers that are sharded over ranks."""
