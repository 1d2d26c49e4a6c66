from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import dsgraph
from examples.gpt import GPT, GPTConfig
from tests.models import build, tokens
from tests.names import reported
from tests.pipelines import without_buckets

pytestmark = pytest.mark.slow

EAGER = {"codegen": "eager"}
HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Net(nn.Module):
    """Two matrices, two biases, a scalar and an empty parameter; what happens between the layers is given."""

    def __init__(self, between=torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))
        self._between = between

    def forward(self, x):
        return (self.b(self._between(self.a(x))) * self.scale).sum() + self.none.sum()


def _compiled(model=None, *, stage=3, keep_whole_below=10, **options):
    model = dsgraph.partition(model or Net(), stage=stage, keep_whole_below=keep_whole_below)
    return torch.compile(model, backend="dsgraph", options={**EAGER, **options})


def _line(marker: str) -> int:
    """The line of this file that ends in `# marker`."""
    (number,) = (n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {marker}"))
    return number


# What there is to say of a model that did not get far.


def test_a_plain_model_that_was_never_compiled():
    report = dsgraph.report(nn.Linear(2, 2))
    assert report.status.startswith("not partitioned: call dsgraph.partition")
    assert "nothing was compiled" in str(report)
    assert (report.parameters, report.compiles, report.step.sent_bytes) == ((), (), None)


def test_a_partitioned_model_that_has_not_run(fake_ranks):
    compiled = _compiled()
    assert "has not run yet" in dsgraph.report(compiled).status
    compiled(torch.ones(2, 8))
    report = dsgraph.report(compiled)
    assert report.status == "1 graph compiled"
    assert report.costs == f"defaults: {socket.gethostname()} has no calibration (dsgraph calibrate makes one)"
    assert f"\ncosts: {report.costs}\n" in str(report)


def test_it_takes_modules_only():
    with pytest.raises(dsgraph.PartitionError, match=r"report takes a torch\.nn\.Module, found int"):
        dsgraph.report(3)


# Parameters.


def test_parameters_and_why_they_are_whole(fake_ranks):
    report = dsgraph.report(dsgraph.partition(Net(), stage=3, keep_whole_below=10))
    found = {item.name: item for item in report.parameters}
    weight = found["a.weight"]
    assert (weight.split_over, weight.replicated_because, weight.averaged_over) == ("shard", "", ("shard",))
    assert (weight.bytes_full, weight.bytes_here, weight.bytes_copy) == (16 * 8 * 4, 16 * 8 * 4 // 8, 0)
    assert found["b.bias"].replicated_because == "below keep_whole_below=10"
    assert found["b.bias"].bytes_here == found["b.bias"].bytes_full == 32
    assert found["scale"].replicated_because == "0-dimensional"
    assert found["none"].replicated_because == "empty"
    stage_0 = dsgraph.report(dsgraph.partition(Net(), stage=0))
    assert {item.replicated_because for item in stage_0.parameters} == {"stage 0"}
    stage_1 = dsgraph.report(dsgraph.partition(Net(), stage=1, keep_whole_below=10))
    assert {item.name: item.bytes_copy for item in stage_1.parameters}["a.weight"] == 16 * 8 * 4


# Compiles, passes, bytes.


def test_compiles_and_passes(fake_ranks):
    compiled = _compiled()
    compiled(torch.ones(2, 8)).backward()
    for given in (compiled, compiled._orig_mod):
        (one,) = dsgraph.report(given).compiles
    assert f"{HERE}:" in one.function and one.function.endswith(f"({reported('Net.forward')})")
    assert (one.kind, one.codegen, one.from_cache, one.resumes_at) == ("training", "eager", False, None)
    assert [graph.phase for graph in one.graphs] == ["forward", "backward"]
    by_name = {item.name: item for item in one.passes}
    of_slices = {"lower_forward_slices", "lower_backward_slices"}
    assert set(by_name) == {item.name for item in dsgraph.default_pipeline()} - of_slices
    lowering = by_name["insert_zero_collectives"]
    assert lowering.phase == "joint" and lowering.changed > 0 and lowering.nodes_after != lowering.nodes_before
    assert one.pass_seconds == sum(item.seconds for item in one.passes) > 0


def test_evaluation_is_a_compile_and_no_step(fake_ranks):
    compiled = _compiled()
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    assert [item.kind for item in dsgraph.report(compiled).compiles] == ["inference"]
    assert dsgraph.report(compiled).step.sent_bytes is None
    compiled(torch.ones(2, 8)).backward()
    report = dsgraph.report(compiled)
    assert [item.kind for item in report.compiles] == ["inference", "training"]
    assert [graph.phase for item in report.compiles for graph in item.graphs] == ["forward", "forward", "backward"]
    assert {part.where.split()[0] for part in report.step.parts} == {"forward", "backward"}


def test_bytes_of_a_step(fake_ranks):
    """Stage 3 on eight ranks: 7/8 of each split parameter to gather it, twice but for the last; as much to reduce."""
    compiled = _compiled(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)))
    compiled(torch.ones(2, 8)).sum().backward()
    step, each = dsgraph.report(compiled).step, 16 * 8 * 4 * 7 // 8
    # The backward needs the second weight alone: there is no gradient of x.
    assert step.sent_bytes == 2 * each + 1 * each + 2 * each
    assert (step.accumulated_each_bytes, step.accumulated_once_bytes) == (step.sent_bytes, 0)


