"""The memory of activations: what the backward reads of the forward is saved, or computed again, under one limit."""
