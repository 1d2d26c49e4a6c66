"""SparsifyAttention: block-sparse attention for a model without changes to its code."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext.compat import size_hint
from dsgraph.inductor_ext.sparse import block_attention, custom, layouts, patterns, products, reading, row_buckets
from dsgraph.inductor_ext.sparse import block_sparse_attention as op
from dsgraph.inductor_ext.sparse.layouts import Layout, SparseLayoutError
from dsgraph.inductor_ext.sparse.patterns import Fixed
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult, source_fingerprint
from dsgraph.passes.core.notes import user_line
from dsgraph.passes.ir.graph import all_graph_modules, find_calls

from . import find_attention as finding
from . import mask_terms
from .add_call import add_call, with_gradient_as
from .attention_sources import why_not_self
from .capture_graph import reader_of_layout, transforms_begun
from .find_attention import FoundAttention, before_repeating, find_attention
from .findings import NOWHERE
from .matching import fake_of, writes
from .spec import NearMiss

_OP = torch.ops.dsgraph.block_sparse_attention.default
_OF_SLICES = tuple(
    getattr(torch.ops.dsgraph, name).default for name in ("enter_slices", "gather_entered", "sum_slices", "scatter_sum")
)


@dataclass(frozen=True)
class SparsifyAttention(GraphPass):
    """Let every self-attention of a graph compute the blocks of a layout, and skip the others.

    before:  y = scaled_dot_product_attention(q, k, v, attn_mask=(key <= query) & padding[:, None, None])
    after:   y = block_sparse_attention(q, k, v, padding[:, None, None], None, '{"mode": "fixed"}', causal=True)[0]

    Attention written out with a softmax is found as well. The model's mask still applies: a key is visible if both the
    layout and the mask allow it. Heads of keys that are repeated for several heads of queries are read once. Left
    alone, with a note: attention whose keys come from other tokens than its queries, such as that of a decoder over an
    encoder, also where both have equally many; attention over another number of keys than of queries, such as over a
    cache; heads whose scores something else reads as well.

    Attributes:
        layout: The computed blocks, at any length.
    """

    layout: Layout = field(default_factory=Fixed)

    phase: ClassVar[Phase] = Phase.CAPTURE
    conflicts: ClassVar[frozenset[str]] = frozenset({"substituted-kernels"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        notes: list[str] = []
        done: Counter[str] = Counter()
        splits_heads = self.layout.different_layout_per_head and any(find_calls(gm, op) for op in _OF_SLICES)
        for module in all_graph_modules(gm):
            transforms, erased = 0, set[Node]()
            for node in list(module.graph.nodes):
                transforms += transforms_begun(node)
                found = None if node in erased else find_attention(node)
                if found is None:
                    continue
                if transforms > 0:
                    found = NearMiss(node, "it is inside a transform of torch.func, which does not know the op")
                if isinstance(found, FoundAttention) and splits_heads:
                    found = NearMiss(
                        node, "tensor-parallel ranks have different heads, and the layout differs between heads"
                    )
                made = _sparsified(found, self.layout) if isinstance(found, FoundAttention) else found
                if isinstance(found, FoundAttention) and isinstance(made, str):
                    _erase(found.node, erased)
                if isinstance(made, NearMiss):
                    notes.append(f"attention stays dense{user_line(made.node)}: {made.reason}")
                else:
                    done[made] += 1
        if not done:
            notes.append(f"sparse_attention {NOWHERE}")
        lines = (f"{count} attention{'s' if count > 1 else ''} in blocks of {what}" for what, count in done.items())
        return PassResult(sum(done.values()), tuple(notes), tuple(lines))

    def fingerprint(self) -> str | None:
        files: list[Any] = [
            op.supports,
            block_attention.forward,
            row_buckets.Bucket,
            products.ScoreTerms,
            layouts.Layout,
            patterns.Fixed,
        ]
        files += [custom.Custom, reading.layout_of, finding.find_attention, mask_terms.terms_of, why_not_self]
        prints = [source_fingerprint(code, self.layout.text) for code in (type(self), *files)]
        return None if None in prints else "".join(map(str, prints))


def _sparsified(found: FoundAttention, layout: Layout) -> str | NearMiss:
    """Replace an attention by the op; return a description of its blocks, or why it is left alone."""
    node, graph = found.node, found.node.graph
    q, k, v = found.q, found.k if found.keys_are_transposed else before_repeating(found.k), before_repeating(found.v)
    sizes = fake_of(q).shape
    if len(sizes) != 4:
        return NearMiss(node, f"it has {len(sizes)} dimensions, and the op 4: batch, heads, tokens, width")
    if fake_of(k).shape[1] != fake_of(v).shape[1]:
        k, v = found.k, found.v
    with graph.inserting_before(node):
        made: list[Node] = []
        emit = _Emit(node, made)
        if found.keys_are_transposed:
            k = emit("transpose", k, -2, -1)
        mask, bias = _mask(found, emit), _four_dimensions(found.bias, emit)
        reason = _why_not(layout, found, *map(fake_of, (q, k, v, mask, bias)))
        if reason is not None:
            for item in reversed(made):
                graph.erase_node(item)
            return NearMiss(node, reason)
        options = {"scale": found.scale, "dropout_p": found.dropout_p, "causal": found.mask.causal}
        results = emit(_OP, q, k, v, mask, bias, layout.text, **options)
        result = emit(operator.getitem, results, 0)
        if reader_of_layout(node) is not None and fake_of(node).stride() != fake_of(result).stride():
            result = emit("contiguous", result)
    result.meta = {**node.meta, "example_value": with_gradient_as(fake_of(node), fake_of(result))}
    node.replace_all_uses_with(result)
    return _described(layout, sizes, causal=found.mask.causal)


def _erase(node: Node, erased: set[Node]) -> None:
    """Erase a call without readers, and the calls only for it; add them to `erased`."""
    frontier = [node]
    while frontier:
        item = frontier.pop()
        if item.users or item.op not in ("call_function", "call_method") or writes(item) or item in erased:
            continue
        frontier += item.all_input_nodes
        item.graph.erase_node(item)
        erased.add(item)


def _why_not(layout: Layout, found: FoundAttention, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> str | None:
    reason = op.supports(q, k, v, mask, bias)
    length, heads = size_hint(q.shape[2]), size_hint(q.shape[1])
    if reason is None and length is not None and heads is not None:
        try:
            layout.codes(heads, length, causal=found.mask.causal)
        except SparseLayoutError as error:
            return str(error)
    return why_not_self(found.q, found.k, found.v) if reason is None else reason


def _described(layout: Layout, sizes: Any, *, causal: bool) -> str:
    length, heads = size_hint(sizes[2]) or 1, size_hint(sizes[1]) or 1
    share = layout.density(heads, length, causal=causal)
    return f"{layout.block} of mode {layout.mode}, {share:.1%} of the scores at {length:,} tokens"


@dataclass
class _Emit:
    """Adds calls before a node, with their fake values."""

    node: Node
    made: list[Node]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        call = add_call(self.node, target, args, kwargs)
        self.made.append(call)
        return call


def _mask(found: FoundAttention, emit: _Emit) -> Node | None:
    """Return the mask of visible keys, without causality, with four dimensions; None if all are visible."""
    terms = list(found.mask.terms)
    if found.hidden is not None:
        terms.append(emit(torch.logical_not, found.hidden))
    if not terms:
        return None
    mask = terms[0]
    for term in terms[1:]:
        mask = emit(operator.and_, mask, term)
    return _four_dimensions(mask, emit)


def _four_dimensions(given: Node | None, emit: _Emit) -> Node | None:
    missing = 0 if given is None else 4 - fake_of(given).ndim
    if given is None or missing <= 0:
        return given
    return emit(operator.getitem, given, (*(None,) * missing, ...))
