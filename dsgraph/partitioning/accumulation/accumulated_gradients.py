"""Gradients that are accumulated on each rank and reduced once, by the last backward of a step.

This is the case at stages 0 and 1, and at stage 2 with `reduce_once`. Inside `accumulate`, a module returns a leaf
instead of the marker: an alias of the gathered copy (stages 1 and 2), or of the shard of a replicated parameter. The
captured graph contains no collective, and the gradient of the leaf is added to the parameter's sum (`read_leaves`).

The micro-batch after `accumulate` ends the step. Its compiled graphs contain markers again, each with the sum of its
parameter. The sum is added to the gradient before the reduction, so that gradients are sent while the backward
computes. The backend makes markers add it (`add_sums`) and watches the backwards of the graph (`watched_graphs`). When
a backward has passed a parameter's gradient on to `.grad`, the sum is emptied: further graphs that read the parameter
add zeros. A backward whose gradient goes elsewhere (`torch.autograd.grad`, `backward(inputs=...)`) also finds zeros.

Uncompiled code still returns leaves. After the backward the ranks agree on which sums no graph has used. A separate
backward, which calls the parameters' hooks, delivers these (`deliver`). A backward that runs inside another one ends
nothing, and each later backward of the same micro-batch adds its own gradients in the same way. `StepPhase` defines
the phases of a step and the transitions between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.compat.autograd import (
    accumulates,
    at_end_of_backward,
    autograd_node,
    call_after,
    enclosing_node,
    keeping_version,
    running_backward,
)
from dsgraph.compat.dynamo import keep_static
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState, StepPhase
from dsgraph.utils.errors import AccumulationError

from .gradient_placeholder import GradientPlaceholder
from .reduce_accumulated import deliver, reduce_all, used_anywhere
from .watched_graphs import drop_if_zeroed, empty_sum, restore_sum


def enter_accumulation(state: PartitionState, *, reduce_once: bool) -> None:
    """Begin a step of micro-batches.

    With `reduce_once` gradients are reduced only by the backward that ends the step. This also applies if some
    gradients of the current step are already accumulated without a reduction.
    """
    state.reduces_once = reduce_once or state.gradients_stay_local
    if not state.reduces_once:
        state.move_to(StepPhase.REDUCING_EACH)
        return
    state.move_to(StepPhase.ADDING)
    state.ends_step = _before_update
    for entry in state.parameters:
        _prepare_leaf(entry, state)


def leave_accumulation(state: PartitionState) -> None:
    """Make the next backward the last one of the step.

    This also applies if this rank has accumulated nothing: other ranks may have, and all must run the same graphs.
    """
    if state.phase is StepPhase.REDUCING_EACH:
        state.move_to(StepPhase.IDLE)
    if state.phase is not StepPhase.ADDING:
        return
    state.move_to(StepPhase.LAST)
    for entry in state.parameters:
        if entry.param.requires_grad:
            _hand_out_sum(entry, state)


def reduce_accumulated(state: PartitionState) -> None:
    """Average the sums over all ranks and add them to the parameters' `.grad`. All ranks call it together."""
    state.move_to(StepPhase.IDLE)
    trainable = [entry for entry in state.parameters if entry.param.requires_grad or entry.was_trained]
    taken = {entry: _take_sum(entry) for entry in trainable}
    # A graph whose backward has not run yet must not add them once more.
    read_by_graphs = [total for total in taken.values() if total is not None] if state.sums_were_read else []
    state.sums_were_read = False
    with state.operations.reducing("the accumulated gradients"):
        used = used_anywhere([taken[entry] is not None for entry in trainable], state)
    grads: dict[ParameterState, Tensor] = {}
    for entry, is_used in zip(trainable, used, strict=True):
        own = taken.pop(entry)
        if is_used and own is None:
            own = torch.zeros(entry.spec.shape, dtype=entry.param.dtype, device=entry.param.device)
        if own is not None:  # as in one process: a parameter that no rank used keeps its gradient of None
            grads[entry] = own
        del own
    reduced = reduce_all(grads)
    for total in read_by_graphs:
        empty_sum(total)
    state.note_gradient()
    deliver(reduced)  # last: a hook may raise, or step an optimizer


def discard_accumulated(state: PartitionState) -> None:
    """Drop the sums. Graphs that have read them add nothing if their backward still runs."""
    was_inside = state.accumulating
    state.move_to(StepPhase.IDLE)
    state.sums_were_read = False
    for entry in state.parameters:
        total = _take_sum(entry)
        if total is not None:
            empty_sum(total)
    if was_inside:
        enter_accumulation(state, reduce_once=state.reduces_once)


def _prepare_leaf(entry: ParameterState, state: PartitionState) -> None:
    shard = entry.rows
    source = shard if entry.gathered_copy is None else entry.gathered_copy
    if entry.leaf is None or entry.leaf.data_ptr() != source.data_ptr() or entry.leaf.dtype != source.dtype:
        # Not the copy itself, which is also read without this gradient. A graph keeps the leaf for a later backward.
        entry.leaf = leaf = source.detach()
        leaf.dsgraph_leaf = (entry, state)  # type: ignore[attr-defined]
        if entry.gathered_copy is not None:
            leaf.dsgraph_partition = state  # type: ignore[attr-defined]  # a graph that reads it refreshes the copy
        keep_static(leaf)
        if leaf.is_floating_point():
            _call_at_gradient(leaf.requires_grad_(), _on_local_gradient, entry, state)
    entry.leaf.grad = None  # left by an interrupted backward
    leaf = entry.leaf.requires_grad_(entry.param.requires_grad)
    entry.was_trained |= leaf.requires_grad
    if leaf.requires_grad and entry.hooked_param != id(entry.param):
        entry.hooked_param = id(entry.param)
        _call_before_gradient(entry)
        _call_at_gradient(entry.param, _on_reduced_gradient, entry, state)


