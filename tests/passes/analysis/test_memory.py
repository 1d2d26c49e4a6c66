from __future__ import annotations

import time

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.pieces import MemoryKind
from dsgraph.passes.analysis.sizes import UNKNOWN_SIZE
from tests.passes.tracing import trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

X = 4 * 8 * 4  # bytes of a [4, 8] fp32


def x():
    return torch.randn(4, 8)


def live(memory, *, without=("output",)):
    return {name: size for name, size in zip(memory.nodes, memory.live, strict=True) if name not in without}


def lifetimes(memory):
    """Piece -> the nodes at which it comes to life and is used last; "end" for what stays."""
    names = (*memory.nodes, "end")
    return {piece.node: (names[piece.first], names[piece.last]) for piece in memory.pieces}


def test_values_live_from_their_node_to_their_last_use():
    def function(x):
        a = torch.sin(x)
        b = torch.cos(a)
        c = a + b
        return c * 2

    memory = simulate(trace(function, x()))
    assert live(memory) == {"x_1": X, "sin": 2 * X, "cos": 2 * X, "add": 3 * X, "mul": 2 * X}
    assert memory.peak == 3 * X and memory.peak_node == "add"
    assert [piece.node for piece in memory.alive_at(memory.peak_index)] == ["sin", "cos", "add"]
    assert memory.live[-1] == X and memory.outputs == ("mul",)
    assert memory.by_name["mul"].kind is MemoryKind.OUTPUT and memory.by_name["x_1"].kind is MemoryKind.INPUT


def test_what_the_caller_holds_stays():
    gm = trace(lambda x, y: torch.sin(x) + y, x(), x())
    assert live(simulate(gm)) == {"x_1": 2 * X, "y_1": 2 * X, "sin": 3 * X, "add": 3 * X}
    memory = simulate(gm, owned=["x_1"])
    assert live(memory) == {"x_1": 2 * X, "y_1": 2 * X, "sin": 3 * X, "add": 4 * X}
    assert [piece.node for piece in memory.pieces if piece.owned] == ["x_1"]
    assert memory.live[-1] == 2 * X


def test_an_input_that_nothing_uses_stays_and_one_that_is_returned_as_well():
    memory = simulate(trace(lambda x, y, z: (torch.sin(z), x), x(), x(), x()))
    assert lifetimes(memory) == {
        "x_1": ("x_1", "end"),
        "y_1": ("x_1", "end"),
        "z_1": ("x_1", "sin"),
        "sin": ("sin", "end"),
    }


def test_a_result_that_nothing_uses_is_freed_at_once():
    def function(x):
        aten.sin.default(x)
        return torch.cos(x)

    memory = simulate(make_fx(function, tracing_mode="fake")(x()))
    assert lifetimes(memory)["sin"] == ("sin", "sin")


def test_views_waits_items_and_in_place_results_lie_in_their_argument():
    def function(x):
        base = torch.sin(x)
        seen = aten._unsafe_view(base, [8, 4]).reshape(2, 16).t().expand(3, 16, 2)
        first, second = torch.split(base, 2)
        base.mul_(2)
        arrived = c10d.wait_tensor(c10d.all_reduce(base, "sum", "0"))
        return seen.sum(), (first + second).sum(), arrived.view(32)

    memory = simulate(trace(function, x()))
    inside = ("sin", "t", "_unsafe_view", "view", "expand", "split", "getitem", "getitem_1", "mul_")
    assert {memory.roots[name] for name in inside} == {("sin",)}
    assert {memory.roots[name] for name in ("all_reduce", "wait_tensor", "view_1")} == {("all_reduce",)}
    assert lifetimes(memory)["sin"] == ("sin", "add")  # `first` and `second`
    assert len(memory.pieces) == 6  # x, sin, the reduction, the sum of the halves, and two scalars


def test_a_reshape_that_must_copy_is_memory_of_its_own():
    memory = simulate(trace(lambda x: torch.sin(x).t().reshape(32) + 1, x()))
    own = [piece.node for piece in memory.pieces]
    assert own[:2] == ["x_1", "sin"] and len(own) == 4


def test_results_of_one_op_are_freed_one_by_one():
    def function(x):
        values, indices = torch.sort(x)
        aten.add.Tensor(values, 1)
        return indices.float() + 1

    memory = simulate(make_fx(function, tracing_mode="fake")(x()))
    assert memory.roots["getitem"] == ("sort",) and memory.roots["getitem_1"] == ("sort:1",)
    assert memory.by_name["sort:1"].bytes == 2 * X  # int64
    assert lifetimes(memory)["sort"][1] == "add" and lifetimes(memory)["sort:1"][1] == "_to_copy"


