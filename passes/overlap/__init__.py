"""Communication behind computation: buckets, early gathers, late waits; one file a pass."""
