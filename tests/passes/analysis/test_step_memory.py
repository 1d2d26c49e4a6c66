from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.passes import GraphPass, ParameterSpec, PassContext, PassResult, Phase
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.pair_memory import PairMemory, pair_memory
from dsgraph.passes.analysis.step_memory import PARTS, simulate_step
from tests.passes.tracing import trace

F32 = 4  # bytes
X = 4 * 32 * F32  # bytes of the batch, [4, 32]
Y = 4 * 16 * F32  # bytes of an activation, [4, 16]
W = 32 * 16 * F32  # bytes of a weight


def pair(*, name="w", requires_grad=True, saves=True, reads_again=True):
    """y = relu(x @ w), of which the result is saved."""
    x, w, y, dy = torch.randn(4, 32), torch.randn(32, 16), torch.randn(4, 16), torch.randn(4, 16)
    forward = simulate(trace(lambda x, w: torch.relu(torch.mm(x, w)), x, w), owned=["x_1", "w_1"])
    gm = trace(lambda x, relu, dy: torch.mm(x.t(), dy * relu), x, y, dy)
    (saved,) = [node for node in gm.graph.nodes if node.name == "relu_1"]
    saved.name = "relu"  # as the partitioner names it
    backward = simulate(gm, owned=["x_1"])
    return PairMemory(
        forward=forward,
        backward=backward,
        params={"w_1": ParameterSpec(name, (64, 16), (32, 16), torch.float32, "0", requires_grad)},
        gathered_copies={},
        gradients={name: "mm"} if requires_grad else {},
        saved=frozenset(["relu"] if saves else []),
        read_again=frozenset(["x_1"] if reads_again else []),
        outputs=frozenset(["relu"]),
        copy_bytes={},
    )


def parts(phase):
    return {part: size for part, size in phase.composition.items() if size}


def phases(pairs, **options):
    return {phase.name: phase for phase in simulate_step(pairs, **options).phases}


def test_a_step_of_one_graph():
    step = simulate_step([pair()])
    refresh, forward, backward, optimizer = step.phases
    assert [phase.name for phase in step.phases] == ["refresh", "forward 0", "backward 0", "optimizer"]
    held = {"parameters": W, "optimizer state": 2 * W}
    assert parts(refresh) == {**held, "other": X}  # the batch
    assert parts(forward) == {**held, "other": X + Y, "saved for backward": Y} and forward.node == "relu"
    assert parts(backward) == {**held, "gradients": W, "other": X + Y} and backward.node == "mm"
    assert parts(optimizer) == {**held, "gradients": W, "other": X}
    assert step.peak == backward.bytes == 4 * W + X + Y and step.at_peak is backward
    assert list(backward.composition) == list(PARTS)


def test_what_is_saved_counts_until_it_is_read():
    small = pair()
    backward = simulate(trace(lambda x: x.sin().sum(), torch.randn(4, 16)))
    at = phases([replace(small, backward=backward, gradients={}), pair(name="b")])
    assert parts(at["backward 1"])["saved for backward"] == Y  # of the first graph; its own has been read
    assert parts(at["forward 1"])["saved for backward"] == 2 * Y


def test_optimizers_frozen_parameters_and_whatever_else_is_held():
    step = simulate_step([pair()], optimizer_state=1, other_bytes=1000)
    assert parts(step.phases[-1]) == {"parameters": W, "optimizer state": W, "gradients": W, "other": X + 1000}
    step = simulate_step([pair(requires_grad=False)])
    assert parts(step.phases[-1]) == {"parameters": W, "other": X}


def test_outputs_that_the_caller_holds():
    small = pair(saves=False)
    size = small.forward.bytes_of(small.outputs - small.saved)
    assert size, "the pair returns a value that it does not save"
    dropped, held = phases([small]), phases([small], keeps_outputs=True)
    for name in ("forward 0", "backward 0"):  # those of the step before, and its own
        assert held[name].bytes == dropped[name].bytes + size


def test_parameters_that_no_graph_reads_are_held_all_the_same():
    info = replace(next(iter(pair().params.values())), name="unread")
    step = simulate_step([replace(pair(), unread=(info,), unread_copies=100)])
    assert parts(step.phases[-1]) == {"parameters": 2 * W + 100, "optimizer state": 4 * W, "gradients": W, "other": X}


def as_wide_as_its_output(memory):
    """The same pair, had its input the size of its output."""
    pieces = tuple(replace(piece, bytes=Y) if piece.node == "x_1" else piece for piece in memory.forward.pieces)
    return replace(memory, forward=replace(memory.forward, pieces=pieces))


def test_graphs_hand_over_what_they_return():
    at = phases([pair(name="a"), as_wide_as_its_output(pair(name="b"))])
    assert list(at) == ["refresh", "forward 0", "forward 1", "backward 1", "backward 0", "optimizer"]
    assert parts(at["refresh"])["other"] == X  # the second graph's input is the first one's output
    assert parts(at["backward 1"])["gradients"] == W
    assert parts(at["backward 0"])["gradients"] == parts(at["optimizer"])["gradients"] == 2 * W


def test_what_a_later_graph_reads_again_stays_until_its_backward():
    first = pair(name="a", saves=False)
    kept = phases([first, as_wide_as_its_output(pair(name="b"))])
    dropped = phases([first, as_wide_as_its_output(pair(name="b", reads_again=False))])
    assert kept["forward 1"].bytes == dropped["forward 1"].bytes
    assert kept["backward 1"].bytes == dropped["backward 1"].bytes + Y
    assert kept["backward 0"].bytes == dropped["backward 0"].bytes


def test_a_parameter_of_two_graphs_has_one_gradient():
    step = simulate_step([pair(), pair()])
    assert parts(step.phases[-1]) == {"parameters": W, "optimizer state": 2 * W, "gradients": W, "other": 2 * X}


