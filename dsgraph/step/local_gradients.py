"""Gradients that stay local under accumulation: added up on each rank, reduced once.

So do those of stages 0 and 1, and those of stage 2 with `reduce_once`. Inside `accumulate`, a module hands out a leaf
in place of the marker: the replica (stages 1 and 2), or an alias of the shard of a parameter that every rank holds
whole. The captured graph has no collective at all, and what arrives at the leaf is added to the parameter's local sum.

The micro-batch after `accumulate` ends the step. Its compiled graphs hold markers again, each with the sum of its
parameter, which is added to the gradient ahead of the reduction: gradients travel while the backward computes; see
`last_micro_batch`. Uncompiled code goes on handing out leaves. When the backward is through, the ranks agree on which
sums no graph has taken (of uncompiled code, of parameters that this micro-batch does not use), and those are reduced
into the parameters' `.grad`. From then on modules hand out markers alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsgraph import compat
from dsgraph.errors import AccumulationError
from dsgraph.inductor_ext import all_reduce_sum
from dsgraph.sharding.table import held_by

if TYPE_CHECKING:
    from .state import ParameterState, PartitionState

# How much is under way at once when sums are reduced: what travels is there twice.
_IN_FLIGHT_BYTES = 64 * 2**20


def enter_accumulation(state: PartitionState, *, reduce_once: bool) -> None:
    """From here on gradients of `state` belong to a step that is not over.

    With `reduce_once` they are no longer reduced. So it stays in a step in which some have not been: they are reduced
    by the backward that ends it.
    """
    state.accumulating = True
    if not reduce_once and not state.gradients_stay_local:
        state.reduces_once = False
        return
    state.reduces_once = True
    state.gradients_stay_local = True
    _refuse_early_steps(state)
    for entry in state.parameters:
        _prepare_leaf(entry, state)


def leave_accumulation(state: PartitionState) -> None:
    """The next backward is the last of the step."""
    state.accumulating = False
    state.gradients_stay_local = any(entry.is_summed for entry in state.parameters)
    if not state.gradients_stay_local:
        return
    for entry in state.parameters:
        if entry.param.requires_grad:
            _hand_out_sum(entry, state)


def reduce_local_gradients(state: PartitionState) -> None:
    """Averages the sums over all ranks and adds them to the parameters' `.grad`. All ranks call it together."""
    state.reducing_in = -1
    state.gradients_stay_local = False
    trainable = [entry for entry in state.parameters if entry.param.requires_grad]
    taken = {entry: _take_sum(entry) for entry in trainable}
    # A graph whose backward is still to come, be it that it never comes, must not add them once more.
    read_by_graphs = [total for total in taken.values() if total is not None] if state.sums_were_read else []
    state.sums_were_read = False
    used = _used_anywhere([taken[entry] is not None for entry in trainable], state)
    alone: list[ParameterState] = []
    together: dict[object, list[ParameterState]] = defaultdict(list)
    for entry, is_used in zip(trainable, used, strict=True):
        if not is_used:
            continue  # as in one process: a parameter that no rank used keeps its gradient of None
        if taken[entry] is None:
            taken[entry] = torch.zeros(entry.layout.shape, dtype=entry.param.dtype, device=entry.param.device)
        if entry.layout.group:
            alone.append(entry)
        else:
            together[entry.layout.dtypes(entry.param.dtype), entry.layout.outer_groups].append(entry)
    _reduce_split({entry: taken.pop(entry) for entry in alone})
    for bucket in together.values():
        _reduce_whole(bucket, [taken.pop(entry) for entry in bucket])
    for total in read_by_graphs:
        empty_sum(total)
    state.note_gradient()


def discard_local_gradients(state: PartitionState) -> None:
    """Drops the sums. Graphs that have been given them add nothing, should their backward still come."""
    state.reducing_in = -1
    state.gradients_stay_local = False
    state.sums_were_read = False
    for entry in state.parameters:
        total = _take_sum(entry)
        if total is not None:
            empty_sum(total)
    if state.accumulating:
        enter_accumulation(state, reduce_once=state.reduces_once)


def empty_sum(total: Tensor) -> None:
    """Takes out of a local sum what has been reduced. Whatever graph still has it adds nothing."""
    with torch.no_grad(), compat.keeping_version((total,)):
        total.zero_()


def withhold_sum(entry: ParameterState) -> None:
    """Takes a sum away from a backward that must not add it, until `restore_sum`."""
    assert entry.local_sum is not None
    entry.withheld = entry.local_sum.clone()
    empty_sum(entry.local_sum)


def restore_sum(entry: ParameterState) -> None:
    """Puts back what was withheld, if anything was: also where the backward failed before it was through."""
    total, value = entry.local_sum, entry.withheld
    entry.withheld = None
    if total is not None and value is not None:
        with torch.no_grad(), compat.keeping_version((total,)):
            total.copy_(value)


def _prepare_leaf(entry: ParameterState, state: PartitionState) -> None:
    shard = entry.param.to_local().detach()
    source = shard if entry.replica is None else entry.replica
    if entry.leaf is None or entry.leaf.data_ptr() != source.data_ptr() or entry.leaf.dtype != source.dtype:
        entry.leaf = source
        source.dsgraph_leaf = True  # type: ignore[attr-defined]  # tells the report whose graph reads it
        compat.keep_static(source)
    for module, attribute in entry.owners:
        held_by(module).leaves[attribute] = entry.leaf
    leaf = entry.leaf.requires_grad_(entry.param.requires_grad)
    if leaf.requires_grad and entry.hooked_leaf != id(leaf):
        entry.hooked_leaf = id(leaf)
        _call_at_gradient(leaf, _on_local_gradient, entry, state)
    if leaf.requires_grad and entry.hooked_param != id(entry.param):
        entry.hooked_param = id(entry.param)
        _call_at_gradient(entry.param, _on_reduced_gradient, entry, state)


