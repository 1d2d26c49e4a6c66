from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.models import build, tokens

pytestmark = pytest.mark.slow
aten = torch.ops.aten
PHASES = ("capture", "joint", "forward", "backward")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DSGRAPH_BISECT", str(tmp_path))
    torch._dynamo.reset()
    return tmp_path


def _results(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    paths = sorted((folder / f"rank{rank}").glob("graph*.json"))
    return [json.loads(path.read_text()) for path in paths]


class Net(nn.Module):
    """Two layers, each on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h).square().mean()


def _scale_after(gm: torch.fx.GraphModule, pick: Callable[[torch.fx.Node], bool], factor: float) -> int:
    """Multiplies the first node that `pick` likes; the pass of a bad day."""
    node = next(filter(pick, gm.graph.nodes))
    with gm.graph.inserting_after(node):
        scaled = gm.graph.call_function(aten.mul.Tensor if "val" in node.meta else operator.mul, (node, factor))
    scaled.meta.update(node.meta)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return 1


def _is_layer(node: torch.fx.Node) -> bool:
    return any(name in str(node.target) for name in ("addmm", "linear", "aten.mm.default"))


def _wrong(phase: str, factor: float = 1.01) -> dsgraph.GraphPass:
    @dsgraph.graph_pass(phase=phase)
    def scale_a_layer(gm, ctx):
        return _scale_after(gm, _is_layer, factor)

    return scale_a_layer


@dsgraph.graph_pass(phase="joint")
def rename_nothing(gm, ctx):
    return 0


@pytest.mark.parametrize("phase", PHASES)
def test_a_wrong_pass_of_each_phase_is_found_with_its_node(folder, phase):
    model, x = Net(), torch.randn(3, 4)
    passes = [rename_nothing, _wrong(phase)]
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": passes})
    compiled(x).backward()

    (result,) = _results(folder)
    first, states = result["first"], {step["pass"]: step["state"] for step in result["steps"]}
    assert (first["pass"], first["phase"]) == ("scale_a_layer", phase)
    assert states["scale_a_layer"] == "off"
    assert states.get("rename_nothing", "ok") == "ok"
    node = first["node"]
    assert node["graph"] == ("backward" if phase == "backward" else "forward")
    assert [made["op"] for made in node["made"]] == ["aten.mul.Tensor"]
    assert node["made"][0]["arguments"].endswith(", 1.01")
    where, code = node["where"], node["code"]
    line = "return self.last(h).square().mean()" if phase == "backward" else "h = torch.tanh(self.first(x))"
    assert code == line
    path, _, number = where.rpartition(":")
    assert Path(path).name == "test_bisection.py"
    assert Path(__file__).read_text().splitlines()[int(number) - 1].strip() == line
    largest = {off["what"]: off["largest"] for off in result["steps"][-1]["off"]}
    assert all(value > 1e-5 for value in largest.values())
    assert ("output 0" in largest) == (phase != "backward")


def test_the_program_goes_on_with_what_is_right(folder):
    model, alone = Net(), Net()
    alone.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": [_wrong("joint", 2.0)]})
    for _ in range(2):
        x = torch.randn(3, 4)
        loss, expected = compiled(x), alone(x)
        loss.backward(), expected.backward()
        assert torch.equal(loss, expected)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    assert _results(folder)[0]["first"] is not None


def test_an_argument_that_a_pass_changes_is_shown(folder):
    @dsgraph.graph_pass(phase="forward")
    def cube(gm, ctx):
        (power,) = gm.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
        power.args = (power.args[0], 3)
        return 1

    compiled = torch.compile(Net(), backend="dsgraph", options={"codegen": "eager", "pipeline": [cube]})
    compiled(torch.randn(3, 4))
    node = _results(folder)[0]["first"]["node"]
    assert node["op"] == "aten.pow.Tensor_Scalar"
    assert [text.rpartition(", ")[2] for text in node["arguments"]] == ["2", "3"]
    assert node["made"] == []


def test_another_output_is_found_where_all_nodes_are_right(folder):
    @dsgraph.graph_pass(phase="forward")
    def hand_out_more(gm, ctx):
        return _scale_after(gm, lambda node: node.target is aten.mean.default, 1.5)

    compiled = torch.compile(Net(), backend="dsgraph", options={"codegen": "eager", "pipeline": [hand_out_more]})
    with torch.no_grad():
        compiled(torch.randn(3, 4))
    compiled(torch.randn(3, 4)).backward()
    results = _results(folder)
    assert [result["training"] for result in results] == [False, True]
    for result in results:
        node = result["first"]["node"]
        assert node["node"] == "output"
        assert node["code"] == "return self.last(h).square().mean()"
        assert [made["op"] for made in node["made"]] == ["aten.mul.Tensor"]


def test_right_passes_are_right_with_random_numbers_and_buffers(folder):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.drop(self.norm(self.layer(x))) * self.calls

    model, alone, x = Noisy(), Noisy(), torch.randn(6, 4)
    alone.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": [rename_nothing]})
    torch.manual_seed(0)
    outputs = [compiled(x), compiled(x), torch.rand(3)]
    torch.manual_seed(0)
    expected = [alone(x), alone(x), torch.rand(3)]
    for mine, theirs in zip([*outputs, *model.buffers()], [*expected, *alone.buffers()], strict=True):
        torch.testing.assert_close(mine, theirs)
    (result,) = _results(folder)
    assert result["first"] is None
    assert [step["state"] for step in result["steps"]] == ["ok"]


def test_a_wrong_buffer_is_found(folder):
    @dsgraph.graph_pass(phase="forward")
    def count_twice(gm, ctx):
        return _scale_after(gm, lambda node: node.target is aten.add.Tensor and node.args[1] == 1, 2.0)

    model = nn.BatchNorm1d(4)
    torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": [count_twice]})(torch.randn(6, 4))
    (result,) = _results(folder)
    assert [off["what"] for off in result["steps"][0]["off"]] == ["num_batches_tracked as the graph leaves it"]
    assert model.num_batches_tracked == 1


def test_a_pass_that_fails_is_named_and_those_after_it_are_not_tried(folder):
    @dsgraph.graph_pass(phase="joint")
    def explode(gm, ctx):
        raise ValueError("no such node")

    passes = [rename_nothing, explode, _wrong("forward")]
    torch.compile(Net(), backend="dsgraph", options={"codegen": "eager", "pipeline": passes})(torch.randn(3, 4))
    (result,) = _results(folder)
    assert [(step["pass"], step["state"]) for step in result["steps"]] == [
        ("rename_nothing", "ok"),
        ("explode", "failed"),
    ]
    assert "pass explode (joint graph) failed: ValueError: no such node" in result["steps"][1]["problem"]
    assert result["first"]["pass"] == "explode"


def test_graphs_on_both_sides_of_a_graph_break_are_compared_each(folder, one_rank):
    model = dsgraph.partition(build("graph_break"), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": [_wrong("backward")]})
    compiled(*tokens(0, 0)).backward()
    results = _results(folder)
    assert [result["graph"] for result in results] == [1, 2]
    assert [result["first"]["pass"] for result in results] == ["scale_a_layer"] * 2
    # The first graph hands its output on, and is compared with gradients of its own making.
    assert "gradient of embedding.weight" in [off["what"] for off in results[0]["steps"][-1]["off"]]


def test_a_program_that_never_gives_the_same_twice_is_told_apart(folder):
    counter = iter(range(100))

    @torch.library.custom_op("dsgraph_tests::count", mutates_args=())
    def count(x: Tensor) -> Tensor:
        return x + next(counter)

    count.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: count(x) * 2, backend="dsgraph", options={"codegen": "eager"})
    compiled(torch.randn(3))
    (result,) = _results(folder)
    assert result["unrepeatable"]


@pytest.mark.inductor
def test_what_only_inductor_makes_wrong_is_laid_to_it(folder):
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Scale(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            _scale_after(graph.owning_module, lambda node: node.target is aten.tanh.default, 1.01)

        def uuid(self) -> None:
            return None

    options = {"pipeline": [rename_nothing], "inductor": {"post_grad_custom_pre_pass": Scale()}}
    with torch.no_grad():
        torch.compile(Net(), backend="dsgraph", options=options)(torch.randn(3, 4))
    (result,) = _results(folder)
    assert [(step["pass"], step["state"]) for step in result["steps"]] == [
        ("rename_nothing", "ok"),
        ("inductor", "off"),
    ]
    assert result["first"] == {
        "pass": "inductor",
        "phase": "codegen",
        "codegen": "inductor",
        "ranks": [0],
        "node": None,
    }


@pytest.mark.inductor
def test_inductor_draws_the_random_numbers_of_the_reference(folder):
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    torch.compile(model, backend="dsgraph")(torch.randn(3, 4)).sum().backward()
    (result,) = _results(folder)
    assert [(step["pass"], step["state"]) for step in result["steps"]] == [
        ("slice_tensors", "ok"),
        ("substitute_kernels", "ok"),
        ("inductor", "ok"),
    ]


def _train(folder: str, pipeline: dsgraph.Pipeline, name: str, **options: Any) -> list[float]:
    os.environ["DSGRAPH_BISECT"] = folder
    try:
        torch.manual_seed(0)
        model = dsgraph.partition(build(name), stage=3, keep_whole_below=0)
        compiled = torch.compile(
            model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline, **options}
        )
        losses = []
        for step in range(2):
            loss = compiled(*tokens(step, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        return losses
    finally:
        del os.environ["DSGRAPH_BISECT"]


def _train_with_a_rank_that_is_wrong(folder: str) -> list[float]:
    def scale(gm, ctx):
        return _scale_after(gm, lambda node: "embedding" in str(node.target), 1.0 + dist.get_rank())

    wrong = dsgraph.graph_pass(phase="forward")(scale)
    return _train(folder, dsgraph.default_pipeline() + [wrong], "gpt")


def _train_with_a_rank_that_fails(folder: str) -> list[float]:
    def explode(gm, ctx):
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return 0

    few = dsgraph.Pipeline([InsertZeroCollectives(), dsgraph.graph_pass(phase="forward")(explode)])
    return _train(folder, few, "graph_break")


@pytest.mark.full  # test_pass_combinations has the passes
@pytest.mark.distributed
@pytest.mark.parametrize("name", (pytest.param("dropout", marks=pytest.mark.full), "graph_break"))
def test_the_default_passes_are_right_on_two_ranks(ranks, tmp_path, name):
    ranks(2).run(_train, str(tmp_path), dsgraph.default_pipeline(), name)
    for rank in range(2):
        results = _results(tmp_path, rank)
        assert len(results) == (2 if name == "graph_break" else 1)
        for result in results:
            assert result["first"] is None
            expected = [
                item.name for item in dsgraph.default_pipeline() if "_slices" not in item.name
            ]  # nothing is sliced
            assert [step["pass"] for step in result["steps"]] == expected


@pytest.mark.full  # the next one stops ranks together as well
@pytest.mark.distributed
def test_ranks_stop_together_where_one_is_wrong(ranks, tmp_path):
    ranks(2).run(_train_with_a_rank_that_is_wrong, str(tmp_path))
    for rank in range(2):
        (result,) = _results(tmp_path, rank)
        assert result["first"]["pass"] == "scale"
        assert result["first"]["ranks"] in ([1], [0, 1])  # gradients are sums over both
        assert 1 in result["first"]["ranks"]
    assert _results(tmp_path, 1)[0]["first"]["node"]["made"][0]["op"] == "aten.mul.Tensor"


@pytest.mark.distributed
def test_a_pass_that_fails_on_one_rank_is_run_on_none(ranks, tmp_path):
    ranks(2).run(_train_with_a_rank_that_fails, str(tmp_path))
    for rank in range(2):
        result, *_ = _results(tmp_path, rank)
        step = next(step for step in result["steps"] if step["pass"] == "explode")
        assert step["state"] == "failed"
        assert "ValueError: only here" in step["problem"]
    assert "on rank 1" in _results(tmp_path, 0)[0]["steps"][-1]["problem"]


def test_nodes_that_were_only_renumbered_are_not_mistaken(folder):
    @dsgraph.graph_pass(phase="capture")
    def rewrite(gm, ctx):
        first, *_, last = (node for node in gm.graph.nodes if node.target is operator.mul)
        with gm.graph.inserting_before(first):
            same = gm.graph.call_function(operator.mul, (first.args[0], 1.0))  # right, and shifts all later numbers
        first.replace_input_with(first.args[0], same)
        last.args = (last.args[0], 7.0)
        return 2

    def f(x: Tensor) -> Tensor:
        x = x * 2.0
        x = x.sin() * 3.0
        x = x.cos() * 4.0
        return x * 5.0

    compiled = torch.compile(f, backend="dsgraph", options={"codegen": "eager", "pipeline": [rewrite]})
    compiled(torch.randn(3, requires_grad=True)).sum().backward()
    node = _results(folder)[0]["first"]["node"]
    assert node["code"] == "return x * 5.0"
    assert node["op"] == "aten.mul.Tensor"


def test_parameters_on_disk_are_refused(folder, one_rank, tmp_path):
    offload = {"optimizer": "disk", "parameters": "disk", "folder": str(tmp_path / "state")}
    model = dsgraph.partition(Net(), stage=3, keep_whole_below=0, offload=offload)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    with pytest.raises(dsgraph.OptionError, match="bisect runs a graph several times, and parameters on disk change"):
        compiled(torch.randn(3, 4))
    assert not _results(folder)
