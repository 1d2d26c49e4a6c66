"""SliceTensors(sequence_parallel=True) on graphs of a few calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from dsgraph.passes.ir.graph import bodies
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from tests.passes.parallel.capturing import capture, marked
from tests.passes.tracing import code, run_pass


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, marked(up, 0))), marked(down, 1))


def _two_layers(x: Tensor, up: Tensor, down: Tensor, scale: Tensor, p: float = 0.0) -> Tensor:
    h = x + F.dropout(_mlp(x, up, down), p, training=p > 0)
    return h + _mlp(F.layer_norm(h, (8,), scale), up, down)


def _weights() -> tuple[Tensor, ...]:
    return _leaf(6, 8), _leaf(8, 6), _leaf(8)


def _sliced(gm: GraphModule) -> tuple[str, ...]:
    return run_pass(SliceTensors(sequence_parallel=True), gm).notes


@pytest.mark.parametrize(("shape", "dim", "own"), [((4, 5, 8), 0, [2, 5, 8]), ((3, 4, 8), 1, [3, 2, 8])])
def test_norms_and_residuals_work_on_rows_or_tokens(shape, dim, own):
    gm = capture(_two_layers, _leaf(*shape), *_weights())
    _sliced(gm)
    FileCheck().check("enter_slices.default(l_x_").check("scatter_sum").check("own_slice.default(l_x_").check(
        "enter_slices.default(l_scale_"
    ).check("layer_norm").check("gather_entered").check("scatter_sum").check("gather_slices").run(code(gm))
    assert "sum_slices" not in code(gm)
    (norm,) = (node for node in gm.graph.nodes if node.name.startswith("layer_norm"))
    assert list(norm.meta["example_value"].shape) == own
    (scattered, *_) = (node for node in gm.graph.nodes if "scatter_sum" in node.name)
    assert scattered.args[1:] == (dim, 1, 2, "tp")
    assert list(gm.graph.output_node().all_input_nodes[0].meta["example_value"].shape) == list(shape)


def test_dropout_draws_the_numbers_of_all_tokens():
    gm = capture(lambda *args: _two_layers(*args, p=0.5), _leaf(4, 5, 8), *_weights())
    _sliced(gm)
    FileCheck().check("scatter_sum").check("torch.ones((4, 5, 8)").check("dropout").check("own_slice").check("mul").run(
        code(gm)
    )


@pytest.mark.parametrize(("rows", "held"), [(4, (0, 1)), (3, (0, 3))])
def test_merged_rows_and_tokens_are_sliced_as_they_are_split_later(rows, held):
    def merged(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
        h = x + _mlp(x.view(-1, 8), up, down).view(x.shape)
        return _mlp(F.layer_norm(h, (8,), scale), up, down)

    gm = capture(merged, _leaf(rows, 4, 8), *_weights())
    _sliced(gm)
    (scattered, *_) = (node for node in gm.graph.nodes if "scatter_sum" in node.name)
    assert scattered.args[1:3] == held
    assert "gather_entered" in code(gm)


def _odd(x: Tensor, *weights: Tensor) -> Tensor:
    return _two_layers(x, *weights)


def _written(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    h = _mlp(x, up, down)
    h += x
    return _mlp(F.layer_norm(h, (8,), scale), up, down)


def _picked(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    return _mlp(F.layer_norm(_mlp(x, up, down)[:, -1:], (8,), scale), up, down)


@pytest.mark.parametrize(
    ("function", "shape", "note"),
    [
        (_odd, (3, 5, 8), "2 ranks cannot share its 3 rows of 5 tokens evenly"),
        (_written, (4, 5, 8), "iadd writes to it"),
        (_picked, (3, 4, 8), "no slice of it would reach the next sharded product"),  # only some tokens go on
    ],
)
def test_other_sums_stay_as_they_are(function, shape, note):
    plain, gm = (capture(function, _leaf(*shape), *_weights()) for _ in range(2))
    run_pass(SliceTensors(), plain)
    notes = _sliced(gm)
    assert any(note in each for each in notes)
    assert code(gm) == code(plain) or function is _written


def test_a_mask_of_hidden_states_is_gathered_for_heads():
    """It has no gradient, so that no entry stands before the heads that it masks."""

    def masked(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
        h = F.layer_norm(x + _mlp(x, up, down), (8,), scale)
        wide = F.linear(h, marked(up, 0)).masked_fill(h.sum(-1, True) < 0, 0.0)
        return F.linear(wide, marked(down, 1))

    gm = capture(masked, _leaf(4, 5, 8), *_weights())
    notes = _sliced(gm)
    FileCheck().check("scatter_sum").check("lt").check("gather_slices").check("masked_fill").run(code(gm))
    assert "own_slice.default(masked_fill" not in code(gm) and any("sharded in another way" in note for note in notes)


def test_arguments_that_only_give_a_dtype_or_come_as_keywords():
    def cast(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
        h = x + _mlp(x, up, down)
        mask = (x.detach()[:, :, 0] > 0).type_as(h)
        h = F.dropout(input=h * mask[:, :, None], p=0.5)
        return _mlp(F.layer_norm(h, (8,), scale), up, down)

    gm = capture(cast, _leaf(3, 4, 8), *_weights())
    notes = _sliced(gm)
    assert any("dropout gets its first argument as a keyword" in note for note in notes) or "scatter_sum" not in code(
        gm
    )
    assert list(gm.graph.output_node().all_input_nodes[0].meta["example_value"].shape) == [3, 4, 8]


def test_bodies_of_checkpoints_begin_and_end_whole():
    def recomputed(*args: Tensor) -> Tensor:
        return checkpoint(_two_layers, *args, use_reentrant=False)

    gm = capture(recomputed, _leaf(4, 5, 8), *_weights())
    _sliced(gm)
    ((body, _),) = bodies(gm)
    FileCheck().check("enter_slices").check("scatter_sum").check("layer_norm").check("gather_entered").check(
        "gather_slices"
    ).run(code(body))


def test_what_was_made_of_a_value_is_made_again_after_a_write():
    """An entry or a slice is a copy: the next reader needs the written value."""

    def writes(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = x * 1
        first = _mlp(x, up, down)
        x.mul_(2)
        return first + _mlp(x, up, down)

    def writes_through_a_view(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = x * 1
        first = _mlp(x, up, down)
        x.movedim(0, 1).mul_(2)
        return first + _mlp(x, up, down)

    for function in (writes, writes_through_a_view):
        gm = capture(function, _leaf(3, 8), _leaf(6, 8), _leaf(8, 6))
        run_pass(SliceTensors(), gm)
        FileCheck().check("ops.dsgraph.enter_slices").check("mul_").check("ops.dsgraph.enter_slices").run(code(gm))


def test_what_was_made_without_gradients_is_made_again_with_them():
    def looks(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = F.linear(x, marked(up, 0))
        with torch.no_grad():
            size = h.amax()  # has no rule: it is gathered
        return F.linear(h, marked(down, 1)) * size + h.amax()

    gm = capture(looks, _leaf(3, 8), _leaf(6, 8), _leaf(8, 6))
    run_pass(SliceTensors(), gm)
    assert code(gm).count("ops.dsgraph.gather_slices") == 2
