"""`OffloadActivations`: what it moves, where the transfers stand, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.fx import Node
from torch.testing import FileCheck

import dsgraph
from dsgraph.inductor_ext import transfers_of
from dsgraph.passes import CaptureFacts, CostModel, Partitioner, PassError, Pipeline, Runner, graph_pass
from dsgraph.passes.analysis.hardware import Device, Link
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.ir.save_plan import Choice, decide
from dsgraph.passes.memory.offload import OffloadActivations, earliest_ends, first_together, latest_starts
from tests.passes.tracing import code

aten, ops = torch.ops.aten, torch.ops.dsgraph
EVERYTHING = OffloadActivations(tier="host", least_bytes=1)


def _mlp(x, first, second):
    return (torch.sin(torch.sin(x @ first).tanh() @ second)).square().sum()


def _heads(x, weight):
    q, k, v = (x @ weight).split(8, dim=-1)
    return torch.sin(q * k * v).sum()


def _inputs(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


MLP = (4, 8), (8, 8), (8, 8)


def _run(function, shapes, *passes, costs=None):
    """Return the graphs of a function after the passes, its result, and the records."""
    graphs = []

    @graph_pass(phase="forward")
    def keep_forward(gm, ctx):
        graphs.append(gm)
        return 0

    @graph_pass(phase="backward")
    def keep_backward(gm, ctx):
        graphs.append(gm)
        return 0

    runner = Runner(Pipeline([*passes, keep_forward, keep_backward]))
    facts = CaptureFacts(costs=costs) if costs is not None else CaptureFacts()
    inputs = _inputs(*shapes)
    compiled = aot_function(function, nop, partition_fn=Partitioner(runner, facts))
    outputs = compiled(*inputs)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs[-1]
    loss.backward()
    forward, backward = graphs
    return forward, backward, [loss.detach(), *(value.grad for value in inputs)], runner.records


def _plain(function, shapes):
    return _run(function, shapes)[2]


def _same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _positions(gm):
    return {node.name: number for number, node in enumerate(gm.graph.nodes)}


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_activation_leaves_behind_its_last_use_and_is_waited_for_ahead_of_its_first(tier):
    forward, backward, found, records = _run(_mlp, MLP, replace(EVERYTHING, tier=tier))
    FileCheck().check("mm").check("offload").check("finish_offload").check("return").run(code(forward))
    FileCheck().check("reload").check("wait_transfer").run(code(backward))
    assert _same(found, _plain(_mlp, MLP))
    moved = find_calls(forward, ops.offload.default)
    (record,) = [item for item in records if item.name == "offload_activations"]
    assert record.changed == len(moved) >= 2 and f"{len(moved)} saved values to {tier}" in record.done[0]
    where = _positions(forward)
    for offload in moved:
        users = [
            user for user in offload.args[0].users if user.op != "output" and user not in (offload, *offload.users)
        ]
        assert all(where[user.name] < where[offload.name] for user in users)
    for reload in find_calls(backward, ops.reload.default):
        (wait,) = reload.users
        behind = wait.next
        while behind.target is ops.reload.default:
            behind = behind.next
        assert behind in wait.users


@pytest.mark.usefixtures("fake_ranks")
def test_sizes_that_change_are_computed_in_the_backward():
    def train(**options):
        torch._dynamo.reset()
        _, *weights = _inputs(*MLP)
        compiled = torch.compile(_views, backend="dsgraph", dynamic=True, options={"codegen": "eager", **options})
        for batch in (512, 700):
            compiled(torch.randn(batch, 8, generator=torch.Generator().manual_seed(batch)), *weights).backward()
        return [weight.grad for weight in weights]

    seen = []

    @graph_pass(phase="backward")
    def look(gm, ctx):
        seen.extend(node.args[1] for node in find_calls(gm, ops.reload.default))
        return 0

    assert _same(train(pipeline=dsgraph.default_pipeline() + [replace(EVERYTHING, least_bytes=512), look]), train())
    assert len(seen) >= 2 and any(isinstance(size, Node) for sizes in seen for size in sizes)


def _views(x, first, second):
    hidden = (x @ first).tanh()
    return torch.sin((hidden.view(x.shape[0], 2, 4) * 2).flatten(1) @ second).square().sum()


def test_nothing_stays_in_any_pool():
    transfers = transfers_of(torch.device("cpu"))
    _run(_mlp, MLP, EVERYTHING)
    assert not transfers.host.used and not transfers.pending


def test_views_take_along_what_they_are_views_of():
    forward, backward, found, _ = _run(_heads, [(4, 8), (8, 24)], EVERYTHING)
    offloads = find_calls(forward, ops.offload.default)
    assert any(aten.mm.default is item.args[0].target for item in offloads)
    assert find_calls(backward, aten.split.Tensor)
    assert _same(found, _plain(_heads, [(4, 8), (8, 24)]))


def test_a_view_of_a_tensor_that_stays_makes_no_second_transfer():
    forward, *_ = _run(_heads, [(4, 8), (8, 24)], EVERYTHING)
    sources = [item.args[0] for item in find_calls(forward, ops.offload.default)]
    memory = simulate(forward)
    pieces = [memory.roots[node.name] for node in sources]
    assert len(set(pieces)) == len(pieces)


def test_inputs_and_what_the_model_returns_stay():
    def function(x, weight):
        hidden = torch.sin(x @ weight).exp()
        return hidden, hidden.exp().sum()

    forward, _, _, records = _run(function, MLP[:2], EVERYTHING)
    sources = [item.args[0] for item in find_calls(forward, ops.offload.default)]
    assert sources and all(node.op == "call_function" for node in sources)
    assert aten.exp.default not in {node.target for node in sources[:-1]}
    (record,) = [item for item in records if item.name == "offload_activations"]
    assert any("the model returns it" in note for note in record.notes)


def test_small_values_stay_unless_the_plan_names_them():
    forward, *_ = _run(_mlp, MLP, OffloadActivations(tier="host", least_bytes=10**6))
    assert not find_calls(forward, ops.offload.default)

    @graph_pass(phase="joint")
    def plan(gm, ctx):
        (node,) = find_calls(gm, aten.tanh.default)
        decide(node, Choice.OFFLOAD, tier="disk")
        return 1

    forward, _, found, _ = _run(_mlp, MLP, plan, OffloadActivations())
    (offload,) = find_calls(forward, ops.offload.default)
    assert offload.args[0].target is aten.tanh.default and offload.args[1] == "disk"
    assert _same(found, _plain(_mlp, MLP))


def test_a_second_run_changes_nothing():
    class OffloadAgain(OffloadActivations):
        pass

    *_, records = _run(_mlp, MLP, EVERYTHING, OffloadAgain(tier="host", least_bytes=9))
    first, second = (item.changed for item in records if item.name.startswith("offload_"))
    assert first and not second


def _deep(x, *weights):
    for weight in weights:
        x = torch.sin(x @ weight)
    return x.sum()


DEEP = [(64, 64)] * 9
SLOW_LINK = CostModel(Device(1e30, 1e30, kernel_s=1.0), tiers={"host": Link(3.0, 1e30), "disk": Link(3.0, 1e30)})


def test_a_reload_starts_as_early_as_the_link_needs_it_and_no_earlier_than_the_bytes_under_way_allow():
    fast = replace(SLOW_LINK, tiers={"host": Link(0.0, 1e30)})
    _, backward, *_ = _run(_deep, DEEP, EVERYTHING, costs=fast)
    assert max(_ahead(backward)) <= 1
    _, backward, *_ = _run(_deep, DEEP, EVERYTHING, costs=SLOW_LINK)
    assert max(_ahead(backward)) >= 2
    _, backward, *_ = _run(_deep, DEEP, replace(EVERYTHING, ahead_bytes=1), costs=SLOW_LINK)
    assert _most_under_way(backward) == 1


def _ahead(gm):
    """How many products and pointwise ops stand between each reload and its wait."""
    where = _positions(gm)
    computed = [where[node.name] for node in gm.graph.nodes if node.target in (aten.mm.default, aten.mul.Tensor)]
    return [
        sum(where[reload.name] < place < where[next(iter(reload.users)).name] for place in computed)
        for reload in find_calls(gm, ops.reload.default)
    ]


def _most_under_way(gm):
    most = now = 0
    for node in gm.graph.nodes:
        now += node.target is ops.reload.default
        most = max(most, now)
        now -= node.target is ops.wait_transfer.default
    return most


def test_the_simulation_leaves_out_what_is_stored():
    forward, backward, *_ = _run(_deep, DEEP)
    plain = simulate(forward).live[-1]
    forward, backward, *_ = _run(_deep, DEEP, EVERYTHING)
    moved = sum(item.args[0].meta["val"].nbytes for item in find_calls(forward, ops.offload.default))
    handles = 8 * len(find_calls(forward, ops.finish_offload.default))
    assert simulate(forward).live[-1] == plain - moved + handles
    memory = simulate(backward)
    assert memory.live[0] < plain - moved + handles + 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("reads before the wait", "must be its one wait_transfer"),
        ("no end", "must be its one finish_offload"),
        ("another source", "must be given the tensor that is offloaded"),
    ],
)
def test_the_verifier_refuses(broken, message):
    @graph_pass(phase="pair")
    def spoil(pair, ctx):
        if broken == "reads before the wait":
            reload = find_calls(pair.backward, ops.reload.default)[0]
            (wait,) = reload.users
            wait.replace_all_uses_with(reload)
        elif broken == "no end":
            offload = find_calls(pair.forward, ops.offload.default)[0]
            (end,) = offload.users
            (theirs,) = (theirs for ours, theirs in pair.crossing() if ours is end)
            theirs.replace_all_uses_with(pair.save(offload))
            pair.drop(end)
        else:
            end = find_calls(pair.forward, ops.finish_offload.default)[0]
            end.args = (end.args[0], pair.forward.graph.find_nodes(op="placeholder")[0])
        return 1

    with pytest.raises(PassError, match=message):
        _run(_mlp, MLP, EVERYTHING, spoil)


def test_times_of_transfers_over_one_link():
    assert latest_starts([5.0, 6.0, 20.0], [2.0, 3.0, 1.0]) == [1.0, 3.0, 19.0]
    assert earliest_ends([1.0, 2.0, 9.0], [3.0, 1.0, 1.0]) == [4.0, 5.0, 10.0]
    assert [first_together([4, 4, 4, 9], number, room=8) for number in range(4)] == [0, 0, 1, 3]
