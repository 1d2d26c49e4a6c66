"""`accumulate(model)`: micro-batches whose gradients wait for the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dsgraph.partitioning.stages import ZeroStage
from dsgraph.partitioning.state import PartitionState, StepPhase, partition_states
from dsgraph.utils.errors import PartitionError

from .accumulated_gradients import discard_accumulated, enter_accumulation, leave_accumulation, reduce_accumulated


@contextmanager
def accumulate(model: nn.Module, *, reduce_once: bool | None = None) -> Iterator[None]:
    """Mark micro-batches that are not the last of a step.

    Run all micro-batches but the last inside it, forward and backward, and the last one outside:

        for batch in micro_batches[:-1]:
            with dsgraph.accumulate(model):
                loss(model, batch).backward()
        loss(model, micro_batches[-1]).backward()
        optimizer.step()

    Gradients add up, as they always do in torch; scale the loss if they should be averaged. Stages 0 and 1 add them up
    locally and reduce the sum once, in the last backward. Stages 1 and 2 gather each parameter once a step. Stages 2
    and 3 reduce in every backward, inside and outside; stage 2 works like stage 1 with `reduce_once=True`, which suits
    links where bandwidth is scarcer than memory. Stage 3 gathers in every micro-batch. Parameters of repeated blocks
    for which `memory_limit` leaves room are the exception: they are gathered once a step and held to the end of the
    last backward, or to the optimizer's step if that comes first. The report lists them.

    Where gradients are reduced once, the compiled graphs of the last micro-batch do it: each sum travels with the last
    gradient of its parameter, while the backward computes. They are graphs of their own, compiled when they first run.
    As in a step without `accumulate`, the ranks must run the same graphs in the last micro-batch. At the end of that
    backward the remaining sums are reduced: those of parameters that this micro-batch does not use, and those of
    uncompiled code, which may differ between ranks.

    Until that backward has ended, local sums are not in `.grad`: it is a `DTensor` of NaN, without memory of its own.
    `zero_grad` of an optimizer or a module drops the sums of its parameters, as in one process; any other write to
    `.grad`, such as clipping, is an error. Hooks of parameters are called once a step, with the whole averaged
    gradient, where gradients are reduced once; otherwise in every backward.

    Args:
        model: A partitioned model, compiled or not, or a module that contains partitioned ones.
        reduce_once: True keeps gradients on each rank, at full size, until the last backward. None: the stage's
            default, True in stages 0 and 1, False in 2 and 3. Stage 2 supports both. With True it holds one more full
            gradient, in the dtype of the shards, from the first backward of the step to the end of the last one, and
            sends each gradient once a step. It is DDP's `no_sync`, FSDP2's `set_requires_gradient_sync(False)`. Once
            gradients of a step have stayed on the ranks, those of its other micro-batches do as well.

    Raises:
        PartitionError: Nothing in `model` is partitioned, or its stage cannot do as `reduce_once` says.
    """
    states = _states(model, "accumulate")
    for state in states:
        _check(reduce_once, state.zero)
    try:
        for state in states:
            enter_accumulation(state, reduce_once=state.zero.reduces_once if reduce_once is None else reduce_once)
        yield
    finally:
        for state in states:
            leave_accumulation(state)


def discard(model: nn.Module) -> None:
    """Abandon a step: drop the gradients that `accumulate` has added up on each rank since the last step.

    The next step begins as if the micro-batches had not run. All ranks call it together, in place of the last backward
    or after one that has failed, inside `accumulate` or outside:

        if overflow:  # on any rank: ranks must agree
            dsgraph.discard(model)
            optimizer.zero_grad()

    Reduced gradients are in `.grad` (all of them if `accumulate` reduces in every backward); `zero_grad` drops those.
    `zero_grad` drops sums as well; `discard` also releases the parameters that stage 3 holds for the step, inside
    `accumulate` at the end of the next step.

    Args:
        model: As for `accumulate`.

    Raises:
        PartitionError: Nothing in `model` is partitioned.
    """
    for state in _states(model, "discard"):
        discard_accumulated(state)
        state.give_up_step()


def allreduce_gradients(model: nn.Module) -> None:
    """Reduce the gradients of a step whose micro-batches all ran inside `accumulate`.

    Ranks may run different parts of the model in such a step, as under DDP's `find_unused_parameters`:

        with dsgraph.accumulate(model):
            loss(model, batch, head=rank).backward()  # each rank trains another head
        dsgraph.allreduce_gradients(model)
        optimizer.step()

    A parameter's gradient is the mean over all ranks; a rank that has not used the parameter adds zeros. A parameter
    that no rank has used has no gradient. All ranks call this function together.

    Args:
        model: As for `accumulate`.

    Raises:
        PartitionError: Nothing in `model` is partitioned, its stage reduces gradients in each backward, or the call is
            inside `accumulate`.
    """
    states = _states(model, "allreduce_gradients")
    for state in states:
        if state.phase is StepPhase.ADDING:
            raise PartitionError("allreduce_gradients: call it after the block `with dsgraph.accumulate(model)`")
        if not state.reduces_once:
            raise PartitionError(
                f"allreduce_gradients: stage {state.zero.number} has reduced gradients in each backward, in which all "
                "ranks run the same parts: use stage 0 or 1, or stage 2 with accumulate(model, reduce_once=True)"
            )
    for state in states:
        reduce_accumulated(state)


def _states(model: nn.Module, caller: str) -> list[PartitionState]:
    if not isinstance(model, nn.Module):
        raise PartitionError(f"{caller} takes a torch.nn.Module, found {type(model).__name__}")
    states = partition_states(model)
    if not states:
        raise PartitionError(
            f"{caller}: no partitioned module in {type(model).__name__}; call dsgraph.partition(model, ...) first"
        )
    return states


def _check(reduce_once: object, zero: ZeroStage) -> None:
    if reduce_once is None:
        return
    if not isinstance(reduce_once, bool):
        raise PartitionError(f"accumulate: reduce_once is {reduce_once!r}; it takes True, False or None")
    if zero.allows(reduce_once=reduce_once):
        return
    if reduce_once:
        raise PartitionError(
            "accumulate: reduce_once is True, and the model was partitioned with stage=3, in which no rank holds a "
            "full parameter whose gradient it could keep: leave reduce_once out, or partition with stage=2"
        )
    raise PartitionError(
        f"accumulate: reduce_once is False, and the model was partitioned with stage={zero.number}, in which "
        "micro-batches add their gradients up locally: leave reduce_once out, or partition with stage=2"
    )
