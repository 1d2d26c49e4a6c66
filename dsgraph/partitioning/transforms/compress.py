"""Compressed gradients of parameters: which parameters support them, and when compression starts."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dsgraph.compat.dynamo import keep_static
from dsgraph.inductor_ext import Ranks, one_group, resolve_group
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.utils.errors import PartitionError

from .compression import Compression


def why_not_compressed(entry: ParameterState) -> str:
    """Return why a parameter's gradient cannot be compressed, and what to do; empty if it can."""
    spec = entry.spec
    if not entry.zero.may_replace_reduction:
        return (
            f"at stage {entry.zero.number} no rank holds a momentum of a whole parameter, and gradients are reduced "
            "in each backward: partition with stage 0 or 1"
        )
    if entry.param.dtype != torch.float32:
        return f"{entry.name} is {entry.param.dtype}, and momentum and errors are float32: convert the model"
    groups = [group for group in (spec.group, *spec.outer_groups) if group]
    if len(groups) > 1:
        return f"{entry.name} is reduced over {len(groups)} dimensions of the mesh: take a mesh of one dimension"
    return ""


def ranks_of(entry: ParameterState) -> Ranks:
    """Return the ranks over which a parameter's gradient is reduced."""
    group, _ = one_group(entry.spec.group, entry.spec.outer_groups)
    return Ranks.of(group)


def own_chunk(numbers: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's chunk of `[numel]`."""
    rank = resolve_group(ranks.group).rank() if ranks.group else 0
    chunks = numbers.chunk(ranks.size)
    return chunks[rank] if rank < len(chunks) else numbers[:0]


def compress(
    entry: ParameterState,
    momentum: Tensor,
    coefficients: Tensor,
    errors: tuple[Tensor, Tensor] | None = None,
) -> Compression:
    """Compress the gradient of a parameter from now on.

    Args:
        entry: The parameter.
        momentum: `[*shape]` of float32, equal on all ranks; it is used in place, and written to.
        coefficients: See `Compression`.
        errors: Those of the rank and of its chunk; None: zeros.

    Raises:
        PartitionError: See `why_not_compressed`.
    """
    problem = why_not_compressed(entry)
    if problem:
        raise PartitionError(f"compressed gradients: {problem}")
    if errors is None:
        zeros = torch.zeros(momentum.numel(), device=momentum.device)
        errors = zeros, torch.zeros_like(own_chunk(zeros, ranks_of(entry)))
    made = Compression(momentum, *errors, coefficients, bool(entry.spec.group), entry.name)
    for tensor in made.inputs:
        keep_static(tensor)
    for tensor in made.kept:
        tensor.requires_grad_(True)
    of = weakref.ref(made)

    def on_arrival(_: Tensor) -> None:
        living = of()
        if living is not None:
            living.note_arrival()

    made.worker_error.register_post_accumulate_grad_hook(on_arrival)
    entry.register(made)
    return made


def stop_compressing(entry: ParameterState) -> None:
    """Stop compressing the gradient of a parameter."""
    compression = entry.find(Compression)
    if compression is not None:
        for tensor in compression.kept:
            tensor.requires_grad_(False)
    entry.unregister(Compression)
