"""Stage 3 with memory to spare: the parameters that `accumulate` gathers once a step, not in every micro-batch.

`SelectiveGather` keeps some gathered parameters from a graph's forward to its backward, so they are in memory at the
moment when a micro-batch has saved the most. Holding as many bytes from the first micro-batch of a step to the last
needs no more memory at that moment, and saves all gathers but one. They are still in memory while the backward holds
gradients of full size, which are therefore subtracted from the room. A graph that is captured while copies are held
counts their memory as used.
"""

from __future__ import annotations

from torch import nn

from dsgraph.inductor_ext import resolve_group
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import partition_states
from dsgraph.passes import CaptureFacts, CostModel
from dsgraph.passes.analysis.budget import choose

# Gradients of full size in a backward: one that is computed, one that is sent, and what is received.
_GRADIENTS_UNDER_WAY = 3


def choose_step_copies(facts: CaptureFacts, module: nn.Module | None) -> None:
    """Decide for each parameter of stage 3 whether a gathered copy of it is held for a step of micro-batches.

    The knapsack of `SelectiveGather` over all of the model's parameters. Sizes and links are the same on every rank;
    the room is the least of all graphs so far. A rank that compiles alone, for another batch, compiles a graph that all
    ranks know, whose room is among them: the choice is the same everywhere.

    Args:
        facts: Those of a captured graph that reads every parameter of the model, and no gathered copy of stage 3. For
            other graphs `keep_bytes` is None, or the room left beside the gathered copies, and nothing is decided.
        module: The model.
    """
    states = partition_states(module) if module is not None else []
    if facts.keep_bytes is None or facts.gathered_copies or len(states) != 1 or not states[0].zero.gathers_each_use:
        return
    (state,) = states
    if state.step_room is not None and state.step_room <= facts.keep_bytes:
        return
    state.step_room = facts.keep_bytes
    entries = [entry for entry in state.parameters if entry.spec.group and resolve_group(entry.spec.group).size() > 1]
    sizes = [entry.copy_bytes for entry in entries]
    room = max(0, state.step_room - _GRADIENTS_UNDER_WAY * max(sizes, default=0))
    costs = facts.costs or CostModel.default(facts.axes, device_type=facts.device_type)
    seconds = [_seconds(entry, costs) for entry in entries]
    chosen = choose(entries, sizes, seconds, room)
    for entry in entries:
        entry.is_held_for_step = entry in chosen


def _seconds(entry: ParameterState, costs: CostModel) -> float:
    """Return the predicted seconds of its gather."""
    group = entry.spec.group
    world = resolve_group(group).size()
    sent = entry.copy_bytes * (world - 1) // world
    return costs.transfer_seconds("all_gather_into_tensor", group, sent) or 0.0
