"""Passes that change a forward and its backward at once."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.passes import CaptureFacts, GraphPair, Partitioner, PassError, Phase, Pipeline, Runner
from dsgraph.passes.compat import min_cut_rematerialization_partition
from dsgraph.passes.ir.graph import emit, find_calls, placeholders
from dsgraph.passes.ir.save_plan import Choice, SavePlan

aten = torch.ops.aten
prims = torch.ops.prims

pytestmark = pytest.mark.usefixtures("fake_ranks")


def _exp(x, w):
    """Return a function whose `exp` is recomputed."""
    return checkpoint(lambda x, w: torch.exp(torch.sin(torch.mm(x, w))), x, w, use_reentrant=False).square().sum()


def _mm(x, w):
    return torch.sin(torch.mm(x, w)).square().sum()


def _run(function, *passes, **options):
    """Loss and gradients under the passes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    how = {"codegen": "eager", "pipeline": dsgraph.default_pipeline() + list(passes), **options}
    loss = torch.compile(function, backend="dsgraph", options=how)(x, w)
    loss.backward()
    return loss.detach(), x.grad, w.grad


def _same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _large(pair):
    """The saved values that the forward computes."""
    return [node for node in pair.saved if node.op == "call_function"]


def test_what_the_backward_repeats_can_be_saved_instead():
    counts = []

    @dsgraph.graph_pass(phase="pair")
    def save_exp(pair, ctx):
        counts.append(len(find_calls(pair.backward, aten.exp.default)))
        (exp,) = find_calls(pair.forward, aten.exp.default)
        saved = pair.save(exp)
        assert pair.save(exp) is saved and saved.name == exp.name
        assert (exp, saved) in list(pair.crossing())
        return 1

    @dsgraph.graph_pass(phase="backward")
    def look(gm, ctx):
        counts.append(len(find_calls(gm, aten.exp.default)))
        return 0

    assert _same(_run(_exp, save_exp, look), _run(_exp))
    assert counts == [1, 0]


@dsgraph.graph_pass(phase="pair")
def narrow_saved(pair, ctx):
    """Saves in bfloat16 what the forward computes in float32."""
    changed = 0
    theirs = dict(pair.crossing())
    for value in _large(pair):
        narrow = emit(value.next, prims.convert_element_type.default, value, torch.bfloat16)
        saved = pair.save(narrow)
        wide = emit(min(theirs[value].users), prims.convert_element_type.default, saved, torch.float32)
        theirs[value].replace_all_uses_with(wide)
        pair.drop(value)
        changed += 1
    return changed


def test_what_is_saved_can_be_saved_in_another_dtype():
    seen = []

    @dsgraph.graph_pass(phase="backward")
    def look(gm, ctx):
        seen.extend(node.meta["val"].dtype for node in placeholders(gm))
        return 0

    loss, *gradients = _run(_mm, narrow_saved, look)
    assert torch.bfloat16 in seen
    exact = _run(_mm)
    assert torch.equal(loss, exact[0])
    for found, expected in zip(gradients, exact[1:], strict=True):
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.2)


def test_both_graphs_come_with_the_facts_of_both():
    seen = []

    @dsgraph.graph_pass(phase=Phase.PAIR)
    def look(pair, ctx):
        assert isinstance(pair, GraphPair) and ctx.phase is Phase.PAIR
        seen.append([(gm is graph, part.graph) for (gm, part), graph in zip(pair.parts(ctx), pair.graphs, strict=True)])
        assert [theirs.name for _, theirs in pair.crossing()] == [node.name for node in pair.expected]
        return 0

    _run(_mm, look)
    assert seen == [[(True, "pair-forward"), (True, "pair-backward")]]


def _output(gm):
    (output,) = gm.graph.find_nodes(op="output")
    return output


def drops_a_saved_output(pair, ctx):
    output = _output(pair.forward)
    output.args = (output.args[0][:-1],)
    return 1


def swaps_two(pair, ctx):
    output = _output(pair.forward)
    *others, first, second = output.args[0]
    output.args = ((*others, second, first),)
    return 1


def narrows_one_side(pair, ctx):
    node = placeholders(pair.backward)[0]
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    return 1


def saves_one_side(pair, ctx):
    output = _output(pair.forward)
    output.args = ((*output.args[0], emit(output, aten.cos.default, output.args[0][-1])),)
    return 1


def takes_one_side(pair, ctx):
    first = placeholders(pair.backward)[0]
    with pair.backward.graph.inserting_before(first):
        node = pair.backward.graph.placeholder("more")
    node.meta["val"] = first.meta["val"]
    return 1


def changes_what_the_model_returns(pair, ctx):
    output = _output(pair.forward)
    first, *others = output.args[0]
    output.args = ((emit(output, aten.clone.default, first.args[0]), *others),)
    return 1


def drops_what_is_read(pair, ctx):
    pair.drop(pair.saved[0])
    return 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drops_a_saved_output, r"pass drops_a_saved_output: the backward reads \w+, which the forward does not save"),
        (swaps_two, r"pass swaps_two: the backward takes (\w+) where the forward saves (?!\1\b)\w+"),
        (narrows_one_side, r"pass narrows_one_side: the forward saves \w+ as float32.* takes it as bfloat16"),
        (saves_one_side, r"pass saves_one_side: the forward saves cos\w*, which the backward does not take"),
        (takes_one_side, r"pass takes_one_side: the backward reads more, which the forward does not save"),
        (changes_what_the_model_returns, r"pass changes_what_the_model_returns \(forward\) changed output 0"),
        (drops_what_is_read, r"pass drops_what_is_read .*is still read by"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_caught_and_named(fault, message):
    with pytest.raises(PassError, match=message):
        _run(_mm, dsgraph.graph_pass(phase="pair")(fault))


def test_dumps_show_both_graphs(tmp_path):
    _run(_mm, narrow_saved, dump=tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("pair-*.py"))
    assert names == [
        "pair-backward-0-before.py",
        "pair-backward-1-narrow_saved.py",
        "pair-forward-0-before.py",
        "pair-forward-1-narrow_saved.py",
    ]
    texts = {path.name: path.read_text() for path in tmp_path.rglob("pair-*.py")}
    assert "convert_element_type" in texts["pair-forward-1-narrow_saved.py"]
    assert "convert_element_type" not in texts["pair-backward-0-before.py"]


def test_the_splitting_is_a_parameter():
    asked = []

    def split(gm, joint_inputs, /, *, num_fwd_outputs, **how):
        plan = SavePlan({node.name: Choice.SAVE for node in find_calls(gm, aten.exp.default)})
        plan.write(gm)
        asked.append(num_fwd_outputs)
        return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **how)

    runner, facts = Runner(Pipeline()), CaptureFacts()
    ours = Partitioner(runner, facts, split=split)
    assert ours.uuid() is None, "it closes over `asked`"
    assert Partitioner(runner, facts).uuid() is not None

    saved = []

    @dsgraph.graph_pass(phase="pair")
    def look(pair, ctx):
        saved.extend(node.target for node in pair.saved)
        return 0

    x = torch.randn(4, 4, requires_grad=True)
    runner = Runner(Pipeline([look]))
    aot_function(lambda x: torch.exp(x).sin().sum(), nop, partition_fn=Partitioner(runner, facts, split=split))(
        x
    ).backward()
    assert asked == [1] and aten.exp.default in saved
    assert torch.allclose(x.grad, torch.exp(x).cos() * torch.exp(x))
