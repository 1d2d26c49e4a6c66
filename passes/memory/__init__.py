"""The memory of activations: values that the backward reads are saved, or recomputed, under one limit."""