def test_results_of_an_op_that_another_runs_are_freed_one_by_one():
    def function(x):
        _, (dropped, mask) = torch.ops.higher_order.run_and_save_rng_state(aten.native_dropout.default, x, 0.5, True)
        aten.add.Tensor(dropped, 1)
        return mask.float() + 1

    memory = simulate(make_fx(function, tracing_mode="fake")(x()))
    assert lifetimes(memory)["run_and_save_rng_state:1"][1] == "add"
    assert lifetimes(memory)["run_and_save_rng_state:2"][1] == "_to_copy"
    assert memory.by_name["run_and_save_rng_state:1"].bytes == X


def test_results_of_one_op_that_share_memory_are_one_piece():
    with torch.library._scoped_library("test_memory", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: tuple(x.clone().chunk(2)), "CompositeExplicitAutograd")
        memory = simulate(trace(lambda x: torch.add(*torch.ops.test_memory.halves(x)), x()))
    assert {piece.node: piece.bytes for piece in memory.pieces} == {"x_1": X, "halves": X, "add": X // 2}


def test_inputs_that_share_memory_are_counted_once():
    def function(a, b):
        return a.sin(), b.cos()

    gm = trace(function, x(), x())
    memory = simulate(gm, roots={"a_1": "saved", "b_1": "saved"})
    assert memory.by_name.keys() == {"a_1", "sin", "cos"} and memory.roots["b_1"] == ("a_1",)
    assert live(memory) == {"a_1": X, "b_1": X, "sin": 2 * X, "cos": 3 * X}
    base = x()
    gm = trace(lambda inputs: inputs[0] + inputs[1].sum(), [base, base[:2]])
    assert [p.node for p in simulate(gm).pieces if p.kind is MemoryKind.INPUT] == ["inputs_1"]


def test_the_base_of_a_saved_view_is_what_is_alive():
    base = torch.randn(100, 8)
    memory = simulate(trace(lambda part: part.sin(), base[:4]))
    assert memory.by_name["part_1"].bytes == 100 * 8 * 4


def in_flight(start):
    def function(x):
        sent = torch.sin(x)
        started = start(sent)
        other = torch.cos(x)
        return c10d.wait_tensor(started), other

    memory = simulate(trace(function, x()))
    (piece,) = [piece for piece in memory.pieces if piece.first and piece.node not in ("sin", "cos")]
    return lifetimes(memory)["sin"][1], piece


def test_a_collective_reads_its_argument_until_its_wait():
    for start in (
        lambda sent: c10d.all_to_all_single(sent, [2, 2], [2, 2], "0"),
        lambda sent: c10d.reduce_scatter_tensor(sent, "sum", 2, "0"),
        lambda sent: c10d.all_gather_into_tensor(sent, 2, "0"),
        lambda sent: c10d.all_gather_into_tensor_coalesced([sent], 2, "0")[0],
    ):
        last, _ = in_flight(start)
        assert last == "wait_tensor"


def test_a_collective_that_works_on_a_copy_does_not():
    assert in_flight(lambda sent: c10d.all_reduce(sent, "sum", "0"))[0] == "all_reduce"
    last, gathered = in_flight(lambda sent: torch.ops.dsgraph.gather_by_messages(sent, 2, "0"))
    assert last == "gather_by_messages" and gathered.bytes == 2 * X
    assert gathered.kind is MemoryKind.OUTPUT  # it is returned
    gm = trace(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")) + 1, x())
    assert simulate(gm).by_name["all_reduce"].kind is MemoryKind.COMMUNICATION


def test_symbolic_sizes_count_as_those_of_the_run():
    def function(x):
        rows = torch.nonzero(x)
        return torch.sin(x), rows

    memory = simulate(make_fx(function, tracing_mode="symbolic")(x()))
    assert memory.by_name["sin"].bytes == X
    assert memory.by_name["nonzero"].bytes == UNKNOWN_SIZE * 2 * 8


def test_a_graph_of_ten_thousand_nodes_takes_well_under_a_second():
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(4, 8, device="meta")
    results = []
    for number in range(5_000):
        source = node
        for op, args in ((aten.sin.default, (source,)), (aten.add.Tensor, (source, source))):
            node = graph.call_function(op, args)
            node.meta["val"] = torch.empty(4, 8, device="meta")
        results += [node] if number % 5 == 0 else []
    graph.output((node, *results))
    gm = GraphModule(torch.nn.Module(), graph)
    started = time.process_time()  # whatever else the machine does
    memory = simulate(gm)
    assert time.process_time() - started < 3  # seconds of this process; quadratic would be minutes
    assert len(memory.nodes) == 10_002
    assert memory.live[-1] == (1 + len(results)) * X
