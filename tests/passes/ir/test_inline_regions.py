"""Regions as Dynamo captures them, by hand. `inline_regions` changes no result."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.utils.checkpoint import checkpoint

from dsgraph.passes.compat import invoke_subgraph
from dsgraph.passes.ir.graph import all_graph_modules, find_calls
from dsgraph.passes.ir.inline_regions import inline_regions


class _Calling(Interpreter):
    """Runs a graph; a call of a region or of a checkpoint is a call of its body."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (invoke_subgraph, checkpoint):
            return _Calling(args[0]).run(*args[2 if target is invoke_subgraph else 1 :])
        return super().call_function(target, args, kwargs)


def _product(scale: float) -> GraphModule:
    """A region of `x` and a parameter."""
    graph = Graph()
    x, param = graph.placeholder("x"), graph.placeholder("param")
    product = graph.call_function(torch.matmul, (x, param))
    product.meta["nn_module_stack"] = _stack("layers.0.linear")
    graph.output((graph.call_function(torch.mul, (product, scale)), x))
    return GraphModule(nn.Module(), graph)


def _stack(path: str) -> dict[str, Any]:
    return {path: (path, nn.Module)}


def _calls(bodies: Sequence[tuple[str, GraphModule]]) -> GraphModule:
    """A graph that hands `x` from one call to the next; each has a parameter of its own."""
    root, graph = nn.Module(), Graph()
    x = first = graph.placeholder("x")
    params = [graph.placeholder(f"param_{number}") for number in range(len(bodies))]
    for number, ((name, body), param) in enumerate(zip(bodies, params, strict=True)):
        setattr(root, name, body)
        call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, x, param))
        call.meta["nn_module_stack"] = _stack(f"layers.{number}")
        x = graph.call_function(operator.getitem, (call, 0))
    graph.output((x, first))
    return GraphModule(root, graph)


def _inlined(gm: GraphModule) -> list[str]:
    """Return the regions whose calls were inlined; the graph must go on computing what it computes."""
    inputs = [torch.randn(2, 4), *(torch.randn(4, 4) for _ in gm.graph.find_nodes(op="placeholder")[1:])]
    before = _Calling(gm).run(*inputs)
    notes = inline_regions(gm)
    for now, then in zip(_Calling(gm).run(*inputs), before, strict=True):
        assert torch.equal(now, then)
    for module in all_graph_modules(gm):
        module.graph.lint()
        assert not find_calls(module, invoke_subgraph)
    assert all(note.endswith(" is written out: its calls are part of the graph") for note in notes)
    return [note.split()[1] for note in notes]


def test_each_call_of_a_region_reads_its_own_parameter_and_tells_its_own_module():
    body, other = _product(2.0), _product(3.0)
    gm = _calls([("block", body), ("other", other), ("again", body), ("block", body)])
    gm.left = _product(4.0)  # Dynamo has inlined it, because it is called once
    assert _inlined(gm) == ["block", "other", "again", "left"]
    assert list(all_graph_modules(gm)) == [gm], "no body is counted once more"
    modules = [next(iter(node.meta["nn_module_stack"].values()))[0] for node in find_calls(gm, torch.matmul)]
    assert modules == ["layers.0.linear", "layers.0.linear", "layers.2.linear", "layers.3.linear"]


def test_regions_in_regions_and_in_checkpoints_are_inlined():
    outer = _calls([("inner", _product(2.0))])
    checkpointed = _calls([("outer", outer)])
    around = _calls([("checkpointed", checkpointed)])
    (call,) = find_calls(around, invoke_subgraph)
    call.target, call.args = checkpoint, (call.args[0], *call.args[2:])
    gm = _calls([("outer", outer), ("around", around), ("around", around)])
    gm.around_checkpointed = taken = nn.Identity()
    assert set(_inlined(gm)) == {"inner", "outer", "around"}
    assert len(find_calls(gm, torch.matmul)) == 1 and len(find_calls(gm, checkpoint)) == 2
    assert list(all_graph_modules(gm)) == [gm, checkpointed]
    assert len(find_calls(checkpointed, torch.matmul)) == 1 and gm.around_checkpointed is taken
