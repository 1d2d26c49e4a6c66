"""Stage 3 with memory to spare: which parameters `accumulate` gathers once a step, instead of in every micro-batch.

What `SelectiveGather` keeps of a graph from its forward to its backward is in memory at the peak of each micro-batch.
To hold as much from the first micro-batch of a step to the last takes no more at the peak, and spares all gathers but
one. So the room is the same, and whatever graph is captured while replicas are held counts them as taken.
"""

from __future__ import annotations

from torch import nn

from dsgraph.inductor_ext import resolve_group
from dsgraph.passes import CaptureFacts, CostModel
from dsgraph.passes.knapsack import most_valuable

from .state import ParameterState, partition_states


def choose_step_replicas(facts: CaptureFacts, module: nn.Module | None) -> None:
    """Notes for each parameter of stage 3 whether a replica of it is held for a step of micro-batches.

    The knapsack of `SelectiveGather` over all of the model's parameters: sizes, links and room are the same on every
    rank, and so is the choice. Of a graph that reads replicas of such parameters nothing is noted: the step goes on
    as it began.

    Args:
        facts: Of a captured graph that reads every parameter of the model; of others `keep_bytes` is None.
        module: The model.
    """
    if facts.keep_bytes is None or module is None:
        return
    states = [state for state in partition_states(module) if state.stage == 3]
    if any(state.replicated() for state in states):
        return
    entries = [entry for state in states for entry in state.parameters if entry.layout.group]
    sizes = [entry.replica_bytes for entry in entries]
    costs = facts.costs or CostModel.default(facts.axes, device_type=facts.device_type)
    seconds = [_seconds(entry, costs) for entry in entries]
    chosen = set(most_valuable(sizes, seconds, room=facts.keep_bytes))
    for number, entry in enumerate(entries):
        entry.is_held_for_step = number in chosen


def _seconds(entry: ParameterState, costs: CostModel) -> float:
    """How long its gather takes."""
    group = entry.layout.group
    world = resolve_group(group).size()
    sent = entry.replica_bytes * (world - 1) // world
    return costs.transfer_seconds("all_gather_into_tensor", group, sent) or 0.0