def test_a_second_compile_of_the_same_graph_does_not_count_twice(fake_ranks):
    compiled = torch.compile(
        dsgraph.partition(Net(), stage=3, keep_whole_below=10), backend="dsgraph", options=EAGER, dynamic=False
    )
    compiled(torch.ones(2, 8)).backward()
    first = dsgraph.report(compiled)
    compiled(torch.ones(3, 8)).backward()
    second = dsgraph.report(compiled)
    assert len(second.compiles) == 2
    assert second.step.sent_bytes == first.step.sent_bytes > 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


def test_layers_that_share_a_graph_all_count(fake_ranks):
    whole = dsgraph.partition(nn.Sequential(*(Layer() for _ in range(3))), keep_whole_below=0, blocks="none")
    for layer in whole:
        layer.compile(backend="dsgraph", options=EAGER)
    whole(torch.ones(2, 8, requires_grad=True)).sum().backward()
    report = dsgraph.report(whole)
    forward = 3 * (8 * 8 + 8) * 4 * 7 // 8
    assert report.step.sent_bytes == 3 * forward - 3 * (8 * 4 * 7 // 8)  # the bias is not gathered again
    assert sum(part.times for part in report.step.parts) == 3 * 2
    shards = sum(param.to_local().numel() * 4 for param in whole.parameters())
    assert (report.memory.parts["parameters"], report.memory.parts["optimizer state"]) == (shards, 2 * shards)


def test_copies_are_gathered_once_a_step(fake_ranks):
    compiled = _compiled(nn.Linear(8, 16, bias=False), stage=2)
    compiled(torch.ones(2, 8)).sum().backward()
    step, each = dsgraph.report(compiled).step, 16 * 8 * 4 * 7 // 8
    assert step.sent_bytes == 2 * each
    assert (step.accumulated_each_bytes, step.accumulated_once_bytes) == (each, each)


def test_the_report_follows_how_stage_2_accumulates(fake_ranks):
    compiled = _compiled(nn.Linear(8, 16, bias=False), stage=2)
    compiled(torch.ones(2, 8)).sum().backward()
    each = 16 * 8 * 4 * 7 // 8
    assert "with accumulate: 448 B per micro-batch" in str(dsgraph.report(compiled))
    with dsgraph.accumulate(compiled._orig_mod, reduce_once=True):
        compiled(torch.ones(2, 8)).sum().backward()
    report = dsgraph.report(compiled)
    assert report.step.sent_bytes == 2 * each
    assert (report.step.accumulated_each_bytes, report.step.accumulated_once_bytes) == (0, 2 * each + 4 * 2 * 7 // 8)
    assert "with accumulate(reduce_once=True): 0 B per micro-batch and 903 B once per step" in str(report)


def test_accumulation_is_known_once_it_has_run(fake_ranks):
    compiled = _compiled(nn.Linear(8, 16, bias=False), stage=0)
    compiled(torch.ones(2, 8)).sum().backward()
    assert dsgraph.report(compiled).step.accumulated_each_bytes is None
    with dsgraph.accumulate(compiled._orig_mod):
        compiled(torch.ones(2, 8)).sum().backward()
    step, reduced = dsgraph.report(compiled).step, 16 * 8 * 4 * 2 * 7 // 8
    assert step.sent_bytes == reduced
    assert (step.accumulated_each_bytes, step.accumulated_once_bytes) == (0, reduced + 4 * 2 * 7 // 8)
    assert len(dsgraph.report(compiled).compiles) == 2


def test_bytes_for_the_backward(fake_ranks):
    compiled = _compiled(keep_whole_below=100)
    compiled(torch.ones(2, 8)).backward()
    (one,) = dsgraph.report(compiled).compiles
    found, matrix = one.activations, 16 * 8 * 4
    assert (found.kept_parameters, found.kept_parameter_bytes) == (1, matrix), "the last one gathered"
    assert (found.gathered_again, found.gathered_again_bytes) == (0, 0), "the first has no gradient of x to compute"
    assert found.saved == 2 and found.saved_bytes == (2 * 16 + 2 * 8) * 4, "tanh's result, and what scale is applied to"
    compiled(torch.ones(2, 8, requires_grad=True)).backward()
    assert dsgraph.report(compiled).compiles[-1].activations.gathered_again_bytes == matrix


def test_what_buckets_add_is_not_taken_for_recomputed(fake_ranks):
    found = []
    for pipeline in (dsgraph.default_pipeline(), without_buckets()):
        torch._dynamo.reset()
        model = dsgraph.partition(GPT(GPTConfig(vocab=64, width=32, heads=2, layers=1)), stage=3, keep_whole_below=64)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        options = {"codegen": "eager", "pipeline": pipeline}
        torch.compile(model, backend="dsgraph", options=options)(tokens, tokens)
        found.append(dsgraph.report(model).compiles[0].activations)
    assert found[0] == found[1] and found[0].recomputed > 0


def test_recomputed_bytes(fake_ranks):
    compiled = _compiled(Net(lambda h: checkpoint(lambda x: torch.sin(torch.exp(x)), h, use_reentrant=False)))
    compiled(torch.ones(2, 8)).backward()
    assert dsgraph.report(compiled).compiles[0].activations.recomputed_bytes >= 2 * 16 * 4  # exp, for cos
    assert dsgraph.report(compiled).checkpoint_regions == ()


# Graph breaks, recompiles, fallbacks.


def _break(h):
    torch._dynamo.graph_break()  # the break
    return torch.tanh(h)


def test_graph_breaks_have_place_and_reason(fake_ranks):
    compiled = _compiled(Net(_break))
    compiled(torch.ones(2, 8)).backward()
    (found,) = dsgraph.report(compiled).graph_breaks
    assert found.place.endswith(f"{HERE}:{_line('the break')} (_break)")
    assert "graph_break()" in found.reason


class BreaksFirst(Net):
    def forward(self, x):
        torch._dynamo.graph_break()  # the first break
        return super().forward(x)


def test_a_graph_break_with_nothing_ahead_of_it(fake_ranks):
    compiled = _compiled(BreaksFirst())
    compiled(torch.ones(2, 8)).backward()
    (found,) = dsgraph.report(compiled).graph_breaks
    assert found.place.endswith(f"{HERE}:{_line('the first break')} ({reported('BreaksFirst.forward')})")
    assert "graph_break()" in found.reason


class Twice(Net):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        y = y.sin() * 2  # a graph without parameters
        torch._dynamo.graph_break()
        return y + self.scale


def test_a_graph_without_parameters_belongs_to_the_module_that_was_called(fake_ranks):
    compiled = _compiled(Twice())
    compiled(torch.ones(2, 8))
    assert len(dsgraph.report(compiled).compiles) == 3
    assert len(dsgraph.report(compiled).graph_breaks) == 2


def test_a_graph_without_parameters_belongs_where_its_function_does(fake_ranks):
    model = dsgraph.partition(Net(), keep_whole_below=10)

    def loss(x):
        x = x * 2
        torch._dynamo.graph_break()
        y = model(x)
        torch._dynamo.graph_break()
        return y.sin()

    torch.compile(loss, backend="dsgraph", options=EAGER)(torch.ones(2, 8)).backward()
    assert [item.function.rpartition("(")[2] for item in dsgraph.report(model).compiles] == ["loss)"] * 3


def test_recompiles_name_the_guard(fake_ranks):
    model = Net()
    model.factor = 1
    model._between = lambda h: h * model.factor
    compiled = _compiled(model)
    for factor in (1, 2, 3):
        model.factor = factor
        compiled(torch.ones(2, 8))
    found = dsgraph.report(compiled).recompiles
    assert [item.times for item in found] == [2, 3]
    assert "factor == 1" in found[0].reason and found[0].function.endswith(f"({reported('Net.forward')})")


@pytest.mark.covering(1)
@pytest.mark.parametrize(("stage", "reduce_once"), ((0, None), (1, None), (2, True)))
@pytest.mark.parametrize("begins_inside", (False, True))
def test_recompiles_of_accumulate_are_told_in_words(one_rank, stage, reduce_once, begins_inside):
    model = dsgraph.partition(Net(), stage=stage, keep_whole_below=10)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER)
    if not begins_inside:
        compiled(torch.ones(2, 8)).backward()
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        compiled(torch.ones(2, 8)).backward()
    compiled(torch.ones(2, 8)).backward()
    compiled(torch.ones(2, 8)).backward()
    inside = "inside dsgraph.accumulate, where gradients are added up on each rank"
    last = "outside dsgraph.accumulate: the last micro-batch, or a step of one"
    without = "no accumulated gradients: a step without dsgraph.accumulate, after one with it"
    found = [item.reason for item in dsgraph.report(compiled).recompiles]
    assert found == ([last, without] if begins_inside else [inside, last])


def test_eager_reads_are_counted(fake_ranks):
    compiled = _compiled()
    compiled(torch.ones(2, 8)).backward()
    assert dsgraph.report(compiled).fallbacks == (), "a compiled forward reads nothing eagerly"
    assert compiled._orig_mod.a.weight is not None and compiled._orig_mod.a.weight is not None
    (found,) = dsgraph.report(compiled).fallbacks
    assert (found.kind, found.what, found.count) == ("parameter read eagerly", "a.weight", 2)


class Loops(Net):
    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(x)
            torch._dynamo.graph_break()  # in a loop
        return super().forward(x)


def test_functions_that_dynamo_gave_up_on(fake_ranks):
    compiled = _compiled(Loops())
    compiled(torch.ones(2, 8))
    found = [item for item in dsgraph.report(compiled).fallbacks if item.kind == "function runs uncompiled"]
    assert found[0].what == "forward" and f"{HERE}:{_line('in a loop')}" in found[0].place
    assert dsgraph.report(_compiled()).fallbacks == (), "another model"


def test_a_function_around_the_model_that_dynamo_gave_up_on(fake_ranks):
    model = dsgraph.partition(Net(), keep_whole_below=10)

    def steps(x):
        for _ in range(2):
            loss = model(x)
            torch._dynamo.graph_break()
        return loss

    torch.compile(steps, backend="dsgraph", options=EAGER)(torch.ones(2, 8))
    assert "steps" in [item.what for item in dsgraph.report(model).fallbacks]


def test_the_recompile_limit(fake_ranks):
    model = Net()
    model._between = lambda h: h * model.factor
    compiled = torch.compile(dsgraph.partition(model), backend="dsgraph", options=EAGER)
    with torch._dynamo.config.patch(recompile_limit=3):
        for factor in range(5):
            model.factor = factor
            compiled(torch.ones(2, 8))
    (found,) = (item for item in dsgraph.report(model).fallbacks if item.kind == "function runs uncompiled")
    assert found.what == reported("Net.forward") and "recompile limit" in found.reason and "factor == 2" in found.reason


def test_passes_that_switch_caches_off_are_named():
    seen = []

    @dsgraph.graph_pass(phase="forward")
    def nosy(gm, ctx):
        seen.append(gm)
        return 0

    from dsgraph.compiler.codegen import Compilation
    from dsgraph.compiler.options import parse_options
    from dsgraph.passes import CaptureFacts, Pipeline

    compilation = Compilation(parse_options({}, {}), CaptureFacts(), Pipeline([nosy]), mode=None)
    assert compilation.unidentified == ("nosy",)


# Memory.


@pytest.mark.parametrize("stage", (0, pytest.param(1, marks=pytest.mark.full), 3))
def test_the_memory_of_a_step_is_predicted(fake_ranks, stage):
    model = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=100)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER)
    assert dsgraph.report(model).memory is None, "nothing has run"
    with torch.no_grad():
        compiled(*tokens(0, 0))
    assert dsgraph.report(model).memory is None, "nothing has run with gradients"
    compiled(*tokens(0, 0)).backward()
    found = dsgraph.report(model).memory
    shards = sum(param.to_local().numel() * 4 for param in model.parameters())
    gathered_copies = (
        sum(param.numel() * 4 for param in model.parameters() if param.numel() >= 100) if stage == 1 else 0
    )
    assert found.peak == sum(found.parts.values())
    assert found.parts["parameters"] == shards + gathered_copies
    assert found.parts["optimizer state"] == 2 * shards
    assert found.where == f"backward of {reported('GPT.forward')}"
    assert "predicted peak memory of a training step" in str(dsgraph.report(model))


