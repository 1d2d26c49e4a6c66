from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dsgraph.passes.ir.blocks import block_of, is_plain
from dsgraph.passes.regions.segments import find_segments
from tests.passes.regions.blocks import trace_blocks
from tests.passes.tracing import gather, trace, unknown

c10d = torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("blocks.3.norm", ("blocks", "3")),
        ("model.layers.11", ("model.layers", "11")),
        ("experts.2.layers.1", ("experts", "2")),
        ("layers.h2.norm", None),
        ("head", None),
        ("", None),
    ],
)
def test_the_outermost_list_is_a_blocks(path, block):
    assert block_of(path) == block


def _parts(gm):
    return [[node.name for node in segment.nodes] for segment in find_segments(gm)]


def test_a_segment_ends_where_the_next_block_begins():
    gm = trace_blocks(lambda x, number: (x * 2).sin(), [torch.randn(3)])
    assert _parts(gm) == [["mul", "sin"], ["mul_1", "sin_1"], ["mul_2", "sin_2"]]
    assert {segment.blocks for segment in find_segments(gm)} == {"net.blocks"}


def test_what_no_module_computed_belongs_to_the_block_before():
    gm = trace_blocks(lambda x, number: (x * 2).sin(), [torch.randn(3)])
    for node in gm.graph.nodes:
        if node.name.startswith("sin"):
            del node.meta["nn_module_stack"]
    assert _parts(gm) == [["mul", "sin"], ["mul_1", "sin_1"], ["mul_2", "sin_2"]]


def test_collectives_and_waits_stand_between_segments():
    def block(x, number):
        started = c10d.all_reduce(x * 2, "sum", "0")
        return c10d.wait_tensor(started).cos()

    assert _parts(trace_blocks(block, [torch.randn(3)], count=2)) == [["mul"], ["cos"], ["mul_1"], ["cos_1"]]


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (lambda x: x.sin(), True),
        (lambda x: x.t(), True),
        (lambda x: torch.arange(3), True),
        (lambda x: torch.rand(3), False),
        (lambda x: F.dropout(x), False),
        (lambda x: x.clone().add_(1), False),
        (lambda x: unknown(x), False),
        (lambda x: gather(x, (4, 4)), False),
        (lambda x: x.nonzero(), False),
        (lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), True),
        (lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.5), False),
    ],
)
def test_plain_is_what_gives_the_same_for_the_same(function, plain):
    gm = trace(function, torch.randn(4, 4))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert all(map(is_plain, calls)) is plain


def test_sizes_that_change_are_not_plain():
    gm = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.randn(4, 4))
    assert not any(map(is_plain, gm.graph.nodes))
