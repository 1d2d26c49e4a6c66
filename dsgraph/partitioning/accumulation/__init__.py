"""Gradients of several micro-batches, which are reduced once a step."""