def test_the_memory_limit_is_told_and_whether_it_is_met(fake_ranks):
    model = dsgraph.partition(build("small"), keep_whole_below=100)
    compiled = torch.compile(model, backend="dsgraph", options={**EAGER, "memory_limit": 10**9})
    with torch.no_grad():
        compiled(*tokens(0, 0))
    assert "memory_limit: 1.00 " in str(dsgraph.report(model)), "nothing is predicted yet"
    compiled(*tokens(0, 0)).backward()
    report = dsgraph.report(model)
    assert report.memory_limit == 10**9
    assert "memory_limit: 1.00 GB, met by that prediction" in " ".join(str(report).split())


def test_a_function_that_compiles_again_no_longer_runs_uncompiled(fake_ranks):
    with torch._dynamo.config.patch(recompile_limit=1):
        earlier = torch.compile(
            dsgraph.partition(build("small"), keep_whole_below=100), backend="dsgraph", options=EAGER
        )
        earlier(*tokens(0, 0))
        with torch.no_grad():
            earlier(*tokens(0, 0))
        assert "function runs uncompiled" in [item.kind for item in dsgraph.report(earlier).fallbacks]
    torch._dynamo.reset()
    model = dsgraph.partition(build("small"), keep_whole_below=100)
    torch.compile(model, backend="dsgraph", options={**EAGER, "memory_limit": 10**9})(*tokens(0, 0)).backward()
    report = dsgraph.report(model)
    assert not report.limit_gaps and "function runs uncompiled" not in [item.kind for item in report.fallbacks]


