"""`accumulate(model)`: micro-batches whose gradients wait for the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .errors import PartitionError
from .local_gradients import enter_accumulation, leave_accumulation
from .state import partition_states


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Marks micro-batches that are not the last of a step.

    Run all micro-batches but the last inside it, forward and backward, and the last one outside:

        for batch in micro_batches[:-1]:
            with dsgraph.accumulate(model):
                loss(model, batch).backward()
        loss(model, micro_batches[-1]).backward()
        optimizer.step()

    Gradients add up, as they always do in torch; scale the loss if they should be averaged. Stages 0 and 1 add them up
    locally and reduce the sum once, at the end of the last backward. Stages 1 and 2 gather each parameter once a step.
    Stage 3 reduces in every backward, inside and outside.

    Args:
        model: A partitioned model, compiled or not, or a module that contains partitioned ones.

    Raises:
        PartitionError: Nothing in `model` is partitioned.
    """
    states = partition_states(model)
    if not states:
        raise PartitionError(
            f"accumulate: no partitioned module in {type(model).__name__}; call dsgraph.partition(model, ...) first"
        )
    for state in states:
        enter_accumulation(state)
    try:
        yield
    finally:
        for state in states:
            leave_accumulation(state)
