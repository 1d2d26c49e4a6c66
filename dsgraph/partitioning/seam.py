"""The seam: the values that a partitioned module returns when its forward reads a parameter.

`partition` gives a module's class one property a parameter (`property_for`). While Dynamo captures, it returns a
`dsgraph::gather_param` marker, which passes lower. Otherwise it returns the full parameter, fetched by real
collectives, so that a partitioned model is correct wherever it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import (
    in_transform,
    outside_selective_checkpoints,
    outside_transforms,
    without_transforms,
)
from dsgraph.compat.dynamo import (
    compiling_backend,
    leave_control_flow,
    only_inlined,
    return_to_control_flow,
)
from dsgraph.compat.tensors import unseen_by_modes
from dsgraph.partitioning.blocks.block import BlockLimit
from dsgraph.passes import ParameterSpec
from dsgraph.ranks.eager_agreement import is_outside
from dsgraph.utils.errors import PartitionError

from .accumulation.read_leaves import read_leaves
from .blocks.block import may_end_graph
from .eager.forward_parameter import ForwardParameter
from .eager.full_parameter import FullParameter
from .eager.replaced_data import refuse_replaced_data
from .eager.source import Source
from .gathered_copies import gather_now
from .markers import cast_leaf, gather_marker, marker_inputs, marker_options
from .parameter import ParameterState
from .stages import ZeroStage
from .state import held_by


def property_for(name: str, spec: ParameterSpec, zero: ZeroStage) -> property:
    """Return the property by which a partitioned module's class returns parameter `name`.

    It gives the full parameter, differentiable with respect to its shard. A value that is not a `DTensor` (None, or
    what `torch.func.functional_call` put there) is returned as it is.
    """
    may_have_copy, held = bool(spec.group), spec.held
    may_stay_local, may_replace_reduction = zero.may_reduce_once, zero.may_replace_reduction

    def read(self: nn.Module) -> Any:
        param: Any = self._parameters[name]
        if not isinstance(param, DTensor):
            return param if torch.compiler.is_compiling() else _not_transformed(param, name, self)
        if param.device.type == "meta":  # a constant to Dynamo, unlike `is_meta`
            raise PartitionError(
                f"parameter {name!r} of {type(self).__name__} is on the meta device: "
                "call dsgraph.materialize(model, device) before the first forward"
            )
        if not torch.compiler.is_compiling():
            return _read_eagerly(self, name, spec)
        # Ranks may take different branches, so parameters are gathered before the operator.
        is_ahead = leave_control_flow()
        # Not a tensor in a variable: Dynamo would name the graph's node after it.
        read_ahead = [mark(self, param)]
        for transform in held_by(self).parameters[name].transforms:
            read_ahead[0] = transform.after_gather(read_ahead[0])
        read_ahead[0] = _unsliced(spec, read_ahead[0])
        if is_ahead:
            return_to_control_flow()
        return read_ahead[0]

    def mark(self: nn.Module, param: Any) -> Tensor:
        entry, partition = held_by(self).parameters[name], held_by(self).partition
        accumulated_grad = reducer = None
        is_ours = compiling_backend() == "dsgraph"  # other graphs do not wait for copies
        if is_ours and entry.stand_ins and entry.gathered_copy is None and _may_be_unit(partition.step.limit):
            return _stand_in(entry, is_trained=param.requires_grad)
        reads_copies = may_have_copy and is_ours
        if may_stay_local and partition.gradients_stay_local:
            if partition.accumulating:
                if may_have_copy and not reads_copies:
                    _refuse_other_backend(name)
                leaf = entry.leaf  # below: if it was switched since, reduce at once
                if leaf is not None and leaf.requires_grad == param.requires_grad:
                    return cast_leaf(spec, leaf)
            elif torch.is_grad_enabled():
                accumulated_grad = entry.sum_for_graphs
        if may_replace_reduction and torch.is_grad_enabled():
            reducer = entry.reducer
        gathered_copy = entry.gathered_copy if reads_copies else None
        # The shape is read off the parameter: Dynamo may take integers from elsewhere for dynamic sizes.
        shape = param.shape if held is None else held.own_shape(param.shape)
        if in_transform():
            added, options = marker_inputs(accumulated_grad, reducer), marker_options(spec, param.dtype, reducer)
            return mark_outside_transforms(param, gathered_copy, shape, *added, **options)
        return gather_marker(spec, param.to_local(), gathered_copy, shape, accumulated_grad, reducer)

    only_inlined(read)
    only_inlined(mark)
    return property(read, doc=f"The full parameter {name!r}; its shard stands in `named_parameters()`.")


@unseen_by_modes
def _stand_in(entry: ParameterState, *, is_trained: bool) -> Tensor:
    stand_in = entry.stand_ins[1 if is_trained else 0]
    return stand_in.view_as(stand_in)  # an input that leaves the graph would not be seen


def _may_be_unit(limit: BlockLimit) -> bool:
    """Return True for code whose graph is a unit of a step; inside a checkpoint each block is gathered by itself."""
    return not in_transform() and may_end_graph(limit)


@torch.compiler.assume_constant_result
def _refuse_other_backend(name: str) -> None:
    raise PartitionError(
        f"parameter {name!r} is read inside dsgraph.accumulate by a graph of backend {compiling_backend()!r} "
        "(torch.cond, scan, map and while_loop of an uncompiled model make one), which does not see when the parameter "
        'was updated: use torch.compile(model, backend="dsgraph"), or read parameters before the operator'
    )


def _not_transformed(param: Any, name: str, module: nn.Module) -> Any:
    if isinstance(without_transforms(param), DTensor):
        raise PartitionError(
            f"parameter {name!r} of {type(module).__name__}: a transform of torch.func cannot map over shards, nor "
            "differentiate with respect to them; give functional_call full tensors: "
            "{name: p.detach().full_tensor() for name, p in model.named_parameters()}"
        )
    return param


@torch.compiler.allow_in_graph
def mark_outside_transforms(
    param: DTensor, gathered_copy: Tensor | None, shape: Sequence[int], *added: Any, **options: Any
) -> Tensor:
    """Return a marker that is captured inside a transform of `torch.func`, for which parameters are constants.

    It is one call, because `to_local` cannot be captured there; the backend splits it up before the transform.
    """
    with outside_transforms():
        shard = param.to_local()
        return torch.ops.dsgraph.gather_param(shard, gathered_copy, shape, *added, **options)


@torch.compiler.disable
def _read_eagerly(module: nn.Module, name: str, spec: ParameterSpec) -> Tensor:
    entry = held_by(module).parameters[name]
    entry.eager_reads += 1
    with outside_transforms():  # to transforms of `torch.func` parameters are constants
        outside = is_outside()
        param: Any = module._parameters[name]
        if torch.jit.is_tracing():
            raise PartitionError(
                f"torch.jit.trace of {type(module).__name__}, which is part of a partitioned model, cannot record how "
                "its parameters are gathered: trace a plain model that has loaded the full state dict"
            )
        refuse_replaced_data(param, entry.name)
        source = Source(
            name=f"parameter {name!r} of {type(module).__name__}",
            shards=param,
            plain=_unsliced(spec, own := _read_unseen(module, name, spec, is_kept=outside)),
            spec=spec,
            partition=held_by(module).partition,
            read=lambda: _unsliced(spec, _read_unseen(module, name, spec)),
        )
        if outside:
            return FullParameter.over(source.plain, source)
        full = source.plain
        if entry.transforms:
            for transform in entry.transforms:
                own = transform.after_gather(own)
            full = _unsliced(spec, own)
        return ForwardParameter.over(full, source)


def _unsliced(spec: ParameterSpec, own: Tensor) -> Tensor:
    """Return the full parameter; of a tensor-parallel one, from this rank's slice."""
    return own if spec.held is None else spec.held.full(own)


