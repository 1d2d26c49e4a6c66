"""SliceTensors on graphs of a few calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from dsgraph.passes import PassContext, Phase
from dsgraph.passes.ir.graph import bodies
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from tests.passes.parallel.capturing import capture, marked
from tests.passes.tracing import code, run_pass


def _mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, marked(up, 0))), marked(down, 1), bias)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_pair_of_products_is_summed_once_and_the_bias_added_behind():
    gm = capture(_mlp, _leaf(3, 8), _leaf(6, 8), _leaf(8, 6), _leaf(8))
    result = run_pass(SliceTensors(), gm)
    FileCheck().check("enter_slices").check("linear").check("gelu").check("linear").check("sum_slices").check(
        "torch.add"
    ).check_not("gather_slices").run(code(gm))
    assert result.notes == () and code(gm).count("ops.dsgraph.sum_slices") == 1
    assert run_pass(SliceTensors(), gm).changed == 0


def test_bodies_of_checkpoints_keep_slices():
    def recomputed(*args: Tensor) -> Tensor:
        return checkpoint(_mlp, *args, use_reentrant=False)

    gm = capture(recomputed, _leaf(3, 8), _leaf(6, 8), _leaf(8, 6), _leaf(8))
    run_pass(SliceTensors(), gm)
    ((body, _),) = bodies(gm)
    FileCheck().check("enter_slices").check("linear").check("gelu").check("sum_slices").run(code(body))


def test_sums_of_16_bits_are_rounded_once_where_nothing_learns():
    narrow = [torch.randn(*shape, dtype=torch.bfloat16) for shape in ((3, 8), (6, 8), (8, 6), (8,))]
    gm = capture(_mlp, *narrow)
    run_pass(SliceTensors(), gm)
    FileCheck().check("gelu").check("float").check("linear").check("sum_slices").check("torch.add").check(
        "torch.bfloat16"
    ).run(code(gm))
    assert all(node.meta["example_value"].dtype == torch.bfloat16 for node in gm.graph.output_node().all_input_nodes)
    gm = capture(_mlp, *(tensor.requires_grad_() for tensor in narrow))
    run_pass(SliceTensors(), gm)
    assert "float" not in code(gm).replace("bfloat16", "")


def test_states_of_own_heads_go_into_the_cache_of_own_heads():
    def heads(x: Tensor, weight: Tensor, cache: Tensor, at: Tensor, out: Tensor) -> Tensor:
        states = F.linear(x, marked(weight, 0)).view(2, 3, 4, 2).transpose(1, 2)
        full = torch.ops.dsgraph.write_heads(cache, states, at, 2, "tp")
        return F.linear(full.transpose(1, 2).reshape(2, 5, 8), marked(out, 1))

    cache, at = torch.zeros(2, 2, 5, 2), torch.arange(3)
    gm = capture(heads, torch.randn(2, 3, 8), torch.randn(4, 8), cache, at, torch.randn(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("write_own_heads").check("sum_slices").check_not("gather_slices").run(code(gm))


def test_products_of_few_bits_stay_sliced_between_columns_and_rows():
    def mlp(x: Tensor, up: Tensor, down: Tensor, up_scale: Tensor, down_scale: Tensor) -> Tensor:
        multiply = torch.ops.dsgraph.multiply_sliced_weight
        h = F.gelu(multiply(x, up, up_scale, None, 0, 1, 2, "tp"))
        return multiply(h, down, down_scale, None, 1, 1, 2, "tp")

    up, down = torch.ones(3, 8, dtype=torch.int8), torch.ones(8, 3, dtype=torch.int8)
    for dtype in (torch.float32, torch.bfloat16):
        gm = capture(mlp, torch.randn(2, 5, 8, dtype=dtype), up, down, torch.ones(3), torch.ones(8))
        assert run_pass(SliceTensors(), gm).notes == ()
        FileCheck().check("multiply_own_weight").check("gelu").check("multiply_own_weight").check(
            "sum_slices"
        ).check_not("multiply_sliced_weight.default").check_not("gather_slices").run(code(gm))
        # A sum is rounded once, at its end.
        (summed,) = (node for node in gm.graph.nodes if node.name.startswith("sum_slices"))
        assert summed.meta["example_value"].dtype == torch.float32
        assert gm.graph.output_node().all_input_nodes[0].meta["example_value"].dtype == dtype


def test_heads_written_into_views_are_divided():
    def heads(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        h = F.linear(x, marked(weight, 0)).view(2, 3, 4, 2).transpose(1, 2)
        return F.linear(h.softmax(-1).transpose(1, 2).reshape(2, 3, 8), marked(out, 1))

    gm = capture(heads, _leaf(2, 3, 8), _leaf(4, 8), _leaf(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("view((2, 3, 2, 2))").check("reshape((2, 3, 4))").check("sum_slices").run(code(gm))


def test_weights_of_heads_are_entered_so_that_their_gradients_are_summed():
    def scaled(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        h = F.linear(x, marked(weight, 0)).view(3, 4, 2) * scale
        return F.linear(h.flatten(1), marked(out, 1))

    gm = capture(scaled, torch.randn(3, 8), _leaf(4, 8), _leaf(2), _leaf(8, 4))
    run_pass(SliceTensors(), gm)
    assert code(gm).count("ops.dsgraph.enter_slices") == 1  # of the scale; the input needs no gradient
    assert "enter_slices.default(l_scale_" in code(gm)


def test_fused_pieces_are_split_where_they_lie():
    def fused(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        one, other = F.linear(x, marked(weight, 0, 2)).chunk(2, -1)
        return F.linear(one * other, marked(out, 1))

    gm = capture(fused, _leaf(3, 8), _leaf(8, 8), _leaf(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()


def test_dropout_draws_the_numbers_of_all_slices():
    def dropped(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.dropout(F.linear(x, marked(up, 0)), 0.5, True), marked(down, 1))

    gm = capture(dropped, _leaf(3, 8), _leaf(6, 8), _leaf(8, 6))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("torch.ones((3, 12)").check("dropout").check("own_slice").check("torch.mul").run(code(gm))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda h: h.cumsum(-1), "cumsum is not known"),
        (lambda h: h.softmax(-1), "along the sharded dimension"),
        (lambda h: h.view(3, 3, 4), "3 heads, which 2 ranks cannot share"),
        (lambda h: h[:, 2:5], "an index into its slices"),
        (lambda h: h.reshape(9, 4), "merges dimension 1"),
        (lambda h: torch.cat([h, h], 1), "cat along the sharded dimension"),
        (lambda h: h.sum(-1), "along the sharded dimension"),
    ],
)
def test_what_cannot_be_sliced_is_gathered_and_named(call, reason):
    gm = capture(lambda x, up: call(F.linear(x, marked(up, 0))), _leaf(3, 8), _leaf(6, 8))
    (note,) = run_pass(SliceTensors(), gm).notes
    assert reason in note
    gathered = next(node for node in gm.graph.nodes if "gather_slices" in str(node.target))
    assert tuple(gathered.meta["example_value"].shape) == (3, 12)


def test_graphs_without_slices_are_left_alone():
    gm = capture(lambda x: x.softmax(-1), _leaf(3, 8))
    before = code(gm)
    assert SliceTensors().run(gm, PassContext(Phase.CAPTURE)).changed == 0
    assert code(gm) == before


def test_a_loss_over_a_sliced_vocabulary_gathers_nothing():
    def model(ids: Tensor, table: Tensor) -> Tensor:
        full = marked(table, 0)
        return F.cross_entropy(F.linear(F.embedding(ids, full), full), ids, ignore_index=0)

    gm = capture(model, torch.zeros(3, dtype=torch.int64), _leaf(8, 4))
    assert run_pass(SliceTensors(), gm).notes == ()
    FileCheck().check("sliced_embedding").check("enter_slices").check("linear").check("sliced_cross_entropy").check_not(
        "gather_slices"
    ).run(code(gm))


def test_a_loss_with_smoothed_labels_gathers_the_logits():
    def model(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, marked(weight, 0)), ids, label_smoothing=0.1)

    gm = capture(model, _leaf(3, 4), _leaf(8, 4), torch.zeros(3, dtype=torch.int64))
    (note,) = run_pass(SliceTensors(), gm).notes
    assert "smoothed labels" in note
