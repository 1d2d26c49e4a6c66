"""The seam: what a partitioned module hands out when its forward asks for a parameter.

`partition` gives a module's class one property a parameter (`property_for`). While Dynamo captures, its answer is a
`dsgraph::gather_param` marker for the passes to lower. Otherwise it is the parameter itself, fetched by real
collectives, so that a partitioned model is correct wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph import compat
from dsgraph.errors import PartitionError

from .layout import Layout
from .table import held_by


def property_for(name: str, layout: Layout) -> property:
    """The property through which a partitioned module's class hands out parameter `name`.

    It gives the full parameter, differentiable with respect to its shard. A value that is not a `DTensor` (None, or
    what `torch.func.functional_call` put there) is returned as it is.
    """
    may_have_replica = bool(layout.group)
    may_stay_local = layout.zero.may_reduce_once

    def read(self: nn.Module) -> Any:
        param: Any = self._parameters[name]
        if not isinstance(param, DTensor):
            return param
        if param.device.type == "meta":  # a constant to Dynamo, unlike `is_meta`
            raise PartitionError(
                f"parameter {name!r} of {type(self).__name__} is on the meta device: "
                "call dsgraph.materialize(model, device) before the first forward"
            )
        if not torch.compiler.is_compiling():
            return _read_eagerly(self, name, layout)
        local_sum = None
        if may_stay_local and held_by(self).partition.gradients_stay_local:
            if held_by(self).partition.accumulating:
                return layout.local(held_by(self).leaves[name])
            if torch.is_grad_enabled():
                local_sum = held_by(self).sums.get(name)
        replica = held_by(self).replicas.get(name) if may_have_replica else None
        # The shape is read off the parameter: Dynamo may take integers from elsewhere for dynamic sizes.
        return layout.mark(param.to_local(), replica, param.shape, local_sum)

    compat.only_inlined(read)
    return property(read, doc=f"The full parameter {name!r}; its shard stands in `named_parameters()`.")


@torch.compiler.disable
def _read_eagerly(module: nn.Module, name: str, layout: Layout) -> Tensor:
    param: Any = module._parameters[name]
    held, shard = held_by(module), param.to_local()
    held.eager_reads[name] += 1
    if held.partition.gradients_stay_local:
        held.partition.refresh()
        return layout.local(held.partition.arrived(held.leaves[name]))
    if name in held.replicas:
        held.partition.refresh()
        return _HandOut.apply(shard, held.partition.arrived(held.replicas[name]), layout, held.partition.note_gradient)
    if layout.group:
        return layout.mark(shard, None, layout.shape)
    dtype, _ = layout.dtypes(shard.dtype)
    return _HandOut.apply(shard, shard.detach().to(dtype), layout, None)


class _HandOut(torch.autograd.Function):
    """Hands out a full tensor in place of its shard; the gradient goes back to the shard.

    It spares eager mode the copy that `gather_param` must make of a tensor that is there already.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, full: Tensor, layout: Layout, note_gradient: Callable[[], None] | None
    ) -> Tensor:
        ctx.shard = shard.detach()
        ctx.layout = layout
        ctx.note_gradient = note_gradient
        return full.view_as(full)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.note_gradient is not None:
            ctx.note_gradient()
        return ctx.layout.reduce(grad, ctx.shard), None, None, None
