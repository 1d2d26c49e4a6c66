from __future__ import annotations

import gc
import weakref

import pytest
import torch

import dsgraph
from dsgraph.passes import CostModel, PassContext, Phase, Pipeline, Runner, graph_pass
from dsgraph.passes.analysis import analyses as module
from dsgraph.passes.analysis.analyses import Analyses
from dsgraph.passes.ir.graph import emit, find_calls, replace_and_erase
from dsgraph.passes.verify import memory as invariants
from examples.gpt import GPT, GPTConfig
from tests.passes.tracing import trace

aten = torch.ops.aten


def _graph():
    return trace(lambda x: x.sin().cos(), torch.randn(8))


def _count(asked):
    def analysis(gm, **how):
        asked.append(how)
        return len(gm.graph.nodes)

    return analysis


def _halve(gm):
    """One node less."""
    cos = find_calls(gm, aten.cos.default)[0]
    replace_and_erase(cos, cos.args[0])


def test_a_question_is_answered_once_a_version():
    gm, known, asked = _graph(), Analyses(), []
    analysis = _count(asked)
    assert known.get(analysis, gm) == known.get(analysis, gm) == 4
    known.get(analysis, gm, fused=True)
    assert asked == [{}, {"fused": True}]
    _halve(gm)
    assert known.get(analysis, gm) == 3 and len(asked) == 3


@pytest.mark.parametrize("change", ["move", "argument", "value", "new", "rename", "tag"])
def test_any_change_of_the_graph_makes_a_new_version(change):
    gm = trace(lambda x: (x.sin(), x.cos()), torch.randn(8))
    sin, cos = find_calls(gm, aten.sin.default)[0], find_calls(gm, aten.cos.default)[0]
    known, asked = Analyses(), []
    analysis = _count(asked)
    known.get(analysis, gm)
    if change == "move":
        cos.append(sin)
    elif change == "argument":
        cos.replace_input_with(cos.args[0], sin)
    elif change == "value":
        sin.meta["val"] = sin.meta["val"].clone()
    elif change == "tag":
        sin.meta["recompute"] = True
    elif change == "new":
        emit(cos, aten.exp.default, sin)
    else:
        sin.name = "other"
    known.get(analysis, gm)
    assert len(asked) == 2


def test_a_schedule_is_known_by_its_costs_and_collectives():
    gm, known = _graph(), Analyses()
    costs = CostModel.default()
    assert known.schedule(gm, costs) is known.schedule(gm, costs)
    assert known.schedule(gm, CostModel.default()) is not known.schedule(gm, costs)
    assert known.schedule(gm, costs, unwaited=[find_calls(gm, aten.sin.default)[0]]) is not known.schedule(gm, costs)


def test_a_pass_that_lies_misleads_nobody():
    seen = []

    def look(gm, ctx):
        seen.append(ctx.analyses.memory(gm).nodes)
        return 0

    @graph_pass(phase="joint")
    def look_first(gm, ctx):
        return look(gm, ctx)

    @graph_pass(phase="joint")
    def lie(gm, ctx):
        _halve(gm)
        return 0

    @graph_pass(phase="joint")
    def look_again(gm, ctx):
        return look(gm, ctx)

    Runner(Pipeline([look_first, lie, look_again]), verify=False).run(_graph(), PassContext(Phase.JOINT))
    assert [len(nodes) for nodes in seen] == [4, 3]


def test_a_reported_change_counts_though_no_node_shows_it():
    gm, asked = _graph(), []
    analysis = _count(asked)

    @graph_pass(phase="joint")
    def tag(gm, ctx):
        ctx.analyses.get(analysis, gm)
        next(iter(gm.graph.nodes)).meta["tag"] = 1
        return 1

    @graph_pass(phase="joint")
    def look(gm, ctx):
        ctx.analyses.get(analysis, gm)
        return 0

    Runner(Pipeline([tag, look])).run(gm, PassContext(Phase.JOINT))
    assert len(asked) == 2


def test_what_is_known_lets_go_of_graphs():
    gm, known = _graph(), Analyses()
    known.memory(gm)
    known.get(invariants.observe, gm)
    gone = weakref.ref(gm)
    known.clear()
    del gm
    gc.collect()
    assert gone() is None


def test_a_compile_asks_nothing_twice(fake_ranks, monkeypatch):
    """The complete pipeline, with a memory limit and all checks, computes each analysis once."""
    asked, kept = [], []

    def counted(function, version_of):
        def analysis(subject, *args, **how):
            nodes = version_of(subject)
            kept.append(nodes)  # lest another gets an id that is taken
            key = tuple(
                (id(node), id(node.args), id(node.meta.get("val")), str(node.meta.get("recompute"))) for node in nodes
            )
            asked.append((function.__name__, key, repr(sorted(how.items(), key=str))))
            return function(subject, *args, **how)

        return analysis

    for owner, name, version_of in (
        (module, "simulate", lambda gm: list(gm.graph.nodes)),
        (module, "predict", list),
        (invariants, "observe", lambda gm: list(gm.graph.nodes)),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), version_of))
    torch._dynamo.reset()
    config = GPTConfig(vocab=64, width=32, heads=2, layers=2)
    model = dsgraph.partition(GPT(config), stage=3, keep_whole_below=64, blocks="none")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": 10**6})
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    compiled(tokens, tokens)
    assert {name for name, *_ in asked} == {"simulate", "predict", "observe"}
    again = [name for number, (name, *_) in enumerate(asked) if asked[number] in asked[:number]]
    assert not again
