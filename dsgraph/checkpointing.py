"""DeepSpeed's functions for activation checkpointing, as `deepspeed.checkpointing` has them."""

from .engine.activation_checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
