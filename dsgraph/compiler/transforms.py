"""Markers in captured graphs: moved before transforms of `torch.func`, and brought into one form."""

from __future__ import annotations

import re

import torch
from torch.fx import GraphModule, Node

from dsgraph.partitioning.seam import mark_outside_transforms
from dsgraph.passes.compat import is_to_local
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, replace_and_erase
from dsgraph.passes.ir.user_source import OWN_FOLDER
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


def normalize_markers(gm: GraphModule) -> None:
    """Give markers one form, whatever version of torch captured them, and print them under the user's line.

    The shard is read by a plain `to_local()`, which caches can hold; dsgraph's own frames come off stack traces.
    """
    for module in all_graph_modules(gm):
        for node in [node for node in module.graph.nodes if is_gather_marker(node)]:
            shard = node.args[0]
            if is_to_local(shard) and shard.op != "call_method":
                shard.op, shard.target = "call_method", "to_local"
            for part in (shard, node):
                frames = re.split(r"(?m)^(?=  File )", part.stack_trace or "")
                part.stack_trace = "".join(frame for frame in frames if OWN_FOLDER not in frame)
        module.recompile()
