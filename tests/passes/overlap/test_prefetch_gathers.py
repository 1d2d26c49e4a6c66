from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import CostModel, PassError, Phase, Pipeline
from dsgraph.passes.analysis.hardware import Device, Link
from dsgraph.passes.ir.graph import KEPT, placeholders
from dsgraph.passes.overlap.prefetch_gathers import PrefetchBackwardGathers, PrefetchForwardGathers
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import GLOO, SHARD, code, gather, run_pass, trace

c10d = torch.ops._c10d_functional


def _three_layers(x, a, b, c):
    for shard in (a, b, c):
        x = torch.mm(x, gather(shard, (4, 4))).sin()
    return (x,)


def _inputs():
    return [torch.randn(2, 4), *(torch.randn(2, 4) for _ in range(3))]


def _lowered(function=_three_layers, inputs=None, axis=SHARD):
    gm = trace(function, *(inputs or _inputs()))
    run_pass(InsertZeroCollectives(), gm, axis)
    run_pass(ChooseCollectiveAlgorithms(), gm, axis)
    return gm


@pytest.mark.parametrize("graph_pass", [PrefetchForwardGathers(), PrefetchBackwardGathers()])
@pytest.mark.parametrize(("axis", "op"), [(SHARD, "all_gather_into_tensor"), (GLOO, "gather_by_messages")])
def test_the_next_gather_starts_as_the_last_one_has_arrived(graph_pass, axis, op):
    gm = _lowered(axis=axis)
    assert run_pass(graph_pass, gm, axis).changed == 2
    FileCheck().check(f"{op}.default(a_1").check_next("wait_tensor").check_next(f"{op}.default(b_1").check_next(
        "mm"
    ).check_next("sin").check_next("wait_tensor").check_next(f"{op}.default(c_1").check_next("mm").check_next(
        "sin"
    ).check_next("wait_tensor").check_next("mm").run(code(gm))


def _backward(dz, y, a, b):
    dy = torch.mm(dz, gather(b, (4, 4)).t()).sin()
    da = torch.mm(y.t(), dy)
    return da, torch.mm(dy, gather(a, (4, 4)).t())


@pytest.mark.parametrize(("axis", "op"), [(SHARD, "all_gather_into_tensor"), (GLOO, "gather_by_messages")])
def test_in_the_backward_a_gather_starts_when_the_last_one_is_done_with(axis, op):
    gm = _lowered(_backward, [torch.randn(2, 4) for _ in range(4)], axis)
    assert run_pass(PrefetchBackwardGathers(), gm, axis, costs=_costs(0.5)).changed == 1
    FileCheck().check(f"{op}.default(b_1").check_next("wait_tensor").check_next("t.default").check_next(
        "mm"
    ).check_next(f"{op}.default(a_1").check_next("sin").check_next("t.default(y_1").check_next("mm").check_next(
        "wait_tensor"
    ).check_next("t.default").check_next("mm").run(code(gm))


def test_casts_and_padding_move_along():
    def function(x, a, b):
        x = torch.mm(x, gather(a, (4, 4)))
        return (torch.mm(x, gather(b.bfloat16(), (5, 4), dtype=torch.float32)[:4]),)

    gm = _lowered(function, [torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)])
    assert run_pass(PrefetchForwardGathers(), gm).changed == 1
    FileCheck().check("wait_tensor").check_next("_to_copy").check_next("convert_element_type").check_next(
        "constant_pad_nd"
    ).check_next("all_gather_into_tensor").check_next("mm").check_next("wait_tensor").run(code(gm))


def test_meaning_is_kept_bit_for_bit():
    inputs = [_inputs() for _ in range(2)]
    graphs = [_lowered(inputs=given) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(PrefetchForwardGathers(), gm)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (lambda x, b: c10d.all_gather_into_tensor(x[:2], 2, "0"), "it gathers a value that the graph computes"),
        (lambda x, b: c10d.all_gather_into_tensor(b.sin(), 2, "0"), "it gathers a value that the graph computes"),
        (lambda x, b: c10d.all_gather_into_tensor(b, 2, "a group of the user's"), "its group is outside the mesh"),
    ],
    ids=["of what the graph computes", "of a computation on an input", "outside the mesh"],
)
def test_other_gathers_are_left_alone(second, reason):
    def function(x, a, b):
        x = torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0")))
        return (torch.mm(x, c10d.wait_tensor(second(x, b))),)

    gm = trace(function, torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4))
    before = code(gm)
    result = run_pass(PrefetchForwardGathers(), gm)
    assert result.changed == 0
    assert code(gm) == before
    (note,) = result.notes
    assert note.endswith(f" [4, 4] float32 is not started earlier: {reason}")


def test_two_of_gloos_own_are_never_under_way_at_once():
    gm = trace(_three_layers, *_inputs())
    run_pass(InsertZeroCollectives(), gm, GLOO)
    before = code(gm)
    result = run_pass(PrefetchForwardGathers(), gm, GLOO)
    assert result.changed == 0
    assert code(gm) == before
    assert len(result.notes) == 3 and "gloo's own all-gathers must not overlap" in result.notes[0]


def test_what_overlaps_already_stays():
    def function(x, a, b):
        first, second = c10d.all_gather_into_tensor(a, 2, "0"), c10d.all_gather_into_tensor(b, 2, "0")
        x = torch.mm(x, c10d.wait_tensor(first))
        return (torch.mm(x, c10d.wait_tensor(second)),)

    gm = trace(function, torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4))
    before = code(gm)
    assert run_pass(PrefetchForwardGathers(), gm).changed == 0
    assert code(gm) == before


