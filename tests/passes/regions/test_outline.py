from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import FileCheck

from dsgraph.passes.compat import invoke_subgraph, storage_id
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.regions.outline import outline_regions
from tests.passes.regions.blocks import trace_blocks
from tests.passes.tracing import code

c10d = torch.ops._c10d_functional


def _outline(block, *inputs, count=3, before=lambda gm: None, **how):
    """The graph with its regions, which must compute what it computed, bit for bit."""
    inputs = list(inputs) or [torch.randn(4, 4)]
    gm = trace_blocks(block, inputs, count=count)
    before(gm)
    expected = gm(*inputs)
    found = outline_regions(gm, prefix="region", **how)
    for ours, theirs in zip(gm(*inputs), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert outline_regions(gm, prefix="again").regions == ()
    return gm, found


def test_equal_blocks_are_calls_of_one_function():
    gm, found = _outline(lambda x, number: (x.sin() + 1).cos())
    (region,) = found.regions
    assert str(region) == "region_0: 3 nodes of a block of net.blocks, called 3 times"
    FileCheck().check_count("invoke_subgraph(region_0", 3, exactly=True).check_not("sin").run(code(gm))
    FileCheck().check("sin").check("add").check("cos").run(code(gm.region_0))
    called = find_calls(gm, invoke_subgraph)
    assert [node.meta["val"][0].shape for node in called] == [(4, 4)] * 3


def test_only_the_lists_that_were_named_count_and_unknown_ones_are_told():
    _, found = _outline(lambda x, number: (x.sin() + 1).cos(), within=["net.blocks", "layers"])
    assert [region.calls for region in found.regions] == [3]
    assert found.inlined == ("regions: no block of 'layers' is in this graph; there are those of net.blocks",)
    gm = trace_blocks(lambda x, number: (x.sin() + 1).cos(), [torch.randn(4, 4)])
    assert outline_regions(gm, prefix="region", within=["layers"]).regions == ()


@pytest.mark.parametrize("constant", [lambda n: n + 1, lambda n: (1, 1.0, True)[n], lambda n: (0.0, -0.0, 2)[n]])
def test_blocks_of_other_constants_are_no_copies(constant):
    gm, found = _outline(lambda x, number: (x.sin() + constant(number)).cos())
    assert found.regions == () and find_calls(gm, invoke_subgraph) == []
    assert found.inlined == ("3 parts of blocks are like no other",)


def test_each_kind_of_block_is_a_region_of_its_own():
    def block(x, number):
        return x.sin().cos().tan() if number % 2 else x.cos().tan().sin()

    _, found = _outline(block, count=4)
    assert [region.calls for region in found.regions] == [2, 2]


def test_blocks_that_hand_on_other_values_are_no_copies():
    def block(x, number):
        values.append(x.sin())
        return values[-1].cos().tan() + (values[1] * 2 if number == 2 else values[-1] * 2)

    values: list[torch.Tensor] = []
    _, found = _outline(block, count=3)
    assert found.regions == ()


def test_what_is_too_small_to_gain_stays():
    gm, found = _outline(lambda x, number: x.t().sin().cos())
    assert found.regions == () and found.inlined == ()
    FileCheck().check_not("invoke_subgraph").run(code(gm))


def test_inputs_of_other_strides_are_another_function():
    def block(x, number, *weights):
        return (x @ weights[number]).sin().cos()

    square = torch.randn(4, 4)
    _, found = _outline(block, torch.randn(4, 4), square, square.t(), torch.randn(5, 4)[1:], count=3)
    assert found.regions == ()


def test_no_result_lies_in_the_memory_of_an_input_or_of_another_result():
    def block(x, number, *kept):
        whole = x.sin().cos().tan()
        return whole.t().reshape(16).view(4, 4) + x.t() + whole[0]

    def also_return_views(gm):
        (output,) = gm.graph.find_nodes(op="output")
        views = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not torch.ops.aten.add.Tensor]
        output.args = ((*output.args[0], *views),)
        gm.recompile()

    gm, found = _outline(block, before=also_return_views)
    assert [region.calls for region in found.regions] == [3]
    output = next(iter(gm.region_0.graph.find_nodes(op="output")))
    values = [node.meta["val"] for node in (*gm.region_0.graph.find_nodes(op="placeholder"), *output.args[0])]
    assert len({storage_id(value) for value in values}) == len(values)


def test_views_of_parameters_that_stand_elsewhere_belong_to_their_block():
    def block(x, number, *weights):
        return (x @ weights[number].t()).sin().cos()

    def ahead(gm):
        """One view at the beginning, one that turns a view back, as where the forward has saved it."""
        first, second, _ = (node for node in gm.graph.nodes if node.target is torch.ops.aten.t.default)
        next(node for node in gm.graph.nodes if node.op == "call_function").prepend(second)
        with gm.graph.inserting_after(first):
            back = gm.graph.call_function(torch.ops.aten.t.default, (first,))
            back.meta = {**first.meta, "val": first.meta["val"].t()}
        with gm.graph.inserting_after(back):
            again = gm.graph.call_function(torch.ops.aten.t.default, (back,))
            again.meta = {**first.meta, "val": back.meta["val"].t()}
        first.replace_all_uses_with(again, delete_user_cb=lambda user: user is not back)
        gm.recompile()

    _, found = _outline(block, *(torch.randn(4, 4) for _ in range(4)), before=ahead)
    assert [region.calls for region in found.regions] == [3]


def test_collectives_keep_their_places():
    def block(x, number):
        started = c10d.all_reduce(x.sin().cos().tan(), "sum", "0")
        return c10d.wait_tensor(started).tan().cos().sin()

    gm = trace_blocks(block, [torch.randn(4, 4)], count=2)
    found = outline_regions(gm, prefix="region")
    assert [region.calls for region in found.regions] == [2, 2]
    order = FileCheck()
    for _ in range(2):
        for step in ("invoke_subgraph(region_0", "all_reduce", "wait_tensor", "invoke_subgraph(region_1"):
            order = order.check(step)
    order.run(code(gm))


def test_tuples_are_taken_apart_where_they_are_made():
    def block(x, number):
        values, indices = x.sin().max(dim=1)
        return (values[:, None] + x * indices[:, None]).cos()

    _, found = _outline(block)
    assert [region.calls for region in found.regions] == [3]


def test_random_numbers_are_drawn_outside():
    def block(x, number):
        return (x.sin().cos().tan() * torch.rand_like(x)).tan().sin().cos()

    gm = trace_blocks(block, [torch.randn(4, 4)])
    assert [region.calls for region in outline_regions(gm, prefix="region").regions] == [3, 3]
    assert len(find_calls(gm, torch.ops.aten.rand_like.default)) == 3
    x = torch.randn(4, 4)
    assert not torch.equal(gm(x)[0], gm(x)[0])


def test_sizes_that_are_not_known_stay_in_the_graph():
    def function(x):
        for _ in range(3):
            x = (x.sin() + 1).cos()
        return (x,)

    gm = make_fx(function, tracing_mode="symbolic")(torch.randn(4, 4))
    for number, node in enumerate(node for node in gm.graph.nodes if node.op == "call_function"):
        node.meta["nn_module_stack"] = {"": (f"L['self'].blocks.{number // 3}", object)}
    assert outline_regions(gm, prefix="region").regions == ()
