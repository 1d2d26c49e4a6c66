"""Evaluation of a pipelined model: losses, outputs and generated tokens."""
