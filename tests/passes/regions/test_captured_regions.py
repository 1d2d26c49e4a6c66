"""Regions as Dynamo captures them, by hand. `open_regions` changes no result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from dsgraph.passes.compat import invoke_subgraph
from dsgraph.passes.ir.graph import find_calls, is_gather_marker
from dsgraph.passes.regions.captured_regions import CapturedRegions, open_regions
from tests.passes.regions.calling import Calling
from tests.passes.tracing import code

pytestmark = pytest.mark.usefixtures("one_rank")

MARKER = torch.ops.dsgraph.gather_param.default
HOW = {"dtype": torch.float32, "reduce_dtype": torch.float32, "group": "0", "outer_groups": []}


def _shard(*shape: int) -> DTensor:
    return DTensor.from_local(torch.randn(*shape), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)


def _gathered(graph: Graph, param: Node) -> Node:
    return graph.call_function(MARKER, (graph.call_method("to_local", (param,)), None, [4, 4]), HOW)


def _body(compute: Callable[[Graph, Node, Node], Node], root: Any = None) -> GraphModule:
    """A region of `x` and a parameter."""
    graph = Graph()
    x, param = graph.placeholder("x"), graph.placeholder("param")
    graph.output((compute(graph, x, param),))
    return GraphModule(root or nn.Module(), graph)


def _plain(graph: Graph, x: Node, param: Node) -> Node:
    return graph.call_function(torch.matmul, (x, _gathered(graph, param)))


def _calls(bodies: Sequence[tuple[str, GraphModule]]) -> GraphModule:
    """A graph that hands `x` from one call to the next; each has a parameter of its own."""
    root, graph = nn.Module(), Graph()
    x = graph.placeholder("x")
    params = [graph.placeholder(f"param_{number}") for number in range(len(bodies))]
    for (name, body), param in zip(bodies, params, strict=True):
        setattr(root, name, body)
        call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, x, param))
        x = graph.call_function(operator.getitem, (call, 0))
    graph.output((x,))
    return GraphModule(root, graph)


def _open(gm: GraphModule, **how: Any) -> CapturedRegions:
    """Opens the regions of a graph, which must go on computing what it computes."""
    inputs = [torch.randn(2, 4), *(_shard(4, 4) for node in gm.graph.nodes if node.name.startswith("param"))]
    (before,) = Calling(gm).run(*inputs)
    found = open_regions(gm, **how)
    (behind,) = Calling(gm).run(*inputs)
    assert torch.equal(before, behind)
    return found


def test_markers_leave_a_region():
    body = _body(_plain)
    gm = _calls([("block", body), ("block", body), ("block", body)])
    assert _open(gm) == CapturedRegions((("block", 3),))
    assert len(find_calls(gm, MARKER)) == 3 and not find_calls(body, MARKER)


def test_one_body_under_two_names_is_one_region():
    body = _body(_plain)
    gm = _calls([("block", body), ("again", body), ("block", body)])
    assert _open(gm) == CapturedRegions((("block", 3),))
    assert len(find_calls(gm, MARKER)) == 3 and "self.again" not in code(gm) and not hasattr(gm, "again")


def test_a_region_that_is_called_once_is_written_out_and_told():
    gm = _calls([("block", _body(_plain)), ("other", _body(_plain)), ("other", _body(_plain))])
    assert _open(gm).inlined[0] == "region block is written out: it is called once"
    assert not hasattr(gm, "block"), "its body would be counted once more"


def test_what_dynamo_wrote_out_is_told():
    body = _body(_plain)
    gm = _calls([("block", body), ("block", body)])
    gm.first = _body(_plain)
    assert _open(gm) == CapturedRegions((("block", 2),), ("region first is written out: it is called once",))
    assert not hasattr(gm, "first")


def test_all_are_written_out_where_values_are_planned():
    body = _body(_plain)
    gm = _calls([("block", body), ("block", body)])
    assert _open(gm, write_out="a plan") == CapturedRegions((), ("regions are written out: a plan",))
    assert find_calls(gm, invoke_subgraph) == []


def _depends(graph: Graph, x: Node, param: Node) -> Node:
    local = graph.call_method("to_local", (param,))
    scaled = graph.call_function(torch.mul, (local, graph.call_method("mean", (x,))))
    return graph.call_function(torch.matmul, (x, graph.call_function(MARKER, (scaled, None, [4, 4]), HOW)))


def test_a_region_whose_gather_depends_on_what_it_computes_is_written_out():
    body = _body(_depends)
    gm = _calls([("block", body), ("block", body)])
    (line,) = _open(gm).inlined
    assert line.startswith("region block is written out: gather_param") and line.endswith("on what it computes")
    assert len(find_calls(gm, MARKER)) == 2


def test_a_checkpoint_inside_a_region_is_found():
    checkpointed, root = _body(_plain), nn.Module()
    root.wrap_body_0 = checkpointed

    def compute(graph: Graph, x: Node, param: Node) -> Node:
        inner = graph.call_function(checkpoint, (graph.get_attr("wrap_body_0"), x, param), {"use_reentrant": False})
        return graph.call_function(operator.getitem, (inner, 0))

    body = _body(compute, root)
    gm = _calls([("block", body), ("block", body)])
    (line,) = _open(gm).inlined
    assert line == "region block is written out: to_local stands in a checkpoint inside it"
    assert [type(module) for name, module in gm.named_children()] == [type(checkpointed)]
    assert any(is_gather_marker(node) for node in gm.block_wrap_body_0.graph.nodes)


def test_a_region_inside_a_region_is_written_out():
    inner = _calls([("block", _body(_plain))])
    gm = _calls([("outer", inner), ("outer", inner)])
    assert _open(gm).inlined == ("region block is written out: it is called inside another region or a checkpoint",)
    assert [len(find_calls(module, invoke_subgraph)) for module in (gm, gm.outer)] == [2, 0]