def test_a_gradient_is_added_to_one_that_lies_in_a_bucket():
    in_bucket = replace(pair(), gradients={"a": "mm", "w": "mm"})  # its backward runs first
    assert parts(phases([pair(), in_bucket])["optimizer"])["gradients"] == W


def test_an_output_is_taken_once():
    pairs = [pair(), as_wide_as_its_output(pair()), as_wide_as_its_output(pair())]
    assert parts(phases(pairs)["refresh"])["other"] == X
    pairs[1] = replace(pairs[1], outputs=frozenset())
    assert parts(phases(pairs)["refresh"])["other"] == X + Y


def test_outputs_that_the_program_keeps():
    dropped, kept = (phases([pair(saves=False)], keeps_outputs=keeps) for keeps in (False, True))
    assert kept["backward 0"].bytes == dropped["backward 0"].bytes + Y


@dataclass(frozen=True)
class Record(GraphPass):
    found: list = field(default_factory=list)
    phase = Phase.FORWARD

    def run(self, gm, ctx):
        self.found.append((gm, ctx))
        return PassResult()


@dataclass(frozen=True)
class RecordBackward(Record):
    phase = Phase.BACKWARD


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 60, bias=False), nn.Linear(60, 8)
        self.register_buffer("scale", torch.ones(500))

    def forward(self, x):
        return (self.down(torch.relu(self.up(x))) * self.scale[:8]).sum()


class Dropping(nn.Module):
    """A dropout in a checkpoint region, which the backward repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 60)

    def forward(self, x):
        return checkpoint(lambda x: F.dropout(self.layer(x)).square(), x, use_reentrant=False).sum()


def recorded(stage, batch, model=Model):
    """Return what the passes of a compiled model's forward and backward saw."""
    forward, backward = Record(), RecordBackward()
    model = dsgraph.partition(model(), stage=stage, keep_whole_below=12)
    pipeline = dsgraph.default_pipeline() + [forward, backward]
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})
    compiled(batch).backward()
    ((before, ctx),), ((after, _),) = forward.found, backward.found
    return before, after, ctx


UP, DOWN, BIAS = 60 * 8 * F32, 8 * 60 * F32, 8 * F32


def shards(world):
    return -(-60 // world) * 8 * F32 + 60 * F32 + BIAS  # this is the first of eight ranks; the bias is whole


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_pairs_are_read_off_compiled_graphs(fake_ranks, stage):
    before, after, ctx = recorded(stage, torch.randn(4, 8))
    found = pair_memory(before, after, params=ctx.params, roles=ctx.roles, axes=ctx.axes)
    assert {info.name for info in found.params.values()} == {"up.weight", "down.weight", "down.bias"}
    assert sorted(found.gathered_copies.values()) == (["down.weight", "up.weight"] if stage == 1 else [])
    assert found.gradients.keys() == {"up.weight", "down.weight", "down.bias"}
    padded = 64 * 8 * F32  # 60 rows do not divide by eight
    assert sorted(found.copy_bytes.values()) == ([DOWN, padded] if stage == 1 else [])
    assert found.forward.bytes_of(found.outputs) == F32
    step = simulate_step([found])
    optimizer = step.phases[-1].composition
    held = UP + DOWN + BIAS if stage == 0 else shards(fake_ranks)
    assert optimizer["parameters"] == held + (padded + DOWN if stage == 1 else 0)
    assert optimizer["optimizer state"] == 2 * held
    batch_and_buffer = 4 * 8 * F32 + 500 * F32
    assert optimizer["other"] == batch_and_buffer


def test_a_repeated_dropout_saves_its_state_and_has_results_of_its_own(fake_ranks):
    before, after, ctx = recorded(3, torch.randn(64, 8), Dropping)
    found = pair_memory(before, after, params=ctx.params, roles=ctx.roles, axes=ctx.axes)
    state, dropped, mask = torch.get_rng_state().nbytes, 64 * 60 * F32, 64 * 60
    assert found.forward.bytes_of(found.outputs) == F32
    assert "run_and_save_rng_state" in found.saved
    assert found.forward.bytes_of(["run_and_save_rng_state"]) == state
    pieces = {name: piece.bytes for name, piece in found.backward.by_name.items() if "run_with_rng_state" in name}
    scratch = pieces.pop("run_with_rng_state:inside")
    assert pieces == {"run_with_rng_state": dropped, "run_with_rng_state:1": mask}
    assert scratch >= dropped + state  # the mask as floats, and the generator's own state, which is restored


def test_inference_has_no_backward(fake_ranks):
    forward = Record()
    model = dsgraph.partition(Model(), stage=3, keep_whole_below=12)
    pipeline = dsgraph.default_pipeline() + [forward]
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    ((gm, ctx),) = forward.found
    assert isinstance(ctx, PassContext)
    step = simulate_step([pair_memory(gm, None, params=ctx.params, roles=ctx.roles, axes=ctx.axes)], optimizer_state=0)
    assert [phase.name for phase in step.phases] == ["refresh", "forward 0", "optimizer"]
    assert step.at_peak.name == "forward 0" and step.at_peak.composition["communication"] > 0


def test_dynamic_sizes_count_as_those_of_the_first_run(fake_ranks):
    batch = torch.randn(12, 8)
    torch._dynamo.mark_dynamic(batch, 0)
    before, after, ctx = recorded(3, batch)
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in before.graph.nodes)
    step = simulate_step([pair_memory(before, after, params=ctx.params, roles=ctx.roles, axes=ctx.axes)])
    assert step.phases[-1].composition["other"] == 12 * 8 * F32 + 500 * F32
