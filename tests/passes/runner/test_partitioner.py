"""Graphs of a whole model after the passes, for one of eight ranks, the other seven of which do not exist."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import dsgraph
from dsgraph.passes import Phase
from dsgraph.passes.ir.coalesced import results_of
from dsgraph.passes.ir.collectives import collective_kind, collectives, is_gather
from dsgraph.passes.ir.graph import placeholders
from examples.gpt import GPT, GPTConfig

pytestmark = pytest.mark.slow

CONFIG = GPTConfig(vocab=64, width=32, heads=2, layers=1)


@functools.cache  # no test changes them
def _graphs(stage: int, *, keep_whole_below: int = 64, backward: bool = True, **how) -> dict[Phase, GraphModule]:
    """The graphs that one of the ranks runs, by phase."""
    found: dict[Phase, GraphModule] = {}

    @dsgraph.graph_pass(phase="forward")
    def keep_forward(gm, ctx):
        found[Phase.FORWARD] = gm
        return 0

    @dsgraph.graph_pass(phase="backward")
    def keep_backward(gm, ctx):
        found[Phase.BACKWARD] = gm
        return 0

    torch.manual_seed(0)
    model = dsgraph.partition(GPT(CONFIG), stage=stage, keep_whole_below=keep_whole_below, **how)
    pipeline = dsgraph.default_pipeline() + [keep_forward, keep_backward]
    compiled = torch.compile(
        model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline}, fullgraph=True
    )
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.set_grad_enabled(backward):
        compiled(tokens, tokens)
    return found


def _count(gm: GraphModule) -> dict[str, int]:
    """How many tensors travel, by kind."""
    counts: Counter[str] = Counter()
    for node in collectives(gm):
        counts[collective_kind(node)] += len(results_of(node))
    return dict(counts)


MATRICES = 2 + 4 * CONFIG.layers  # embedding, head; qkv, out, up, down


def test_stage_3_gathers_in_both_directions_and_reduces_once(fake_ranks):
    graphs = _graphs(3)
    assert _count(graphs[Phase.FORWARD]) == {"all_gather_into_tensor": MATRICES}
    # The embedding's backward does not read the embedding, and the output layer's weight is kept, because the backward
    # begins with it; the norms are small and share one reduction.
    assert _count(graphs[Phase.BACKWARD]) == {
        "all_gather_into_tensor": MATRICES - 2,
        "reduce_scatter_tensor": MATRICES,
        "all_reduce": 1,
    }


def test_small_tensors_travel_together(fake_ranks):
    graphs = _graphs(3)
    assert [len(results_of(node)) for node in collectives(graphs[Phase.FORWARD])] == [MATRICES]
    gathers, *reductions = collectives(graphs[Phase.BACKWARD])
    assert len(results_of(gathers)) == MATRICES - 2
    # Between those of the other matrices and the embedding, those of the norms.
    assert [len(results_of(node)) for node in reductions] == [MATRICES - 1, 1, 1]


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 2))
def test_stages_1_and_2_gather_outside_the_graph(fake_ranks, stage):
    graphs = _graphs(stage)
    assert _count(graphs[Phase.FORWARD]) == {}
    assert _count(graphs[Phase.BACKWARD]) == {"reduce_scatter_tensor": MATRICES, "all_reduce": 1}


def test_stage_0_only_reduces(fake_ranks):
    graphs = _graphs(0)
    assert _count(graphs[Phase.FORWARD]) == {}
    # All gradients of this small model are small: one bucket.
    assert _count(graphs[Phase.BACKWARD]) == {"all_reduce": 1}


def test_inference_graphs_are_lowered_too(fake_ranks):
    graphs = _graphs(3, backward=False)
    assert Phase.BACKWARD not in graphs
    assert _count(graphs[Phase.FORWARD]) == {"all_gather_into_tensor": MATRICES}


@pytest.mark.parametrize("how", [{}, {"param_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_stage_3_saves_nothing_that_was_made_of_parameters(fake_ranks, how):
    """Neither a gathered parameter nor a copy of one in another dtype lives from the forward to the backward.

    But for the last one, see `KeepLastGather`, of which there is one copy.
    """
    graphs = _graphs(3, **how)
    model = GPT(CONFIG)
    sizes = {tuple(p.shape) for p in model.parameters()} | {
        tuple(p.t().shape) for p in model.parameters() if p.dim() == 2
    }
    shards = {(p.shape[0] // 8, *p.shape[1:]) for p in model.parameters()} | {(32,)}
    values = [node.meta["val"] for node in placeholders(graphs[Phase.BACKWARD])]
    large = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    assert [shape for shape in large if shape in sizes - shards] == [tuple(model.head.weight.shape)]


def test_bf16_goes_over_the_wire(fake_ranks):
    graphs = _graphs(3, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for node in collectives(graphs[Phase.FORWARD]):
        assert {result.meta["val"].dtype for result in results_of(node)} == {torch.bfloat16}
    for node in collectives(graphs[Phase.BACKWARD]):
        dtype = torch.bfloat16 if is_gather(node) else torch.float32
        assert {result.meta["val"].dtype for result in results_of(node)} == {dtype}


def test_uneven_rows_make_equal_collectives_on_every_rank(fake_ranks):
    """Messages are padded, so that shapes do not depend on the rank."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 13, bias=False)

        def forward(self, x):
            return self.layer(x).sin()

    found = []

    @dsgraph.graph_pass(phase="backward")
    def keep(gm, ctx):
        found.extend(tuple(node.meta["val"].shape) for node in collectives(gm))
        return 0

    model = dsgraph.partition(Odd(), stage=3, keep_whole_below=0)
    pipeline = dsgraph.default_pipeline() + [keep]
    x = torch.randn(3, 4, requires_grad=True)
    torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})(x)
    assert found == [(16, 4), (2, 4)]


def test_parameters_are_known_by_name_in_every_phase(fake_ranks):
    seen: dict[Phase, set[str]] = {}

    def note(gm, ctx):
        seen[ctx.phase] = {info.name for info in ctx.params.values()}
        return 0

    model = dsgraph.partition(GPT(CONFIG), stage=3, keep_whole_below=64)
    names = {name for name, _ in model.named_parameters()}
    passes = []
    for phase in Phase:
        note_phase = lambda gm, ctx: note(gm, ctx)  # noqa: E731
        note_phase.__name__ = f"note_{phase.value}"
        passes.append(dsgraph.graph_pass(phase=phase)(note_phase))
    pipeline = dsgraph.default_pipeline() + passes
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})(tokens, tokens)
    assert seen[Phase.CAPTURE] == seen[Phase.JOINT] == names
    assert "embedding.weight" in seen[Phase.FORWARD]
    assert "blocks.0.up.weight" in seen[Phase.BACKWARD]