def _call_at_gradient(
    tensor: Tensor,
    call: Callable[[ParameterState, PartitionState, Tensor], None],
    entry: ParameterState,
    state: PartitionState,
) -> None:
    weak_entry, weak_state = weakref.ref(entry), weakref.ref(state)

    def on_gradient(given: Tensor) -> None:
        living_entry, living_state = weak_entry(), weak_state()
        if living_entry is not None and living_state is not None:
            call(living_entry, living_state, given)

    tensor.register_post_accumulate_grad_hook(on_gradient)


def _call_before_gradient(entry: ParameterState) -> None:
    weak_entry = weakref.ref(entry)

    def before_gradient(grad: Tensor | None) -> None:
        living = weak_entry()
        if grad is None or living is None or living.placeholder is None:
            return
        if accumulates(autograd_node(living.param)):
            drop_if_zeroed(living)
            _take_placeholder(living)

    before_gradient.dsgraph_hook = True  # type: ignore[attr-defined]
    entry.param.register_hook(before_gradient)


def _take_placeholder(entry: ParameterState) -> None:
    if entry.placeholder is not None:
        entry.placeholder.take_away(entry.param)
        entry.placeholder = None


def _on_local_gradient(entry: ParameterState, state: PartitionState, leaf: Tensor) -> None:
    grad, leaf.grad = leaf.grad, None
    if grad is not None:
        add_local_gradient(entry, state, grad)


def add_local_gradient(entry: ParameterState, state: PartitionState, grad: Tensor) -> None:
    """Add a gradient to the sum, in the dtype of the master: there are many small summands. The sum may keep `grad`."""
    restore_sum(entry)
    drop_if_zeroed(entry)
    grad = grad.detach().to(entry.param.dtype)
    if entry.accumulated_grad is None:
        entry.accumulated_grad = grad
    else:
        with torch.no_grad(), keeping_version((entry.accumulated_grad,)):  # a graph may have saved it
            entry.accumulated_grad.add_(grad)
    entry.is_summed = True
    if entry.placeholder is None:
        entry.placeholder = GradientPlaceholder.put(entry.param, entry.name)
    if state.phase is StepPhase.ADDING:
        state.note_gradient()
    else:
        _reduce_at_end_of_backward(state)


def _on_reduced_gradient(entry: ParameterState, state: PartitionState, _: Tensor) -> None:
    """Note that a compiled graph has reduced the gradient: outside `accumulate`, this backward ends the step."""
    if (
        entry.is_summed and entry.placeholder is None
    ):  # the gradient bypassed the sum, as for a term over `parameters()`
        entry.placeholder = GradientPlaceholder.put(entry.param, entry.name)
    if state.gradients_stay_local and not state.accumulating:
        _reduce_at_end_of_backward(state)


def _reduce_at_end_of_backward(state: PartitionState) -> None:
    """Reduce the sums when the outermost running backward ends: one inside it is not the end of the micro-batch."""
    if state.phase is StepPhase.LAST:
        state.move_to(StepPhase.ENDING)
    backward = running_backward()
    if state.reducing_in == backward:
        return
    outer = enclosing_node()
    if outer is None:
        state.reducing_in = backward  # one that failed never ran its callbacks
        at_end_of_backward(lambda: reduce_accumulated(state))
    elif state.reducing_after != id(outer):
        state.reducing_after = id(outer)
        call_after(outer, lambda: _reduce_at_end_of_backward(state))


def _hand_out_sum(entry: ParameterState, state: PartitionState) -> None:
    """Let captured graphs read the sum; it is zero if this rank has none, so that all ranks capture the same graph."""
    drop_if_zeroed(entry)
    total = entry.accumulated_grad
    if total is None:
        total = torch.zeros(entry.spec.shape, dtype=entry.param.dtype, device=entry.param.device)
        entry.accumulated_grad = total
    if not hasattr(total, "dsgraph_sum_of"):
        total.dsgraph_sum_of = (entry, state)  # type: ignore[attr-defined]
        keep_static(total)
    entry.sum_for_graphs = total


def _take_sum(entry: ParameterState) -> Tensor | None:
    """Return the sum, None if there is none. The entry and its leaf drop their references."""
    restore_sum(entry)
    drop_if_zeroed(entry)
    _take_placeholder(entry)
    total = entry.accumulated_grad if entry.is_summed else None
    entry.accumulated_grad = entry.sum_for_graphs = None
    entry.is_summed = entry.was_trained = False
    return total


def _before_update(state: PartitionState, optimizer: Optimizer) -> None:
    """Refuse an optimizer step before the last backward; a rank without a last backward joins the others instead."""
    if not state.gradients_stay_local:
        return
    stepping = {id(param) for group in optimizer.param_groups for param in group["params"]}
    stepped = [entry for entry in state.parameters if id(entry.param) in stepping]
    for entry in stepped:
        drop_if_zeroed(entry)
        if entry.is_summed:
            raise AccumulationError(
                f"optimizer step before the accumulated gradients were reduced (parameter {entry.name!r}): "
                "run the last micro-batch's forward and backward outside dsgraph.accumulate(model)"
            )
    if stepped and state.phase is StepPhase.LAST:
        reduce_accumulated(state)