def test_what_ran_uncompiled_before_torch_was_reset_is_no_longer_told(fake_ranks):
    with torch._dynamo.config.patch(recompile_limit=1):
        earlier = dsgraph.partition(build("gpt"), keep_whole_below=100)
        logits = torch.compile(earlier.logits, backend="dsgraph", options=EAGER)
        logits(tokens(0, 0)[0])
        with torch.no_grad():
            logits(tokens(0, 0)[0])
        assert reported("GPT.logits") in [item.what for item in dsgraph.report(earlier).fallbacks]
    torch._dynamo.reset()
    model = dsgraph.partition(build("gpt"), keep_whole_below=100)
    torch.compile(model, backend="dsgraph", options=EAGER)(*tokens(0, 0)).backward()
    assert reported("GPT.logits") not in [item.what for item in dsgraph.report(model).fallbacks]


# Near misses and checkpoint regions.


def test_notes_of_passes_are_near_misses(fake_ranks):
    compiled = _compiled(nn.Linear(8, 16))  # no loss at its end
    compiled(torch.ones(2, 8, requires_grad=True)).sum().backward()
    notes = [item.note for item in dsgraph.report(compiled).near_misses if item.pass_name == "keep_last_gather"]
    assert notes == [
        "parameter bias is not kept for the backward: no differentiated output is a scalar, such as a loss"
    ]
    number = dsgraph.report(compiled).compiles[0].number
    assert all(item.compiles == (number,) for item in dsgraph.report(compiled).near_misses)
    assert f"- compile {number}, joint, keep_last_gather: parameter bias" in str(dsgraph.report(compiled))
    with_loss = _compiled()
    with_loss(torch.ones(2, 8)).backward()
    assert "keep_last_gather" not in {item.pass_name for item in dsgraph.report(with_loss).near_misses}


