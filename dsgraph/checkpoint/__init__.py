"""Checkpoints of an engine: saving, loading, converting, and weights in the files of Hugging Face."""
