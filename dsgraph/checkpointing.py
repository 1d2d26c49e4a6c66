"""DeepSpeed's functions for activation checkpointing, with the names of `deepspeed.checkpointing`."""

from .engine.activation_checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
