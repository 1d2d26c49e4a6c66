from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.testing import FileCheck
from torch.utils.checkpoint import CheckpointPolicy

import dsgraph
from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.passes import PassError, Pipeline
from dsgraph.passes.analysis.budget import MemoryBudget, MemoryPart
from dsgraph.passes.compat import FakeTensorMode
from dsgraph.passes.ir.coalesced import collective_behind
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import KEPT, emit, find_calls, is_wait, placeholders
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.passes.zero.keep_last_gather import KeepLastGather, ReleaseKeptGather
from examples.gpt import GPT, GPTConfig
from tests.passes import lockstep
from tests.passes.tracing import GLOO, SHARD, code, gather, reduce, run_pass, trace


def _joint(x, a, b, tangents_1):
    """Forward and backward of two layers, the second of which has 3 rows a rank, the last of them padding."""
    full_a, full_b = gather(a, (4, 4)), gather(b, (5, 4))
    y = torch.mm(x, full_a)
    z = torch.mm(y, full_b.t())
    dz = tangents_1.expand_as(z)
    dy = torch.mm(dz, full_b)
    return z.sum(), torch.mm(dy, full_a.t()), torch.mm(dz.t(), y)


def _lowered(tangent, axis=SHARD, function=_joint):
    gm = trace(function, torch.randn(2, 4), torch.randn(2, 4), torch.randn(3, 4), tangent)
    run_pass(InsertZeroCollectives(), gm, axis)
    run_pass(ChooseCollectiveAlgorithms(), gm, axis)
    assert any("tangents" in node.name for node in placeholders(gm))
    return gm


def _saved(gm):
    return [node for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]


@pytest.mark.parametrize("axis", [SHARD, GLOO], ids=["nccl", "gloo"])
def test_the_last_gather_of_a_loss_is_kept_and_no_other(axis):
    gm = _lowered(torch.tensor(1.0), axis)
    assert run_pass(KeepLastGather(), gm, axis).changed == 1
    (saved,) = _saved(gm)
    assert is_wait(saved) and saved.args == (collectives(gm)[-1],)


def test_a_part_of_a_model_keeps_nothing():
    gm = _lowered(torch.randn(2, 5))
    assert run_pass(KeepLastGather(), gm).changed == 0
    assert not _saved(gm)


def test_gathers_that_the_backward_does_not_repeat_are_left_alone():
    def function(x, a, b, tangents_1):
        full = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "0")
        return (torch.ops._c10d_functional.wait_tensor(full).sum() * tangents_1,)

    gm = _lowered(torch.tensor(1.0), function=function)
    assert run_pass(KeepLastGather(), gm).changed == 0
    assert not _saved(gm)


def test_the_graph_itself_and_a_second_run_change_nothing():
    gm = _lowered(torch.tensor(1.0))
    before = code(gm)
    run_pass(KeepLastGather(), gm)
    saved = _saved(gm)
    run_pass(KeepLastGather(), gm)
    assert code(gm) == before and _saved(gm) == saved


def test_contract():
    with pytest.raises(PassError, match="keep_last_gather requires 'zero-collectives'"):
        Pipeline([KeepLastGather()])


