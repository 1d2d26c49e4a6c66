"""Optimizers of shards: by name, wrapped around others, with state on the host or on disk."""
