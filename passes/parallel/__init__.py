"""Parallelism by splitting the captured graph."""
