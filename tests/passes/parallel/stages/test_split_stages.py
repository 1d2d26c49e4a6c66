"""`SplitStages`: balance, least bytes, legal places, named points; and the graphs that are cut so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsgraph.parallel.pipeline.captured_model import CapturedModel, capture_model
from dsgraph.parallel.pipeline.model_copy import without_values
from dsgraph.passes.errors import PassError
from dsgraph.passes.parallel.stages.split_stages import SplitStages
from dsgraph.passes.parallel.stages.stage_graphs import return_only, stage_graphs
from examples.gpt import GPT, GPTConfig
from tests.passes.tracing import trace

CPU = torch.device("cpu")


class Wide(nn.Module):
    """Equal costs; the value in the middle of each block is wide."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.repeat(1, 50).sin()
            x = x[:, :4].cos()
        return x


def _captured(model: nn.Module, *args: Tensor) -> CapturedModel:
    return capture_model(model, args, kwargs={}, device=CPU)


def _uniform(captured: CapturedModel) -> dict[torch.fx.Node, float]:
    return {node: 1.0 for node in captured.graph_module.graph.nodes if node.op.startswith("call")}


def test_fewest_bytes_within_the_slack():
    captured = _captured(Wide(), torch.ones(2, 4))
    graph = captured.graph_module.graph
    plan = SplitStages(3).plan(graph, _uniform(captured))
    assert plan.costs == (4.0, 4.0, 4.0)
    assert plan.cut_bytes == (32, 32)


def test_the_bottleneck_comes_before_the_bytes():
    captured = _captured(Wide(), torch.ones(2, 4))
    costs = {node: 100.0 if node.target == "sin" else 1.0 for node in captured.graph_module.graph.nodes}
    heavy = [node for node in costs if costs[node] == 100.0]
    plan = SplitStages(3).plan(captured.graph_module.graph, costs)
    assert [sum(node in stage for node in heavy) for stage in plan.stages] == [1, 1, 1]


def test_a_slow_link_moves_the_cuts_to_where_less_crosses():
    captured = _captured(Wide(), torch.ones(2, 4))
    graph = captured.graph_module.graph
    costs = dict.fromkeys(graph.nodes, 1.0)
    for name in ("repeat", "sin"):  # between these two of the last block 1,600 bytes cross
        costs[[node for node in graph.nodes if node.target == name][-1]] = 200.0
    even = SplitStages(2).plan(graph, costs)
    assert even.cut_bytes == (1600,)
    assert SplitStages(2, seconds_per_byte=1.0).plan(graph, costs).cut_bytes == (32,)


class Illegal(nn.Module):
    """Two places where a cut would be wrong: between a tuple and its items, and before a write to what was read."""

    def forward(self, x: Tensor) -> Tensor:
        values, places = x.max(1)
        y = values.sin()
        z = y.cos()
        y.add_(1.0)
        return z + y + places


def test_illegal_places_are_not_cut():
    captured = _captured(Illegal(), torch.ones(2, 4))
    graph = captured.graph_module.graph
    names = [node.name for node in graph.nodes if node.op.startswith("call")]
    found = set()
    for heavy in names:
        costs = {node: 100.0 if node.name == heavy else 1.0 for node in graph.nodes}
        found.add(SplitStages(2).plan(graph, costs).stages[1][0].target)
    assert "cos" not in found and "add_" not in found
    assert "sin" in found
    with pytest.raises(PassError, match=r"can be cut at \d places"):
        SplitStages(9).plan(graph, dict.fromkeys(graph.nodes, 1.0))


def test_named_split_points():
    captured = _captured(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.ones(2, 4))
    graph = captured.graph_module.graph
    plan = SplitStages(3, ["1", "5"]).plan(graph, captured.costs)
    assert [len(stage) for stage in plan.stages] == [1, 4, 1]
    with pytest.raises(PassError, match="the forward calls no module 'x'"):
        SplitStages(2, ["x"]).plan(graph, captured.costs)
    with pytest.raises(PassError, match="no stage can begin with '1'"):
        SplitStages(3, ["5", "1"]).plan(graph, captured.costs)
    with pytest.raises(PassError, match="split has 1 names, and 3 stages need 2"):
        SplitStages(3, ["5"]).plan(graph, captured.costs)


