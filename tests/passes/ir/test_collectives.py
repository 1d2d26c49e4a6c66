"""One entry in the table, and everything that looks at communication knows the collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.passes import CostModel, PassContext, PassError, Phase, Pipeline, Runner, graph_pass
from dsgraph.passes.analysis.cost import sent_bytes
from dsgraph.passes.analysis.hardware import DEVICES, Link
from dsgraph.passes.analysis.memory import MemoryKind, simulate
from dsgraph.passes.core.collective_order import collective_lines
from dsgraph.passes.ir import collectives as table
from dsgraph.passes.ir.collectives import TABLE, Collective, CollectiveTable, Role, collective_steps, collectives
from dsgraph.passes.ir.graph import emit, is_wait, replace_and_erase
from dsgraph.tools.calibration import measure_collectives
from dsgraph.tools.dumping.describe import Describer
from tests.passes.tracing import SHARD, trace

c10d = torch.ops._c10d_functional


@torch.library.custom_op(
    "dsgraph::swap_rows_of_a_test", mutates_args=(), schema="(Tensor input, int group_size, str group_name) -> Tensor"
)
def swap_rows(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return input.clone()


@swap_rows.register_fake
def _(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return torch.empty_like(input)


OWN = Collective(
    torch.ops.dsgraph.swap_rows_of_a_test.default,
    Role.EXCHANGE,
    shares=lambda n: 1,
    steps=lambda n: 3,
    start=lambda whole, ranks, group: torch.ops.dsgraph.swap_rows_of_a_test(whole, ranks, group),
)
# How those are called that are not measured, and so have no `start`.
_CALLS = {
    "broadcast": lambda x: c10d.broadcast(x, 0, "0"),
    "isend": lambda x: c10d.isend(x, 1, 0, "0"),
    "irecv": lambda x: c10d.irecv(x, 1, 0, "0"),
    "batch_p2p_ops": lambda x: c10d.batch_p2p_ops(["isend"], [1], [0], [x], "0")[0],
}
ENTRIES = (*TABLE.entries, OWN)


@pytest.fixture(autouse=True)
def _own_entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(table, "TABLE", CollectiveTable(*ENTRIES))
    yield


def _call(kind: Collective, x: Tensor) -> Tensor:
    return kind.start(x, 2, "0") if kind.start is not None else _CALLS[kind.kind](x)


def _graph(kind: Collective) -> tuple[GraphModule, Node]:
    """A graph that runs one collective of what it has computed, and computes on meanwhile."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        started = _call(kind, x * 2)
        return torch.mm(y, y), c10d.wait_tensor(started) + 1

    gm = trace(function, torch.randn(8, 4), torch.randn(4, 4))
    (started,) = collectives(gm)
    return gm, started


def _context(phase: Phase = Phase.FORWARD) -> PassContext:
    return PassContext(phase, (SHARD,), costs=CostModel.default((SHARD,)))


each = pytest.mark.parametrize("kind", ENTRIES, ids=lambda kind: kind.kind)


@each
def test_the_verifier_wants_its_wait(kind):
    @graph_pass(phase="forward", changes_collectives=True)
    def forget_to_wait(gm, ctx):
        (wait,) = filter(is_wait, gm.graph.nodes)
        replace_and_erase(wait, wait.all_input_nodes[0])
        return 1

    gm, started = _graph(kind)
    with pytest.raises(PassError, match=rf"forget_to_wait.*{started.name}.*(wait|getitem)"):
        Runner(Pipeline([forget_to_wait])).run(gm, _context())


@each
def test_the_verifier_wants_it_declared(kind):
    @graph_pass(phase="forward")
    def leave_it_out(gm, ctx):
        (wait,), (started,) = filter(is_wait, gm.graph.nodes), collectives(gm)
        shape = list(wait.meta["val"].shape)
        replace_and_erase(wait, emit(wait, torch.ops.aten.new_zeros.default, started.all_input_nodes[0], shape))
        for node in (*started.users, started):
            gm.graph.erase_node(node)
        return 1

    gm, _ = _graph(kind)
    with pytest.raises(PassError, match=r"leave_it_out removed .*without declaring changes_collectives"):
        Runner(Pipeline([leave_it_out])).run(gm, _context())


@each
def test_the_cost_model_knows_what_it_sends_and_how_long_it_takes(kind):
    _, started = _graph(kind)
    sent = sent_bytes(started, 2)
    assert sent is not None and sent >= 0
    assert (collective_steps(kind.kind, 2) is None) == (kind.steps is None)
    seconds = CostModel.default((SHARD,)).seconds(started)
    assert (seconds or 0) > 0 if kind.steps is not None else seconds is None


@each
def test_the_memory_simulation_knows_what_it_reads_until_when(kind):
    gm, started = _graph(kind)
    memory = simulate(gm)
    assert {memory.by_name[name].kind for name in memory.roots[started.name]} == {MemoryKind.COMMUNICATION}
    (given,) = [node for node in started.all_input_nodes if node.op == "call_function"]
    (wait,) = filter(is_wait, gm.graph.nodes)
    last = memory.nodes[memory.by_name[given.name].last]
    assert last == (wait.name if kind.is_read_until_wait else started.name)


@each
def test_dumps_and_lines_that_ranks_compare_know_it(kind):
    gm, started = _graph(kind)
    (record,) = [node.collective for node in Describer().nodes(gm, _context()) if node.collective is not None]
    assert (record.kind, record.group, record.ranks, record.sent) == (kind.kind, "0", 2, sent_bytes(started, 2))
    (line,) = collective_lines(gm, _context())
    assert line.startswith(f"{kind.op} [") and "over shard" in line


def test_dumps_know_by_how_much_it_delays_what_is_computed():
    gm, _ = _graph(TABLE.by_kind["all_reduce"])
    costs = CostModel(DEVICES["cpu"], (SHARD,), {"0": Link(1e-3, 1e9, delay=0.5)})
    nodes = Describer().nodes(gm, PassContext(Phase.FORWARD, (SHARD,), costs=costs))
    (record,) = [node.collective for node in nodes if node.collective is not None]
    assert record.delay == 0.5 * record.seconds > 0


@pytest.mark.parametrize("kind", [kind for kind in ENTRIES if kind.start is not None], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("ranks", [2, 3])
def test_calibration_counts_as_the_cost_model_does(kind, ranks):
    part, whole = torch.ones(4, 2), torch.ones(4 * ranks, 2)
    gm = trace(lambda p, w: c10d.wait_tensor(measure_collectives.start(kind, p, w, ranks, "0")), part, whole)
    (started,) = collectives(gm)
    assert measure_collectives.sent_bytes(kind, part, whole, ranks) == sent_bytes(started, ranks)


def test_every_form_is_of_one_kind():
    forms = [op for kind in ENTRIES for op in kind.forms]
    assert len(forms) == len(set(forms))
    assert len({kind.kind for kind in ENTRIES}) == len(ENTRIES)
