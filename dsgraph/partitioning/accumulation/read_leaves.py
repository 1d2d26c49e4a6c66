"""Leaves, which modules return while gradients are added up on the rank, as parts of the graph of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.autograd import accumulates, has_tensor_hooks, is_asked_for
from dsgraph.compat.dtensor import distributed_like
from dsgraph.inductor_ext.collectives.gather_param import SECOND_DERIVATIVES
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState
from dsgraph.partitioning.step.reductions import start_reductions

from .accumulated_gradients import add_local_gradient


def read_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves that are differentiable with respect to their parameters as well.

    `backward()` adds to the sums of the leaves, `torch.autograd.grad` returns the averaged gradient of a parameter.
    """
    trained = [leaf for leaf in leaves if leaf.requires_grad] if torch.is_grad_enabled() else []
    if not trained:
        return list(leaves)
    known: list[tuple[ParameterState, PartitionState]] = [leaf.dsgraph_leaf for leaf in trained]  # type: ignore[attr-defined]
    # Hooks of a parameter would be called with None in each backward.
    params = [
        leaf if has_tensor_hooks(entry.param) else entry.param for leaf, (entry, _) in zip(trained, known, strict=True)
    ]
    read = iter(_Leaves.apply(known, *trained, *params))
    return [next(read) if leaf.requires_grad else leaf for leaf in leaves]


class _Leaves(torch.autograd.Function):
    """An autograd function that returns leaves. A gradient goes to the leaf or to the parameter that it is for."""

    @staticmethod
    def forward(
        ctx: Any, known: Sequence[tuple[ParameterState, PartitionState]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.known = known
        ctx.set_materialize_grads(False)
        return tuple(leaf.detach() for leaf in tensors[: len(known)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nodes, count = [node for node, _ in ctx.next_functions], len(grads)
        of_leaves: list[Tensor | None] = [None] * count
        of_params: list[Tensor | None] = [None] * count
        for number, (grad, (entry, state)) in enumerate(zip(grads, ctx.known, strict=True)):
            if grad is None:
                continue
            if accumulates(nodes[number]):
                of_leaves[number] = grad
            elif accumulates(nodes[count + number]):  # `backward(inputs=...)`
                add_local_gradient(entry, state, grad.clone())
            elif is_asked_for(nodes[count + number]):
                if torch.is_grad_enabled() and grad.requires_grad:
                    raise NotImplementedError(SECOND_DERIVATIVES)
                with state.operations.reducing(f"the gradient of {entry.name!r}"):
                    (finish,) = start_reductions([(entry, grad.detach())])
                    of_params[number] = distributed_like(entry.param, finish())
        return None, *of_leaves, *of_params