def _call_at_gradient(
    tensor: Tensor, call: Callable[[ParameterState, PartitionState], None], entry: ParameterState, state: PartitionState
) -> None:
    weak_entry, weak_state = weakref.ref(entry), weakref.ref(state)

    def on_gradient(_: Tensor) -> None:
        living_entry, living_state = weak_entry(), weak_state()
        if living_entry is not None and living_state is not None:
            call(living_entry, living_state)

    tensor.register_post_accumulate_grad_hook(on_gradient)


def _on_local_gradient(entry: ParameterState, state: PartitionState) -> None:
    """Adds what has arrived at the leaf to the sum, with the master's bits: there are many small summands."""
    restore_sum(entry)
    leaf = entry.leaf
    if leaf is None or leaf.grad is None:
        return  # a graph that only reads the replica sends no gradient here
    grad = leaf.grad.to(entry.param.dtype)
    leaf.grad = None
    if entry.local_sum is None:
        entry.local_sum = grad
    else:
        with torch.no_grad(), compat.keeping_version((entry.local_sum,)):  # a graph may have saved it
            entry.local_sum.add_(grad)
    entry.is_summed = True
    if state.accumulating:
        state.note_gradient()
    else:
        _reduce_at_end_of_backward(state)


def _on_reduced_gradient(entry: ParameterState, state: PartitionState) -> None:
    """A compiled graph has reduced the gradient: outside `accumulate`, the step ends with this backward."""
    if state.gradients_stay_local and not state.accumulating:
        _reduce_at_end_of_backward(state)


def _reduce_at_end_of_backward(state: PartitionState) -> None:
    backward = compat.running_backward()
    if state.reducing_in != backward:  # one that failed never came to its end
        state.reducing_in = backward
        compat.at_end_of_backward(lambda: reduce_local_gradients(state))


def _hand_out_sum(entry: ParameterState, state: PartitionState) -> None:
    """Lets captured graphs read the sum: zeros where this rank has none, so that all ranks capture the same graph."""
    total = entry.local_sum
    if total is None:
        total = torch.zeros(entry.layout.shape, dtype=entry.param.dtype, device=entry.param.device)
        entry.local_sum = total
    if not hasattr(total, "dsgraph_sum_of"):
        total.dsgraph_sum_of = (entry, state)  # type: ignore[attr-defined]
        compat.keep_static(total)
    for module, attribute in entry.owners:
        held_by(module).sums[attribute] = total


def _take_sum(entry: ParameterState) -> Tensor | None:
    """The sum, if there is anything in it. The entry, its modules and its leaf let go of theirs."""
    restore_sum(entry)
    total = entry.local_sum if entry.is_summed else None
    entry.local_sum = None
    entry.is_summed = False
    for module, attribute in entry.owners:
        held_by(module).sums.pop(attribute, None)
    if entry.leaf is not None:
        entry.leaf.requires_grad_(False)
    return total


def _used_anywhere(used_here: list[bool], state: PartitionState) -> list[bool]:
    if not used_here:
        return []
    device = state.parameters[0].param.device
    counts = torch.tensor(used_here, dtype=torch.int32, device=device)
    return (all_reduce_sum(counts, [axis.group for axis in state.axes]) > 0).tolist()


def _reduce_split(grads: dict[ParameterState, Tensor | None]) -> None:
    """Reduces gradients of split parameters, several on their way at once. Each is freed when it has been added."""
    started: deque[tuple[ParameterState, int, Callable[[], Tensor]]] = deque()
    for entry in list(grads):
        grad = grads.pop(entry)
        assert grad is not None
        started.append((entry, grad.nbytes, entry.layout.start_reducing(grad, entry.param.to_local())))
        del grad
        while sum(size for _, size, _ in started) > _IN_FLIGHT_BYTES and len(started) > 1:
            first, _, finish = started.popleft()
            _add_gradient(first, finish())
    for entry, _, finish in started:
        _add_gradient(entry, finish())


def _reduce_whole(bucket: Sequence[ParameterState], grads: Sequence[Tensor | None]) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
    averaged = bucket[0].layout.reduce(flat, flat.new_empty(flat.shape, dtype=bucket[0].param.dtype))
    sizes = [entry.param.numel() for entry in bucket]
    for entry, part in zip(bucket, averaged.split(sizes), strict=True):
        _add_gradient(entry, part.view(entry.layout.shape))


def _add_gradient(entry: ParameterState, grad: Tensor) -> None:
    param = entry.param
    with torch.no_grad():
        value = DTensor.from_local(
            grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        param.grad = value if param.grad is None else param.grad + value


def _refuse_early_steps(state: PartitionState) -> None:
    if state.guarding == id(state):
        return
    state.guarding = id(state)
    weak_state = weakref.ref(state)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = weak_state()
        if living is None or not living.gradients_stay_local:
            return
        stepping = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for entry in living.parameters:
            if id(entry.param) in stepping and entry.is_summed:
                raise AccumulationError(
                    f"optimizer step before the accumulated gradients were reduced (parameter {entry.name!r}): "
                    "run the last micro-batch's forward and backward outside dsgraph.accumulate(model)"
                )

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(state, handle.remove)
