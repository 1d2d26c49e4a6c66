"""Partitioned models: parameters as shards, their state during a step, and the seam that returns them to modules."""
