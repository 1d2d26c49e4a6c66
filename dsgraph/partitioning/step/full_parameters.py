"""Full parameters for autograd: differentiable with respect to their shards, and saved without their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.autograd import outer_hooks
from dsgraph.inductor_ext.collectives.gather_param import SECOND_DERIVATIVES
from dsgraph.partitioning.parameter import ParameterState, Version

from .reductions import only_adds
from .step_record import Entries

Reduce = Callable[[Entries, list[Any], Sequence[bool]], list[Tensor | None]]
"""Takes parameters, their full gradients, and for each True if autograd would only add it to `.grad`. It returns the
reduced gradients of the others, and takes gradients out of the list, so that each is freed when it is reduced."""


def differentiable(
    entries: Entries, full: Sequence[Tensor], reduce: Reduce, *, is_uncompiled: bool
) -> Sequence[Tensor]:
    """Return full parameters, differentiable with respect to their shards; uncompiled code must not write to them."""
    trained = [index for index, entry in enumerate(entries) if entry.param.requires_grad]
    if not trained or torch.is_inference_mode_enabled():
        return full
    own = tuple(entries[index] for index in trained)
    with torch.enable_grad():  # which a graph itself may turn on
        values = [full[index] for index in trained]
        outputs = _Read.apply(own, reduce, is_uncompiled, *values, *(entry.param for entry in own))
    found = list(full)
    for index, tensor in zip(trained, outputs, strict=True):
        found[index] = tensor
    return found


@dataclass(frozen=True)
class _Saved:
    """The part of a full parameter that autograd saves: it is gathered again when the backward reads it."""

    entry: ParameterState
    version: Version
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class SavedParameters:
    """Hooks that make autograd save a reference to a full parameter instead of its values.

    Attributes:
        shared: Address of a full parameter -> the parameter.
        read: Returns a full parameter in the backward.
        bytes: Bytes of the other tensors that were saved.
    """

    shared: Mapping[int, ParameterState]
    read: Callable[[ParameterState], Tensor]
    bytes: int = 0

    def __post_init__(self) -> None:
        self._outer = outer_hooks()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves for a tensor."""
        entry = self.shared.get(tensor.untyped_storage().data_ptr())
        is_lazy = tensor.is_neg() or tensor.is_conj()
        if entry is None or is_lazy or tensor.dtype != entry.spec.dtypes(entry.param.dtype)[0]:
            self.bytes += tensor.nbytes
            return tensor if self._outer is None else self._outer[0](tensor)
        size, stride = tuple(tensor.shape), tensor.stride()
        return _Saved(entry, entry.version, size, stride, int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that was saved.

        Raises:
            RuntimeError: The parameter has changed since.
        """
        if not isinstance(saved, _Saved):
            unpacked: Tensor = saved if self._outer is None else self._outer[1](saved)
            return unpacked
        if saved.version != saved.entry.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {saved.entry.name!r} was updated or replaced between the forward and the backward"
            )
        return self.read(saved.entry).as_strided(saved.size, saved.stride, saved.offset)


class _Read(torch.autograd.Function):
    """An autograd function that returns full parameters in place of their shards."""

    boxed_grads_call = True  # gradients come in a list, whose items may be freed (torch 2.12)

    @staticmethod
    def forward(ctx: Any, entries: Any, reduce: Any, is_uncompiled: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.entries, ctx.reduce = entries, reduce
        ctx.set_materialize_grads(False)
        full = tensors[: len(entries)]
        # Autograd refuses writes to a view.
        return tuple(each.view_as(each) if is_uncompiled else each.detach() for each in full)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        grads: list[Any] = given[0] if isinstance(given[0], list) else list(given)
        keeps_graph, results = torch.is_grad_enabled(), [None] * len(grads)
        nodes = [node for node, _ in ctx.next_functions][-len(grads) :]
        needed = [number for number, grad in enumerate(grads) if grad is not None and nodes[number] is not None]
        if not needed:
            return (None,) * len(ctx.needs_input_grad)
        adds = [not keeps_graph and only_adds(nodes[number]) for number in needed]
        grads[:] = [grads[number] for number in needed]
        differentiated = [grad for grad in grads if keeps_graph and grad.requires_grad]
        with torch.no_grad():
            found: list[Any] = ctx.reduce(tuple(ctx.entries[number] for number in needed), grads, adds)
        if differentiated:
            found = [_Refuse.apply(value, *differentiated) for value in found]
        for number, value in zip(needed, found, strict=True):
            results[number] = value
        return (*(None,) * (3 + len(results)), *results)


class _Refuse(torch.autograd.Function):
    """An autograd function that returns its first argument, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *differentiated: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(SECOND_DERIVATIVES)
