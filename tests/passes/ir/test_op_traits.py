from __future__ import annotations

import operator

import pytest
import torch

from dsgraph.passes.ir.graph import barrier_between, find_calls, is_barrier
from dsgraph.passes.ir.op_traits import allocates, releases, written_nodes
from tests.passes.tracing import trace

aten = torch.ops.aten
resize = torch.ops.inductor.resize_storage_bytes_.default


def _node(target, *args, **kwargs):
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    given = [{"x": x, "y": y}.get(value, value) if isinstance(value, str) else value for value in args]
    return graph.call_function(target, tuple(given), kwargs)


@pytest.mark.parametrize(
    ("target", "args", "barrier"),
    [
        (aten.mm.default, ("x", "y"), False),
        (aten.view.default, ("x", [2]), False),
        (aten.copy_.default, ("x", "y"), True),
        (torch.ops.prims.convert_element_type.default, ("x", torch.float64), False),
        (torch.ops._c10d_functional.all_reduce.default, ("x", "sum", "0"), False),
        (torch.ops._c10d_functional.all_reduce_.default, ("x", "sum", "0"), True),
        (torch.ops.dsgraph.gather_by_messages.default, ("x", 2, "0"), False),
        (resize, ("x", 0), True),
        (torch.ops.dsgraph_tests.unknown.default, ("x",), True),
        (torch.ops.higher_order.auto_functionalized, (torch.ops.dsgraph_tests.unknown.default,), True),
        (torch.ops.higher_order.auto_functionalized, (aten.add_.Tensor,), False),
        (torch.ops.higher_order.flex_attention, ("x", "x", "y"), False),
        (torch.ops.higher_order.cond, ("x",), True),
        (operator.getitem, ("x", 0), False),
        (operator.mul, (2, 3), False),
        (torch.sym_max, (2, 3), False),
        (print, ("x",), True),
        (torch.manual_seed, (0,), True),
    ],
)
def test_barriers(target, args, barrier):
    assert is_barrier(_node(target, *args)) is barrier


def test_what_is_written_to():
    node = _node(aten.copy_.default, "x", "y")
    assert [written.name for written in written_nodes(node)] == ["x"]
    out = _node(aten.sin.default, "x")
    assert list(written_nodes(_node(aten.add.out, "x", "y", out=out))) == [out]
    assert [written.name for written in written_nodes(_node(print, "x", "y"))] == ["x", "y"]


@pytest.mark.parametrize(
    ("target", "args", "gives_back"),
    [
        (resize, ("x", 0), True),
        (resize, ("x", 64), False),
        (aten.resize_.default, ("x", [0]), True),
        (aten.resize_.default, ("x", [4, 4]), False),
        (aten.set_.default, ("x",), True),
        (aten.set_.source_Tensor, ("x", "y"), False),
    ],
)
def test_memory_given_back_and_taken(target, args, gives_back):
    node = _node(target, *args)
    assert (releases(node) is not None, allocates(node) is not None) == (gives_back, not gives_back)
    assert (releases(_node(aten.mm.default, "x", "y")), allocates(_node(aten.mm.default, "x", "y"))) == (None, None)


def test_the_first_barrier_between_two_nodes():
    def function(x, y):
        a = x.sin()
        aten.copy_.default(y, a)
        aten.copy_.default(y, x)
        return a.cos()

    gm = trace(function, torch.randn(2), torch.randn(2))
    sin, cos = find_calls(gm, aten.sin.default)[0], find_calls(gm, aten.cos.default)[0]
    first, _ = find_calls(gm, aten.copy_.default)
    assert barrier_between(sin, cos) is first
    assert barrier_between(sin, first) is None
