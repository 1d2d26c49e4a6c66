"""Plans by memory limits, and checkpoints of parameters and state on disk."""
