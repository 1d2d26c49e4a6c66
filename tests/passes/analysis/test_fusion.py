from __future__ import annotations

import torch

from dsgraph.passes.analysis.fusion import MOST_READS, MOST_READS_SHARED, inlined
from dsgraph.passes.analysis.memory import simulate
from tests.passes.tracing import trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

X = 4 * 8 * 4  # bytes of a [4, 8] fp32


def x():
    return torch.randn(4, 8)


def spared(gm):
    return {node.name for node in inlined(list(gm.graph.nodes))}


def lifetimes(memory):
    names = (*memory.nodes, "end")
    return {piece.node: (names[piece.first], names[piece.last]) for piece in memory.pieces}


def test_a_chain_is_computed_where_it_ends():
    gm = trace(lambda x: torch.tanh(torch.sin(x).t() * 2).sum(0), x())
    assert spared(gm) == {"sin", "mul", "tanh"}
    memory = simulate(gm, fused=True)
    assert lifetimes(memory) == {"x_1": ("x_1", "sum_1"), "sum_1": ("sum_1", "end")}
    assert memory.peak == X + 4 * 4


def test_what_a_product_a_collective_or_the_caller_reads_is_in_memory():
    def function(x):
        a, b, c, d = torch.sin(x), torch.cos(x), torch.tan(x), torch.exp(x)
        return torch.mm(a, b.t()), c10d.wait_tensor(c10d.all_reduce(c, "sum", "0")), d + 1, d

    assert spared(trace(function, x())) == set()


def test_a_view_is_what_its_readers_are():
    gm = trace(lambda x: torch.mm(torch.sin(x).t(), x) + torch.cos(x).t().sum(), x())
    assert spared(gm) == {"cos"}


def wide(count, *, users):
    def function(*inputs):
        total = sum(inputs).t()  # a view reads nothing more
        return tuple((total * number).sum() for number in range(2, 2 + users))

    return trace(function, *(x() for _ in range(count)))


def test_what_takes_too_many_reads_is_in_memory():
    last = "add_{}".format
    # Adding n inputs up takes n additions, the first of which is to 0.
    assert last(MOST_READS - 1) in spared(wide(MOST_READS, users=1))
    assert last(MOST_READS) not in spared(wide(MOST_READS + 1, users=1))
    assert last(MOST_READS_SHARED - 1) in spared(wide(MOST_READS_SHARED, users=2))
    assert last(MOST_READS_SHARED) not in spared(wide(MOST_READS_SHARED + 1, users=2))


def test_views_of_what_is_computed_read_what_it_reads():
    def function(*inputs):
        return (sum(inputs[:5]).t() + sum(inputs[5:]).t()).exp().sum()

    gm = trace(function, *(x() for _ in range(10)))
    assert spared(gm) == {"add", *(f"add_{number}" for number in range(1, 10)), "exp"}
    assert spared(trace(lambda *inputs: function(*inputs[:8]), *(x() for _ in range(8)))) >= {"add_8", "exp"}


def test_a_kernel_writes_over_an_operand_that_dies():
    gm = trace(lambda x, w: torch.relu(torch.mm(x, w)), x(), torch.randn(8, 8))
    eager, fused = simulate(gm, owned=["x_1", "w_1"]), simulate(gm, owned=["x_1", "w_1"], fused=True)
    held = X + 8 * 8 * 4
    assert dict(zip(eager.nodes, eager.live, strict=True))["relu"] == held + 2 * X
    assert dict(zip(fused.nodes, fused.live, strict=True))["relu"] == held + X


def test_it_does_not_write_over_inputs_what_lives_on_or_what_has_another_size():
    def function(x, w):
        product = torch.mm(x, w)
        return torch.relu(x), torch.relu(product), product.sum(), torch.mm(x, w).double().sin()

    memory = simulate(trace(function, x(), torch.randn(8, 8)), fused=True)
    names = lifetimes(memory)
    assert names["mm"][1] == "sum_1"  # read again after `relu`
    assert names["mm_1"][1] == "sin"  # half the size


def test_a_result_takes_the_place_of_one_operand_only():
    def function(x, w):
        return torch.mm(x, w) + torch.mm(w[:4], w)

    memory = simulate(trace(function, x(), torch.randn(8, 8)), fused=True)
    assert sorted(names[1] for node, names in lifetimes(memory).items() if node.startswith("mm")) == ["add", "mm_1"]


def test_what_loops_compute_for_a_concatenation_is_written_into_it():
    def function(x, w):
        total = x.sum(1)
        product = torch.mm(x, w)
        return torch.cat([total, aten._unsafe_view(product, [32]), torch.sin(x).view(32)])

    gm = trace(function, x(), torch.randn(8, 8))
    memory = simulate(gm, fused=True)
    pieces = memory.by_name
    assert pieces["sum_1"].bytes == 0 and pieces["cat"].bytes == 4 * 4 + 2 * X
    assert lifetimes(memory)["cat"] == ("sum_1", "end")
    assert pieces["mm"].bytes == X and lifetimes(memory)["mm"] == ("mm", "cat")  # copied
    assert "sin" not in pieces
    assert simulate(gm).by_name["sum_1"].bytes == 4 * 4


def test_a_concatenation_of_inputs_is_there_when_it_runs():
    memory = simulate(trace(lambda x, y: torch.cat([x, y]).sin(), x(), x()), fused=True)
    assert memory.peak == 4 * X and {piece.node: piece.bytes for piece in memory.pieces}["cat"] == 2 * X