def test_no_read_moves_across_a_write():
    def function(x, a, b):
        x = torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0")))
        torch.ops.aten.copy_(b, x)
        return (torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(b, 2, "0"))),)

    gm = trace(function, torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4))
    before = code(gm)
    assert run_pass(PrefetchForwardGathers(), gm).changed == 0
    assert code(gm) == before


@pytest.mark.parametrize("graph_pass", [PrefetchForwardGathers(), PrefetchBackwardGathers()])
def test_no_gather_moves_across_an_unknown_op(graph_pass):
    def function(x, a, b):
        x = torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0")))
        x = torch.mm(torch.ops.dsgraph_tests.unknown(x), x)
        return (torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(b, 2, "0"))),)

    gm = trace(function, torch.randn(4, 4), torch.randn(2, 4), torch.randn(2, 4))
    before = code(gm)
    assert run_pass(graph_pass, gm, costs=_costs(9.0)).changed == 0
    assert code(gm) == before


def test_a_write_in_between_is_noted():
    def function(x, a, b, c):
        x = torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0")))
        torch.ops.aten.copy_(c, x)
        return (torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(b, 2, "0"))),)

    gm = trace(function, *(torch.randn(2, 4) for _ in range(4)))
    result = run_pass(PrefetchForwardGathers(), gm)
    assert result.changed == 0
    assert [note.partition(" ")[2] for note in result.notes] == [
        "is not gathered earlier: an op in between may write to it, or is unknown"
    ]


def test_a_second_run_changes_nothing():
    gm = _lowered()
    run_pass(PrefetchForwardGathers(), gm)
    before = code(gm)
    assert run_pass(PrefetchForwardGathers(), gm).changed == 0
    assert code(gm) == before


def _costs(seconds_a_gather: float, seconds_a_kernel: float = 1.0) -> CostModel:
    """Every kernel takes as long as any other, and so does every gather."""
    device = Device(flops_per_s=1e30, bytes_per_s=1e30, kernel_s=seconds_a_kernel)
    return CostModel(device, (SHARD,), {"0": Link(latency_s=seconds_a_gather, bytes_per_s=1e30)})


def _lanes(gm) -> str:
    """The order of a graph: a gather as `a`, the wait for it as `A`, a kernel as a dot, another collective as `!`."""
    text, names = "", {}
    for node in gm.graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default:
            names[node] = node.args[0].name[0]
            text += names[node]
        elif node.target is c10d.wait_tensor.default:
            text += names.get(node.args[0], "!").upper()
        elif node.op == "call_function":
            text += "!" if node.target.namespace == "_c10d_functional" else "."
    return text


def _uneven(x, a, b, c, d, e):
    """One kernel a layer, but many in the third."""
    for shard in (a, b, c, d, e):
        x = torch.mm(x, gather(shard, (4, 4)))
        if shard is c:
            x = x.sin().cos().sin().cos().sin()
    return (x,)


def _prefetched(seconds_a_gather, graph_pass=None, function=_uneven, **facts):
    gm = _lowered(function, [torch.randn(2, 4) for _ in range(6)])
    graph_pass = graph_pass or PrefetchForwardGathers()
    run_pass(graph_pass, gm, costs=_costs(seconds_a_gather), **facts)
    return _lanes(gm)


def test_a_fast_link_gathers_one_parameter_ahead():
    assert _prefetched(0.5) == "aAb.Bc.Cd......De.E."


def test_a_gather_that_would_come_too_late_starts_earlier():
    """After the kernels of the third layer there is time for two: the last one's 2 s end a kernel, of 1 s, after D."""
    assert _prefetched(2.0) == "aAb.Bc.Cd.....e.D.E."


def test_what_is_gathered_ahead_stays_within_bounds():
    least = "aAb.Bc.Cd......De.E."
    assert _prefetched(2.0, PrefetchForwardGathers(ahead_bytes=127)) == least
    assert _prefetched(2.0, memory_limit=0) == least


def test_no_gather_overtakes_another_collective():
    def function(x, a, b, c, d, e):
        x = torch.mm(x, gather(a, (4, 4))).sin().cos().sin()
        x = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
        return (torch.mm(torch.mm(torch.mm(x, gather(b, (4, 4))), gather(c, (4, 4))), gather(d, (4, 4))),)

    assert _prefetched(2.0, function=function) == "aAb....!!Bc.Cd.D."


@pytest.mark.parametrize(("is_kept", "lanes"), [(True, "..a..A.."), (False, "a....A..")])
def test_the_first_gather_of_a_backward_starts_when_the_kept_parameter_is_done_with(is_kept, lanes):
    def function(dz, y, kept, a):
        dy = torch.mm(dz, kept.t())
        return torch.mm(y.t(), dz), torch.mm(dy, gather(a, (4, 4)).t())

    gm = _lowered(function, [torch.randn(2, 4), torch.randn(2, 4), torch.randn(4, 4), torch.randn(2, 4)])
    placeholders(gm)[2].meta.update({KEPT: True} if is_kept else {})
    assert _lanes(gm) == "....aA.."
    assert run_pass(PrefetchBackwardGathers(), gm, costs=_costs(0.5)).changed == 1
    assert _lanes(gm) == lanes


def test_phases_and_contract():
    assert PrefetchForwardGathers().phase is Phase.FORWARD
    assert PrefetchBackwardGathers().phase is Phase.BACKWARD
    with pytest.raises(PassError, match="prefetch_forward_gathers requires 'zero-collectives'"):
        Pipeline([PrefetchForwardGathers()])