@dsgraph.graph_pass(phase="joint")
def keep_exp(gm, ctx):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return 0


def _with_region():
    return Net(lambda h: checkpoint(lambda x: torch.sin(torch.exp(x)), h, use_reentrant=False))  # exp


def test_values_that_are_kept_in_spite_of_their_region(fake_ranks):
    compiled = _compiled(_with_region(), pipeline=dsgraph.default_pipeline() + [keep_exp])
    compiled(torch.ones(2, 8)).backward()
    (found,) = dsgraph.report(compiled).checkpoint_regions
    assert f"{HERE}:{_line('exp')}" in found.place and found.saved_bytes == 2 * 16 * 4


def test_checkpoint_regions_that_run_eagerly(fake_ranks):
    compiled = _compiled(Net(lambda h: checkpoint(_break, h, use_reentrant=False)))  # the region
    compiled(torch.ones(2, 8)).backward()
    (found,) = dsgraph.report(compiled).checkpoint_regions
    assert f"{HERE}:{_line('the region')}" in found.place and "runs eagerly" in found.problem


# The object.


def test_it_fits_the_screen_and_json(fake_ranks):
    compiled = _compiled(build("graph_break"), stage=3, keep_whole_below=20)
    compiled(*tokens(0, 0)).backward()
    with torch.no_grad():
        compiled(*tokens(0, 0))
    report = dsgraph.report(compiled)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100, [line for line in text.splitlines() if len(line) > 100]
    for section in ("parameters", "compiles", "passes", "a training step", "for the backward", "graph breaks"):
        assert f"\n{section}" in text
    given = report.to_dict()
    assert json.loads(json.dumps(given)) == given
    assert list(given) == [
        *("schema", "model", "status", "stages", "mesh", "costs", "parameters", "compiles", "units", "step"),
        *(
            "memory",
            "memory_unknown",
            "memory_limit",
            "limit_gaps",
            "graph_breaks",
            "recompiles",
            "fallbacks",
            "near_misses",
            "checkpoint_regions",
        ),
    ]


