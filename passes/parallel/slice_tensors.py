"""SliceTensors: tensor parallelism on the graph of an unmodified model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import bodies

from .example_values import evaluate
from .find_slices import find_slices
from .rewrite_slices import Rewriting
from .slice_sequence import slice_sequence
from .slice_walk import Sliced, marked_slices, sharing_ranks
from .unfuse_products import unfuse_products

_own = torch.ops.dsgraph


@dataclass(frozen=True)
class SliceTensors(GraphPass):
    """Let each tensor-parallel rank compute with its slices of parameters, wherever calls support slices.

    before:  w = gather_slices(own_w, 0, 1, 2, "tp"); v = gather_slices(own_v, 1, 1, 2, "tp")
             h = linear(x, w).view(8, 16, 4, 32)...; y = linear(h, v)
    after:   e = enter_slices(x, "tp")                     identity; sums the gradient in the backward
             h = linear(e, own_w).view(8, 16, 2, 32)...    half of the heads
             y = sum_slices(linear(h, own_v), "tp")        sum; passes the gradient through in the backward

    Sizes in views are divided. Random numbers of a sliced value are drawn for the full value, equal on every rank, and
    each rank keeps its part: the model draws the same numbers as in one process. A call without a rule gets gathered
    operands, and a note says so. A checkpoint's body is rewritten by itself: what enters and leaves it is whole. Left
    alone: graphs without sliced parameters.

    A fused weight with pieces of different sizes is gathered, and each rank computes with its slices of the pieces: see
    `unfuse_products.py`.

    Attributes:
        sequence_parallel: Also slice norms, dropout and residuals between the products: see `slice_sequence.py`.
    """

    sequence_parallel: bool = False

    phase: ClassVar[Phase] = Phase.CAPTURE
    changes_collectives: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        results = [self._run(module) for module in (*dict.fromkeys(body for body, _ in bodies(gm)), gm)]
        notes = (note for result in results for note in result.notes)
        return PassResult(changed=sum(result.changed for result in results), notes=tuple(dict.fromkeys(notes)))

    def _run(self, gm: GraphModule) -> PassResult:
        shared = sharing_ranks(gm)
        if shared is None:
            return PassResult()
        ranks, group = shared
        _mark_pieces(gm, ranks, group)
        markers = list(marked_slices(gm))
        rewriting = Rewriting(gm, Sliced(ranks), group)
        for marker, held, *_ in markers:
            rewriting.known.hold(marker, held, frozenset())
        for node in list(gm.graph.nodes):
            rewriting.visit(node)
        for marker, *_ in markers:
            if not marker.users:
                gm.graph.erase_node(marker)
        rewriting.refresh_values()
        notes = list(rewriting.notes)
        if self.sequence_parallel:
            notes += slice_sequence(gm, ranks, group, own=rewriting.own)
        return PassResult(changed=rewriting.changed, notes=tuple(dict.fromkeys(notes)))


def _mark_pieces(gm: GraphModule, ranks: int, group: str) -> None:
    """Slice the pieces of fused weights, of which each rank stores a slice that is no slice of each piece."""
    held = {marker: one for marker, one, *_ in marked_slices(gm)}
    roots = {marker: one.dim for marker, one in held.items() if one.parts == 1}
    pieces = unfuse_products(gm, roots, Sliced(ranks))
    names = {piece.node: f"{piece.root.name}[{piece.first}:{piece.last}]" for piece in pieces}
    found = find_slices(gm, names, ranks=ranks, fixed=held).slices if pieces else {}
    for node, name in names.items():
        if name not in found:
            continue
        last, users = node, list(node.users)
        for target in (_own.own_slice.default, _own.gather_slices.default):
            with gm.graph.inserting_after(last):
                last = gm.graph.call_function(target, (last, found[name].dim, found[name].parts, ranks, group))
            last.meta["example_value"] = evaluate(last)
        for user in users:
            user.replace_input_with(node, last)
