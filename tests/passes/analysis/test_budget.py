from __future__ import annotations

from dataclasses import replace

import torch

from dsgraph.passes import CostModel, ParameterSpec, PassContext, Phase, Pipeline, Runner
from dsgraph.passes.analysis.budget import MemoryBudget, MemoryPart, choose, parameter_needs
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.states import below_bytes
from dsgraph.passes.zero.keep_last_gather import KeepLastGather
from dsgraph.passes.zero.selective_gather import SelectiveGather
from tests.passes.tracing import SHARD, Providing, trace
from tests.passes.zero.test_selective_gather import B, C, _lowered, _params, _saved

WEIGHT = ParameterSpec("weight", (8, 4), (4, 4), torch.float32, "0", True)
FROZEN = replace(WEIGHT, name="frozen", requires_grad=False)
SIZE = 64  # bytes of a shard of either


def test_a_parameter_needs_a_gradient_and_two_states_if_it_is_trained():
    assert parameter_needs([WEIGHT, FROZEN]) == {
        MemoryPart.PARAMETERS: 2 * SIZE,
        MemoryPart.GRADIENTS: SIZE,
        MemoryPart.OPTIMIZER_STATE: 2 * SIZE,
    }


def test_what_lies_elsewhere_takes_no_memory():
    stored = replace(WEIGHT, tier="disk", state_tier="disk", state_share=1.0)
    half = replace(WEIGHT, state_tier="disk", state_share=0.5)
    assert parameter_needs([stored, half]) == {
        MemoryPart.PARAMETERS: SIZE,
        MemoryPart.GRADIENTS: SIZE,
        MemoryPart.OPTIMIZER_STATE: SIZE,
    }
    assert below_bytes([stored, half], 2) == {
        "disk": {"parameters": SIZE, "gradients": SIZE, "optimizer state": 3 * SIZE}
    }
    memory = simulate(trace(lambda x, w: torch.mm(x, w), torch.randn(2, 4), torch.randn(4, 4)))
    here, there = (MemoryBudget(10_000, parameter_needs([info])) for info in (WEIGHT, stored))
    spared = 3 * SIZE  # its rows, and Adam's state
    assert there.left_beside(memory, [stored]) - here.left_beside(memory, [WEIGHT]) == spared


def test_what_one_takes_is_not_there_for_the_next():
    budget = MemoryBudget(1000, {MemoryPart.PARAMETERS: 100}, to_keep=300)
    assert (budget.left, budget.left_to_keep) == (900, 300)
    budget.take(MemoryPart.GATHERED_COPIES, "a", 200)
    budget.take(MemoryPart.ACTIVATIONS, "y", 50)
    assert (budget.left, budget.left_to_keep) == (650, 100)
    budget.take(MemoryPart.GATHERED_COPIES, "a", 200)  # once more by the same
    assert budget.left_to_keep == 100
    budget.take(MemoryPart.GATHERED_COPIES, "b", 200)
    assert budget.left_to_keep == 0


def test_without_a_limit_nothing_is_known():
    assert MemoryBudget().left is None and MemoryBudget().left_to_keep is None


def test_parameters_that_a_graph_does_not_read_take_room_as_well():
    gm = trace(lambda x, w: torch.mm(x, w), torch.randn(2, 4), torch.randn(4, 4))
    memory = simulate(gm)
    both = MemoryBudget(10_000, parameter_needs([WEIGHT, FROZEN]))
    one = MemoryBudget(10_000, parameter_needs([WEIGHT]))
    assert one.left_beside(memory, [WEIGHT]) == 10_000 - memory.peak - 2 * SIZE
    assert both.left_beside(memory, [WEIGHT]) == one.left_beside(memory, [WEIGHT]) - SIZE
    assert MemoryBudget(1, parameter_needs([WEIGHT])).left_beside(memory, [WEIGHT]) == 0


def test_entries_are_chosen_in_order():
    assert choose(["a", "b", "c"], [4, 4, 4], [1.0, 3.0, 2.0], 8) == ["b", "c"]


def test_passes_of_one_compile_share_the_budget():
    """Memory reserved for the last gather is not available for the others, and their reservations persist."""
    gm = _lowered()
    budget = MemoryBudget(to_keep=C + B)
    ctx = PassContext(Phase.JOINT, axes=(SHARD,), params=_params(gm), costs=CostModel.default((SHARD,)), budget=budget)
    needed = Providing(frozenset({"zero-collectives"}))
    Runner(Pipeline([needed, KeepLastGather(), SelectiveGather()])).run(gm, ctx)
    assert "".join(_saved(gm).values()) == "bc"
    assert budget.taken(MemoryPart.GATHERED_COPIES) == B + C and budget.left_to_keep == 0
