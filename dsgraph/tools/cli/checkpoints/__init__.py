"""Commands that convert checkpoints."""
