"""`dsgraph::gather_param` and its derivative `dsgraph::reduce_grad`: the seam between a plain model and its shards.

For n ranks in all groups and p of them in `group`, with shard_r the r-th of p chunks of rows (`torch.chunk`'s rule):

    gather_param:  full   = concat(shard_0, ..., shard_{p-1}).to(dtype)                       shape: `shape`
    reduce_grad:   grad_r = 1/n * sum over n ranks of rows_r(accumulated_grad + grad)         shape: `shard_shape`

The sum over ranks is taken in `reduce_dtype`.

`group=""` means that the parameter is replicated: nothing is gathered and the gradient is all-reduced over
`outer_groups`. With a `group`, `outer_groups` are the replicas' groups of hybrid sharding. `gathered_copy` is a full
parameter that was gathered earlier; when it is given, it is the result and `shard` only receives the gradient.
`accumulated_grad` is the sum of earlier gradients on this rank, if there is one; see
`dsgraph/partitioning/accumulation/accumulated_gradients.py`. A `reduction` other than the average replaces
`reduce_grad`, and reads `kept`, whose *gradients* are its values for the next step; see `reductions.py`.

Run eagerly both ops are real collectives, so a model with them is correct without any compiler. In a captured graph
they are markers: `InsertZeroCollectives` lowers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import share_memory

from .algorithms import Ranks, start_gather_rows, start_reducing, usual_gather, usual_reduce_scatter
from .reductions import AVERAGE, REDUCTIONS, reduction


@torch.library.custom_op(
    "dsgraph::gather_param",
    mutates_args=(),
    schema="(Tensor shard, Tensor? gathered_copy, SymInt[] shape, Tensor? accumulated_grad=None, "
    "Tensor[]? kept=None, *, ScalarType dtype, ScalarType reduce_dtype, str group, str[] outer_groups, "
    "bool adds_sum=False, str reduction='average') -> Tensor",
)
def gather_param(
    shard: Tensor,
    gathered_copy: Tensor | None,
    shape: Sequence[int],
    accumulated_grad: Tensor | None = None,
    kept: Sequence[Tensor] | None = None,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
    adds_sum: bool = False,
    reduction: str = AVERAGE,
) -> Tensor:
    """Return the full parameter of which `shard` is this rank's part.

    Args:
        shard: `[rows_r, ...]`, this rank's rows in the master dtype; all rows when `group` is empty.
        gathered_copy: `[*shape]` in `dtype`, a copy gathered earlier, or None.
        shape: Shape of the full parameter.
        accumulated_grad: `[*shape]` in any dtype, a sum of gradients of this rank that were not reduced, or None.
        kept: The tensors that the reduction keeps from step to step; None for the average.
        dtype: Dtype of the result. The cast comes before the gather, so that fewer bytes are sent.
        reduce_dtype: Dtype in which the gradient is summed.
        group: Name of the process group over which rows are sharded; "" for a replicated parameter.
        outer_groups: Names of further groups over which the gradient is averaged.
        adds_sum: True if the gradient is reduced together with `accumulated_grad`. The caller must ensure that it is
            added once.
        reduction: The entry of `REDUCTIONS` by which the gradient is reduced.

    Returns:
        `[*shape]` in `dtype`, a new tensor.
    """
    if gathered_copy is not None:
        return gathered_copy.clone()
    ranks = Ranks.of(group)
    if ranks.size == 1:
        return shard.to(dtype, copy=True)
    return start_gather_rows(shard, shape, ranks, dtype=dtype, by=usual_gather(ranks, shard.device)).finish()


@gather_param.register_fake
def _(
    shard: Tensor,
    gathered_copy: Tensor | None,
    shape: Sequence[int],
    *_: Any,
    dtype: torch.dtype,
    **__: Any,
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


SECOND_DERIVATIVES = (
    "second derivatives in the parameters of a partitioned model (create_graph=True) are not supported: take them with "
    "torch.func.functional_call and full tensors"
)


def start_reduction(
    grad: Tensor,
    shard_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
) -> Callable[[], Tensor]:
    """Start `reduce_grad` over `group`; the returned function waits for it and does the rest.

    With a single rank the result may be `grad` itself.
    """
    ranks, outer = Ranks.of(group), [Ranks.of(name) for name in outer_groups]
    by = usual_reduce_scatter(ranks, grad.device) if group else "reduce_scatter_tensor"
    started = start_reducing(grad, shard_shape, dtype=dtype, reduce_dtype=reduce_dtype, ranks=ranks, outer=outer, by=by)
    return started.finish


@torch.library.custom_op(
    "dsgraph::reduce_grad",
    mutates_args=(),
    schema="(Tensor grad, SymInt[] shard_shape, Tensor? accumulated_grad=None, *, ScalarType dtype, "
    "ScalarType reduce_dtype, str group, str[] outer_groups) -> Tensor",
)
def reduce_grad(
    grad: Tensor,
    shard_shape: Sequence[int],
    accumulated_grad: Tensor | None = None,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
) -> Tensor:
    """Return this rank's part of the gradient, averaged over all ranks.

    Args:
        grad: `[*shape]`, this rank's gradient of the full parameter.
        shard_shape: Shape of the result: that of this rank's shard.
        accumulated_grad: `[*shape]`, to which `grad` is added first, in the dtype of the sum; or None.
        dtype: Dtype of the result: the master dtype of the shard.
        reduce_dtype: Dtype in which ranks are summed.
        group: Name of the group whose ranks each keep their rows; "" keeps all rows on every rank.
        outer_groups: Names of further groups over which the result is summed.

    Returns:
        `[*shard_shape]` in `dtype`, a new tensor.
    """
    if accumulated_grad is not None:
        grad = accumulated_grad + grad.to(accumulated_grad.dtype)
    reduced = start_reduction(
        grad, shard_shape, dtype=dtype, reduce_dtype=reduce_dtype, group=group, outer_groups=outer_groups
    )()
    return reduced.clone() if share_memory(reduced, grad) else reduced


@reduce_grad.register_fake
def _(grad: Tensor, shard_shape: Sequence[int], *_: object, dtype: torch.dtype, **__: object) -> Tensor:
    return grad.new_empty(shard_shape, dtype=dtype)


@reduction(AVERAGE)
def _average(
    grad: Tensor, shard_shape: Sequence[int], kept: Sequence[Tensor], accumulated_grad: Tensor | None, **options: Any
) -> tuple[Tensor, Sequence[Tensor | None]]:
    return torch.ops.dsgraph.reduce_grad(grad, shard_shape, accumulated_grad, **options), ()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    shard, _, shape, accumulated_grad, kept = inputs
    ctx.shard_shape = shard.shape
    ctx.is_scalar = not shape
    ctx.reduction = keyword_only_inputs["reduction"]
    ctx.options = {name: keyword_only_inputs[name] for name in ("reduce_dtype", "group", "outer_groups")}
    ctx.options["dtype"] = shard.dtype
    ctx.save_for_backward(accumulated_grad if keyword_only_inputs["adds_sum"] else None, *(kept or ()))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    accumulated_grad, *kept = ctx.saved_tensors
    own, gradients = REDUCTIONS[ctx.reduction](grad, ctx.shard_shape, kept, accumulated_grad, **ctx.options)
    # Torch wants the structure of the inputs: an empty shape is a list without tensors, defaults were never passed.
    results: tuple[Any, ...] = (own, None, [] if ctx.is_scalar else None, None, list(gradients))
    return results[: len(ctx.needs_input_grad)]


gather_param.register_autograd(_backward, setup_context=_setup_context)


def _refuse(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(SECOND_DERIVATIVES)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    pass


reduce_grad.register_autograd(_refuse, setup_context=_keep_nothing)