def _read_unseen(module: nn.Module, name: str, spec: ParameterSpec, *, is_kept: bool = False) -> Tensor:
    """Call `_read` hidden from selective checkpoints, which refuse a recomputation with other ops than the forward.

    Which ops run depends on what was gathered before, and on where the step stands.
    """
    with outside_selective_checkpoints():
        return _read(module, name, spec, is_kept=is_kept)


def _read(module: nn.Module, name: str, spec: ParameterSpec, *, is_kept: bool = False) -> Tensor:
    """Return a full parameter. With `is_kept`, several backwards may go through it, and it may be written to."""
    param: Any = module._parameters[name]
    partition, entry = held_by(module).partition, held_by(module).parameters[name]
    if partition.gradients_stay_local:
        assert entry.leaf is not None
        if entry.leaf.requires_grad == param.requires_grad:
            partition.refresh(eagerly=True)
            return cast_leaf(spec, *read_leaves([partition.copies.arrived(entry.leaf)]))

    if entry.gathered_copy is not None:
        partition.refresh(eagerly=True, read=None if is_kept else entry.gathered_copy)
        partition.copies.arrived(entry.gathered_copy)
    if not (is_kept or entry.transforms):
        others = (other for other in held_by(module).parameters.values() if other is not entry)
        beside = tuple(other for other in others if other.is_replicated and not other.transforms)
        if (found := partition.step.read(entry, beside)) is not None:
            return found
    full = gather_now((entry,), partition.operations, outside=None)[entry]
    return partition.step.hand_out(entry, full, is_kept=is_kept)
