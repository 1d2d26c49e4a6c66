"""Wrong orders in the graph of a step: the verifier refuses each of them before the step runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import dsgraph
from dsgraph.compiler.options import BackendOptions
from dsgraph.compiler.step_plans import plan_step
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.step.step_record import StepRecord, StepUnit, Work
from dsgraph.passes import GraphPass, PassError, PassResult, Phase
from dsgraph.passes.ir.coalesced import collective_behind
from dsgraph.passes.ir.collectives import collectives, is_gather, is_reduction
from dsgraph.passes.ir.gathers import is_unit
from dsgraph.passes.ir.graph import is_wait
from dsgraph.ranks.agreement import Agreements

pytestmark = pytest.mark.usefixtures("fake_ranks")


def _step(draw: random.Random) -> tuple[PartitionState, StepRecord]:
    """Return a model and a step of random units: order, sizes, times, what they share, what is trained."""
    widths = [draw.choice((8, 16, 24, 40)) for _ in range(draw.randint(2, 6))]
    model = nn.Sequential(*(nn.Linear(width, width, bias=draw.random() < 0.5) for width in widths))
    (state,) = partition_states(dsgraph.partition(model, stage=3, keep_whole_below=0))
    groups = [[entry for entry in state.parameters if entry.name.startswith(f"{n}.")] for n in range(len(widths))]
    record, value = StepRecord(), torch.empty(2, 8)
    order = list(range(len(widths))) + ([0] if draw.random() < 0.3 else [])  # a tied layer
    for number, group in enumerate(order):
        unit = StepUnit(f"unit {number}", work=Work(operations=draw.randint(1, 10**8), moved=10**4))
        record.begin(unit, ((group,), True, False), tuple(groups[group]), [value])
        value = torch.empty(2, 8)
        record.end(number, (value,), saved_bytes=draw.randint(0, 10**5))
    for number in reversed(range(len(order))):
        record.backward.append(number)
        record.calls[number].trained = tuple(groups[order[number]])
    return state, record


def _waits(graph: Graph, is_kind: Callable[[Node], bool]) -> list[Node]:
    return [node for node in graph.nodes if is_wait(node) and is_kind(collective_behind(node))]


def _drop_wait(graph: Graph, draw: random.Random) -> bool:
    """Drop the wait before a read."""
    wait = draw.choice(_waits(graph, lambda node: is_gather(node) or is_reduction(node)) or [None])
    if wait is not None:
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)
    return wait is not None


def _gather_late(graph: Graph, draw: random.Random) -> bool:
    """Wait for a gather after the unit that reads it."""
    wait = draw.choice(_waits(graph, is_gather) or [None])
    units = [user for user in wait.users if is_unit(user)] if wait is not None else []
    for unit in units[:1]:
        unit.append(wait)
    return bool(units)


def _free_early(graph: Graph, draw: random.Random) -> bool:
    """Do not keep a full parameter or a shard that the backward takes."""
    (output,) = graph.find_nodes(op="output")
    kept = [node for node in output.args[0] if isinstance(node, Node) and (is_wait(node) or node.op == "placeholder")]
    if not kept:
        return False
    gone = draw.choice(kept)
    output.args = (tuple(node for node in output.args[0] if node is not gone),)
    return True


def _reduce_twice(graph: Graph, draw: random.Random) -> bool:
    """Reduce a gradient once more."""
    started = draw.choice([node for node in collectives(graph.owning_module) if is_reduction(node)] or [None])
    if started is None:
        return False
    with graph.inserting_after(started):
        again = graph.node_copy(started)
    with graph.inserting_after(again):
        graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (again,)).meta.update(again.meta)
    return True


def _give_another_value(graph: Graph, draw: random.Random) -> bool:
    """Give a unit a value that is not the one of the model."""
    unit = draw.choice([node for node in graph.nodes if is_unit(node)])
    (first, *others) = unit.args[1]
    with graph.inserting_before(unit):
        other = graph.call_function(torch.ops.aten.neg.default, (first,))
    other.meta.update(first.meta)
    unit.args = (unit.args[0], [other, *others], unit.args[2])
    return True


WRONG: dict[str, tuple[Phase, Callable[[Graph, random.Random], bool]]] = {
    "wait dropped in the forward": (Phase.FORWARD, _drop_wait),
    "wait dropped in the backward": (Phase.BACKWARD, _drop_wait),
    "gather after its use": (Phase.FORWARD, _gather_late),
    "gather after its use in the backward": (Phase.BACKWARD, _gather_late),
    "freed too early": (Phase.FORWARD, _free_early),
    "reduced twice": (Phase.BACKWARD, _reduce_twice),
    "another value": (Phase.FORWARD, _give_another_value),
    "another value in the backward": (Phase.BACKWARD, _give_another_value),
}


@dataclass(frozen=True)
class _Sabotage(GraphPass):
    """Do one thing wrong."""

    way: str = ""
    seed: int = 0
    done: list[bool] | None = None
    phase: Phase = Phase.FORWARD  # type: ignore[misc]
    graph = "step"
    reorders_collectives = True

    def run(self, gm: GraphModule, ctx: object) -> PassResult:
        assert self.done is not None
        self.done.append(WRONG[self.way][1](gm.graph, random.Random(self.seed)))
        return PassResult(changed=1)


def _is_found(way: str, seed: int) -> bool | None:
    """Return whether the verifier refuses a step in which something is wrong; None if it has nothing to do wrong."""
    (state, record), done = _step(random.Random(seed)), list[bool]()
    wrong = _Sabotage(way=way, seed=seed, done=done, phase=WRONG[way][0])
    options = BackendOptions(pipeline=dsgraph.default_pipeline() + wrong)
    try:
        plan_step(state, record, options, number=1, observers=(), agreements=Agreements())
    except PassError as error:
        assert "sabotage" in str(error)
        return True
    return False if done == [True] else None


def _missed(seeds: range) -> list[tuple[str, int]]:
    found = {(way, seed): _is_found(way, seed) for seed in seeds for way in WRONG}
    assert sum(is_found is not None for is_found in found.values()) >= len(found) * 0.8
    return [pair for pair, is_found in found.items() if is_found is False]


def test_wrong_orders_are_refused():
    assert not _missed(range(5))


@pytest.mark.full
def test_300_wrong_orders_are_refused():
    assert not _missed(range(100, 160))
