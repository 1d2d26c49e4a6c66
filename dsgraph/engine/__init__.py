"""The training engine: from a DeepSpeed configuration to everything that a training step needs."""