def test_records_go_with_the_model(fake_ranks):
    gc.collect()
    log, before = dsgraph.api.reports.log, len(dsgraph.api.reports.log)
    compiled = _compiled(Twice())
    compiled(torch.ones(2, 8))
    assert len(log) == before + 3
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(log) == before


def test_models_do_not_mix(fake_ranks):
    one, other = _compiled(), _compiled(Net(torch.sin))
    one(torch.ones(2, 8)), other(torch.ones(2, 8))
    assert [len(dsgraph.report(model).compiles) for model in (one, other)] == [1, 1]
    assert dsgraph.report(one).compiles[0].number != dsgraph.report(other).compiles[0].number


# With Inductor.

OP = """
import torch

@torch.library.custom_op("report_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.register_fake(torch.empty_like)
"""

FALLBACK = """
seen = []
@dsgraph.graph_pass(phase="forward")
def nosy(gm, ctx):
    seen.append(1)
    return 0

double.register_autograd(lambda ctx, grad: grad * 2)
model = dsgraph.partition(torch.nn.Linear(4, 4), keep_whole_below=0)
function = torch.compile(lambda x: double(model(x)), backend="dsgraph", options={OPTIONS})
function(torch.ones(2, 4)).sum().backward()
print(json.dumps(dsgraph.report(model).to_dict()))
"""