def _step(*units, backward=None, trains=True):
    """The joint graph of a step whose units read parameters of these numbers of rows, after `InsertZeroCollectives`."""
    graph, mode = Graph(), FakeTensorMode()

    def node(make, *shape):
        made = make()
        with mode:
            made.meta["val"] = torch.empty(shape)
        return made

    backward = list(reversed(range(len(units)))) if backward is None else backward
    shards = [
        [node(lambda at=at, place=place: graph.placeholder(f"p{at}_{place}"), rows // 2, 4) for place, rows in unit]
        for at, unit in enumerate(map(enumerate, units))
    ]
    last = node(lambda: graph.placeholder("tangents_1"), 2, 4)
    end = graph.output(())
    how = {"dtype": torch.float32, "reduce_dtype": torch.float32, "group": "0", "outer_groups": []}
    full = [
        [
            emit(end, torch.ops.dsgraph.gather_param.default, shard, None, [rows, 4], **how)
            for shard, rows in zip(own, unit, strict=True)
        ]
        for own, unit in zip(shards, units, strict=True)
    ]
    with graph.inserting_before(end):
        runs = [graph.call_function(RUN_FORWARD, (at, [], own)) for at, own in enumerate(full)]
        runs += [graph.call_function(RUN_BACKWARD, (at, [last], full[at])) for at in backward] if trains else []
    end.args = ((*runs,),)
    gm = GraphModule(torch.nn.Module(), graph)
    run_pass(InsertZeroCollectives(), gm)
    run_pass(ChooseCollectiveAlgorithms(), gm)
    return gm


def _kept(gm):
    changed = run_pass(KeepLastGather(), gm).changed
    kept = [collective_behind(node).all_input_nodes[0].name for node in _saved(gm)]
    assert changed == len(kept) and all(node.meta[KEPT] for node in _saved(gm))
    return kept


@pytest.mark.parametrize(
    ("units", "backward", "kept"),
    [
        (((8, 8), (8, 2)), None, ["p1_0", "p1_1"]),
        (((8, 8), (8, 8)), None, ["p1_0", "p1_1"]),
        (((8, 8), (8, 8, 8)), None, ["p1_2"]),
        (((8, 8),), None, ["p0_1"]),
        (((8, 8), (4, 4), (2,)), [1, 0], ["p1_0", "p1_1"]),
        (((8, 8), (4, 4), (2,)), [0, 1, 2], []),
        (((8, 8), (4, 4), ()), [2, 1, 0], ["p1_0", "p1_1"]),
    ],
    ids=[
        "all of the last unit",
        "of one as large as another",
        "the last one of a unit that reads the most",
        "the last one of a model that is one unit",
        "of the last unit that the backward runs",
        "the backward begins with another unit",
        "of the last unit that reads parameters",
    ],
)
def test_a_step_keeps_the_parameters_of_its_last_unit(units, backward, kept):
    gm = _step(*units, backward=backward)
    assert _kept(gm) == kept


def test_a_step_without_a_backward_keeps_nothing():
    assert _kept(_step((8, 8), (8, 2), trains=False)) == []


def test_what_a_step_keeps_is_taken_from_the_budget():
    budget = MemoryBudget(limit=10**6)
    gm = _step((8, 8), (8, 2))
    run_pass(KeepLastGather(), gm, budget=budget)
    assert budget.taken(MemoryPart.GATHERED_COPIES) == 4 * 4 * (8 + 2)


def _backward(kept, x, dy, other):
    dw = torch.mm(dy.t(), x)
    own = reduce(dw, (2, 4))
    if other is not None:
        torch.ops.aten.copy_(other, dw)
    return own, torch.mm(dy, kept[:4]).sin()


def _backward_graph(other=None):
    gm = trace(_backward, torch.randn(6, 4), torch.randn(3, 4), torch.randn(3, 4), other)
    run_pass(InsertZeroCollectives(), gm)
    placeholders(gm)[0].meta["dsgraph_kept"] = True
    return gm


def test_what_was_kept_is_computed_with_first():
    gm = _backward_graph()
    assert run_pass(ReleaseKeptGather(), gm).changed == 2
    FileCheck().check("slice.Tensor(kept_1").check_next("mm.default(dy_1, slice").check_next(
        "t.default(dy_1)"
    ).check_next("mm").check_next("reduce_scatter").check_next("wait_tensor").check_next("div").check_next("sin").run(
        code(gm)
    )
    before = code(gm)
    assert run_pass(ReleaseKeptGather(), gm).changed == 0
    assert code(gm) == before


def test_nothing_moves_across_an_unknown_op():
    def backward(kept, x, dy):
        dw = torch.ops.dsgraph_tests.unknown(torch.mm(dy.t(), x))
        return dw, torch.mm(dy, kept[:4])

    gm = trace(backward, torch.randn(6, 4), torch.randn(3, 4), torch.randn(3, 4))
    placeholders(gm)[0].meta["dsgraph_kept"] = True
    unknown = find_calls(gm, torch.ops.dsgraph_tests.unknown.default)[0]
    run_pass(ReleaseKeptGather(), gm)
    first, second = find_calls(gm, torch.ops.aten.mm.default)
    assert first < unknown < second


def test_nothing_moves_across_a_write():
    gm = _backward_graph(torch.randn(4, 4))
    assert run_pass(ReleaseKeptGather(), gm).changed == 0


def test_release_keeps_the_meaning_bit_for_bit():
    inputs = [[torch.randn(6, 4), torch.randn(3, 4), torch.randn(3, 4), None] for _ in range(2)]
    graphs = [_backward_graph() for _ in range(2)]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        assert run_pass(ReleaseKeptGather(), gm).changed
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert all(map(torch.equal, before, after))


def _saved_shapes(compiled, model, *inputs):
    """Shapes of the tensors that a compiled model's forward saves for its backward, its own parameters left out."""
    own = {parameter.to_local().data_ptr() for parameter in model.parameters()}
    shapes = []

    def note(tensor):
        if tensor.data_ptr() not in own:
            shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compiled(*inputs)
    return shapes


@pytest.fixture
def model(fake_ranks):
    model = GPT(GPTConfig(vocab=63, width=32, heads=2, layers=2))
    return dsgraph.partition(model, stage=3, keep_whole_below=0, blocks="none")


def _matrices(model):
    return {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2} | {(64, 32)}


def test_a_whole_model_saves_the_weight_of_its_output_layer(model):
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    shapes = _saved_shapes(compiled, model, tokens, tokens)
    assert [shape for shape in shapes if shape in _matrices(model)] == [(64, 32)]  # 63 rows and one of padding


def test_a_block_saves_none_of_its_parameters(model):
    compiled = torch.compile(model.blocks[0], backend="dsgraph", options={"codegen": "eager"})
    shapes = _saved_shapes(compiled, model.blocks[0], torch.randn(2, 8, 32), torch.randn(8, 8))
    assert shapes and not {*shapes} & _matrices(model)
