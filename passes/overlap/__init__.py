"""Overlap of communication with computation: buckets, early gathers, late waits; one file a pass."""
