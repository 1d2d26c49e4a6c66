"""Markers that were captured inside transforms of `torch.func`, moved before the transforms."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dsgraph.partitioning.seam import mark_outside_transforms
from dsgraph.passes.ir.graph import all_graph_modules, replace_and_erase
from dsgraph.passes.kernels.capture_graph import transforms_begun


def move_markers_ahead(gm: GraphModule) -> None:
    """Move the markers that a transform reads before the outermost transform, in their normal form.

    before:  vmap begins; x = add_batch_dim(...); w = mark_outside_transforms(p, ...); y = x @ w; ...; vmap ends
    after:   a = p.to_local(); w = gather_param(a, ...); vmap begins; x = add_batch_dim(...); y = x @ w; ...; vmap ends
    """
    for module in all_graph_modules(gm):
        moved, depth = False, 0
        begin: Node | None = None
        for node in list(module.graph.nodes):
            if depth == 0:
                begin = node
            depth += transforms_begun(node)
            if node.op == "call_function" and node.target is mark_outside_transforms:
                assert begin is not None
                _write_ahead(node, begin)
                moved = True
        if moved:
            module.recompile()


def _write_ahead(call: Node, place: Node) -> None:
    param, gathered_copy, shape, *added = call.args
    with call.graph.inserting_before(place):
        shard = call.graph.call_method("to_local", (param,))
        marker = call.graph.call_function(
            torch.ops.dsgraph.gather_param, (shard, gathered_copy, shape, *added), dict(call.kwargs)
        )
    shard.meta = {key: value for key, value in call.meta.items() if key not in ("example_value", "val")}
    marker.meta = dict(call.meta)
    replace_and_erase(call, marker)
