"""Checkpoints: planners of torch.distributed.checkpoint for parameters and optimizer state on disk."""