START = """
import json, torch, torch.distributed as dist
import dsgraph
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def _run(script: str, cache: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full  # by Inductor, three programs
@pytest.mark.inductor
def test_ops_without_a_lowering_and_caches_that_are_off(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(START + OP + FALLBACK.replace("{OPTIONS}", '{"pipeline": dsgraph.default_pipeline() + [nosy]}'))
    done = _run(f"exec(open({str(script)!r}).read())", tmp_path)
    assert done.returncode == 0, done.stderr
    found = {(item["kind"], item["what"]): item for item in json.loads(done.stdout)["fallbacks"]}
    assert found["op without lowering", "report_test::double"]["count"] == 1
    assert ("caches off", "nosy") in found
    script.write_text(START + OP + FALLBACK.replace("{OPTIONS}", '{"strict": True}'))
    done = _run(f"exec(open({str(script)!r}).read())", tmp_path)
    assert "StrictError: strict: Inductor has no lowering of report_test::double (1 calls" in done.stderr


@pytest.mark.full  # by Inductor, twice
@pytest.mark.inductor
def test_a_graph_from_the_cache_says_so(tmp_path):
    script = (
        START
        + """
torch.manual_seed(0)
model = dsgraph.partition(torch.nn.Linear(4, 4), keep_whole_below=0)
torch.compile(model, backend="dsgraph")(torch.ones(2, 4)).sum().backward()
print(json.dumps(dsgraph.report(model).to_dict()))
"""
    )
    first, second = (_run(script, tmp_path) for _ in range(2))
    assert second.returncode == 0, second.stderr
    (cold,), (warm,) = (json.loads(done.stdout)["compiles"] for done in (first, second))
    assert not cold["from_cache"] and len(cold["graphs"]) == 2
    if torch.__version__ < "2.12":  # which hashes DTensors anew in every process
        return
    assert warm["from_cache"] and warm["graphs"] == []
    assert {item["phase"] for item in warm["passes"]} == {"capture"}
    assert json.loads(second.stdout)["step"]["sent_bytes"] is None


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 3])
def test_another_batch_size_recompiles_once_and_is_reported(fake_ranks, tmp_path, stage):
    model = dsgraph.partition(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), stage=stage, keep_whole_below=1
    )
    backend = dsgraph.api.new_backend()
    compiled = torch.compile(model, backend=backend, options={**EAGER, "dump": tmp_path})
    for rows in (16, 8, 24):
        compiled(torch.ones(rows, 8)).sum().backward()
    assert {path.name for path in (tmp_path / "rank0").iterdir()} == {"compile1", "compile2"}


def test_the_memory_of_a_step_with_sizes_that_vary_is_that_of_the_batch_at_hand(fake_ranks):
    compiled = _compiled(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), stage=1)
    x = torch.ones(64, 8)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x).sum().backward()
    found = dsgraph.report(compiled).memory
    assert found.peak == sum(found.parts.values()) > 64 * 16 * 4