@pytest.mark.parametrize("name", ("gpt", pytest.param("llama", marks=pytest.mark.full)))
def test_layers_balance(name):
    tokens = torch.zeros(2, 64, dtype=torch.long)
    kwargs = {}
    with torch.device("meta"):
        if name == "gpt":
            model, args = GPT(GPTConfig(vocab=512, width=256, layers=8)), (tokens, tokens)
        else:
            transformers = pytest.importorskip("transformers")
            sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=8, **sizes))
            args, kwargs = (), {"input_ids": tokens, "labels": tokens, "use_cache": False}
    captured = capture_model(without_values(model, CPU), args, kwargs=kwargs, device=CPU)
    for stages in (2, 4):
        plan = SplitStages(stages).plan(captured.graph_module.graph, captured.costs)
        assert plan.balance <= 1.10
        assert len(set(plan.cut_bytes)) == 1  # between blocks, where all cuts are alike


def test_stages_in_a_row_are_the_graph():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=32, width=16, heads=2, layers=4, tie=True))
    tokens = torch.randint(0, 32, (2, 8))
    captured = _captured(model, tokens, tokens)
    plan = SplitStages(4).plan(captured.graph_module.graph, captured.costs)
    graphs = stage_graphs(captured.graph_module, plan, state=captured.state, results=captured.results)
    values: tuple[Tensor, ...] = ()
    for graph in graphs:
        assert [value.shape for value in values] == [node.meta["val"].shape for node in graph.received]
        values = graph.module(*values, *[tokens for _ in graph.roots])
    assert torch.equal(values[0], model(tokens, tokens))
    held = [name for graph in graphs for name, _ in graph.module.named_parameters()]
    assert set(held) == {name for name, _ in model.named_parameters()}
    assert len(held) == len(set(held)) + 1  # the tied one, in the first stage and in the last


class _Mask(nn.Module):
    """Each layer reads a mask made of the input, under a mode of its own; a part of it runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.teacher = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            mask = (x.cumsum(1) > 0).float() @ torch.ones(4, 4)
        h = x
        for layer in self.layers:
            h = h + layer(h) * mask
        with torch.no_grad():
            target = self.teacher(x)
        return (h - target).square().mean()


def test_masks_are_computed_on_each_stage_and_no_cut_lies_in_a_mode():
    torch.manual_seed(0)
    model, x = _Mask(), torch.randn(2, 4)
    captured = _captured(model, x)
    graph, loss = captured.graph_module.graph, captured.results
    plan = SplitStages(3).plan(graph, _uniform(captured), captured.repeated)
    assert set(plan.cut_bytes) == {32}  # the hidden values alone
    graphs = stage_graphs(captured.graph_module, plan, state=captured.state, results=loss, repeated=captured.repeated)
    values: tuple[Tensor, ...] = ()
    for stage in graphs:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = stage.module(*values, *[x for _ in stage.roots])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(values[0], model(x))
    modes = {"_enter_autocast", "_exit_autocast"}
    assert all(
        modes <= {str(getattr(node.target, "__name__", "")) for node in stage.module.graph.nodes}
        for stage in graphs[:2]
    )


def test_the_slowest_link_leaves_no_stage_without_work():
    captured = _captured(_Mask(), torch.randn(2, 4))
    costs = _uniform(captured)
    plan = SplitStages(2, seconds_per_byte=1e9).plan(captured.graph_module.graph, costs, captured.repeated)
    assert plan.cut_bytes == (32,)
    with pytest.raises(PassError, match=r"no stage can begin with 'layers\.0'"):
        SplitStages(2, ["layers.0"]).plan(captured.graph_module.graph, costs, captured.repeated)


def test_other_results_are_not_gathered_nor_sent():
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.ops.dsgraph.gather_slices(x.sin(), 0, 1, 2, "tp")
        return x.cos().sum(), cache

    gm = trace(run, torch.randn(4, 4))
    (loss, _) = gm.graph.output_node().all_input_nodes
    return_only(gm, [loss])
    assert gm.graph.output_node().all_input_nodes == [loss]
    assert "gather_slices" not in str(gm.graph)
