"""When an offloaded optimizer steps: during the last backward, when the norm is known, or one step late."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.optim import Optimizer

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.optim.hooks import hooks_of


def needs_all_gradients(settings: EngineConfig) -> str:
    """Return the key of the configuration for which a step waits for all gradients; empty if none does."""
    if settings.gradient_clipping:
        return "gradient_clipping"
    if settings.fp16.enabled:
        return "fp16"
    return "bf16.check_grad_overflow" if settings.bf16.enabled and settings.bf16.check_grad_overflow else ""


def stepping(optimizer: Optimizer, settings: EngineConfig, *, is_last: bool) -> AbstractContextManager[None]:
    """Return a context for a backward.

    In a step's last one, the optimizer takes gradients as they arrive, if it can.
    """
    if not is_last or needs_all_gradients(settings):
        return nullcontext()
    return hooks_of(optimizer).beside_backward()


def beside_notes(settings: EngineConfig) -> list[str]:
    """Return the lines that are printed about the moment of the step."""
    zero = settings.zero_optimization
    if zero.offload_optimizer.device != "nvme" or zero.offload_param.device != "nvme":
        return []
    key = needs_all_gradients(settings)
    if key:
        return [f"offload_optimizer: the step begins after the backward, because {key} needs all gradients"]
    return [
        "offload_optimizer: without accelerate, a step's last backward updates parameters on disk: run it once a step"
    ]
