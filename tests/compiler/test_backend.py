from __future__ import annotations

import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from dsgraph.compiler import build_pipeline as pipeline_module
from dsgraph.compiler.build_pipeline import build_pipeline
from dsgraph.compiler.codegen import Compilation
from dsgraph.compiler.options import parse_options
from dsgraph.passes import CaptureFacts
from dsgraph.tools.cli.main import main
from tests.models import build, tokens

EAGER = {"codegen": "eager"}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def test_a_plain_model_compiles_without_a_process_group():
    model, x = _net(), torch.randn(3, 4)
    expected = model(x)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER, fullgraph=True)
    assert torch.equal(compiled(x), expected)
    compiled(x).sum().backward()
    assert model[0].weight.grad is not None
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)


@pytest.mark.inductor
def test_a_plain_model_compiles_to_what_inductor_makes_of_it():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(3, 4)
    sources = []
    for backend in ("inductor", "dsgraph"):
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            _, code = run_and_get_code(torch.compile(_net(), backend=backend), x)
        sources.append([line for line in "\n".join(code).splitlines() if not line.startswith("# AOT ID")])
    assert sources[0] == sources[1]


def test_a_users_pass_runs_on_a_plain_model():
    @dsgraph.graph_pass(phase="forward")
    def count(gm, ctx):
        seen.append(len(gm.graph.nodes))
        return 0

    seen: list[int] = []
    compiled = torch.compile(_net(), backend="dsgraph", options={**EAGER, "pipeline": [count]})
    compiled(torch.randn(3, 4))
    assert len(seen) == 1


def test_two_models_with_different_options_live_side_by_side():
    seen: list[str] = []

    @dsgraph.graph_pass(phase="forward")
    def first(gm, ctx):
        seen.append("first")
        return 0

    @dsgraph.graph_pass(phase="forward")
    def second(gm, ctx):
        seen.append("second")
        return 0

    one = torch.compile(_net(), backend="dsgraph", options={**EAGER, "pipeline": [first]})
    other = torch.compile(_net(), backend="dsgraph", options={**EAGER, "pipeline": [second]})
    x = torch.randn(3, 4)
    one(x), other(x)
    assert seen == ["first", "second"]


def test_a_failing_pass_is_named(one_rank):
    @dsgraph.graph_pass(phase="joint")
    def explode(gm, ctx):
        raise ValueError("no such node")

    model = dsgraph.partition(build("gpt"), keep_whole_below=0)
    compiled = torch.compile(
        model, backend="dsgraph", options={**EAGER, "pipeline": dsgraph.default_pipeline() + [explode]}
    )
    with pytest.raises(Exception, match=r"pass explode \(joint graph\) failed: ValueError: no such node"):
        compiled(*tokens(0, 0))


@pytest.mark.parametrize("stage", (0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3))
def test_one_rank_matches_the_plain_model(one_rank, stage):
    alone, model = build("tied"), dsgraph.partition(build("tied"), stage=stage, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER, fullgraph=True)
    compiled(*tokens(0, 0)).backward()
    alone(*tokens(0, 0)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("limit", [None, 10**9])
def test_the_memory_limit_reaches_the_passes(one_rank, limit):
    seen = []

    @dsgraph.graph_pass(phase="forward")
    def look(gm, ctx):
        seen.append(ctx.memory_limit)
        return 0

    model = dsgraph.partition(nn.Linear(4, 4), keep_whole_below=0)
    options = {**EAGER, "pipeline": dsgraph.default_pipeline() + look, "memory_limit": limit}
    torch.compile(model, backend="dsgraph", options=options)(torch.randn(2, 4))
    assert set(seen) == {limit}  # a pass may run on a copy as well, to see what a step takes then


def test_a_memory_limit_on_a_model_that_is_not_partitioned_is_refused(one_rank):
    compiled = torch.compile(nn.Linear(4, 4), backend="dsgraph", options={**EAGER, "memory_limit": "1GiB"})
    with pytest.raises(Exception, match="'memory_limit' has no effect on a model that is not partitioned"):
        compiled(torch.randn(2, 4))


def test_reading_ahead_without_parameters_on_disk_is_reported(one_rank, tmp_path):
    def compiled(model, **more):
        return torch.compile(model, backend="dsgraph", options={**EAGER, "read_ahead_bytes": 2**20, **more})

    said = "'read_ahead_bytes' has no effect in .*: no parameter of the model is stored on disk"
    for model in (_net(), dsgraph.partition(_net(), stage=3, keep_whole_below=0)):
        with pytest.warns(UserWarning, match=said):
            compiled(model)(torch.randn(2, 4))
        torch._dynamo.reset()
    with pytest.raises(dsgraph.StrictError, match=said):
        compiled(model, strict=True)(torch.randn(2, 4))
    offload = {"parameters": "disk", "folder": str(tmp_path)}
    stored = dsgraph.partition(_net(), stage=3, keep_whole_below=0, offload=offload)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled(stored)(torch.randn(2, 4))


def test_options_are_bound_once_for_each_graph(one_rank, monkeypatch):
    bound = []
    built_in = pipeline_module._built_in
    monkeypatch.setattr(pipeline_module, "_built_in", lambda options: bound.append(options) or built_in(options))
    for model in (_net(), dsgraph.partition(_net(), stage=3)):
        torch.compile(model, backend="dsgraph", options=EAGER)(torch.randn(2, 4))
    assert len(bound) == 2


def test_dynamic_sizes_compile_once(one_rank):
    model = dsgraph.partition(build("gpt"), stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=EAGER, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for time in (8, 9, 11, 13):
        x, y = tokens(0, 0, batch=2, time=time)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 1)
        compiled(x, y).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 3))
def test_everything_dynamic_leaves_parameters_static(one_rank, stage):
    model, alone = dsgraph.partition(build("dynamic"), stage=stage, keep_whole_below=0), build("dynamic")
    compiled = torch.compile(model, backend="dsgraph", options=EAGER, fullgraph=True, dynamic=True)
    for time in (8, 11):
        torch.testing.assert_close(compiled(*tokens(0, 0, time=time)), alone(*tokens(0, 0, time=time)))


def test_the_mode_must_be_one_of_inductors(one_rank):
    compiled = torch.compile(_net(), backend="dsgraph", mode="max-autotun")
    with pytest.raises(Exception, match="max-autotun"):
        compiled(torch.randn(3, 4))


def test_hooks_that_dsgraph_needs_cannot_be_set():
    @dsgraph.graph_pass(phase="forward")
    def nothing(gm, ctx):
        return 0

    options = {"pipeline": [nothing], "inductor": {"custom_partitioner_fn": None}}
    with pytest.raises(Exception, match="option 'inductor' sets 'custom_partitioner_fn'"):
        torch.compile(_net(), backend="dsgraph", options=options)(torch.randn(3, 4))


def test_one_process_is_not_warned(one_rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(_net(), backend="dsgraph", options=EAGER)(torch.randn(3, 4))


def test_a_new_process_group_brings_its_own_timeout():
    backend = dsgraph.api.new_backend()
    timeouts = []
    for seconds in (60, 5):
        timeout = timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        torch._dynamo.reset()
        model = dsgraph.partition(_net(), stage=3, keep_whole_below=0)
        torch.compile(model, backend=backend, options=EAGER)(torch.randn(3, 4))
        timeouts.append(backend.agreements.over(next(model.parameters()).device_mesh).timeout.seconds)
        dist.destroy_process_group()
    assert timeouts == [60, 5]


WARM_START = """
import sys, torch, torch.distributed as dist
import dsgraph
from torch._dynamo.utils import counters
from tests.models import build, features

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pipeline = eval(sys.argv[1])
model = dsgraph.partition(build("frozen"), stage=3, keep_whole_below=0)
torch.compile(model, backend="dsgraph", options={"pipeline": pipeline} if pipeline else {})(*features(0, 0)).backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"],
      counters["inductor"]["fxgraph_cache_hit"])
"""


def _start(cache: Path, pipeline: str = "None", **environment: str) -> list[int]:
    """Trains one step in a new process; returns hits and bypasses of AOTAutograd's cache, and hits of Inductor's."""
    done = subprocess.run(
        [sys.executable, "-c", WARM_START, pipeline],
        env={**__import__("os").environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()[-3:]]


@pytest.mark.full  # three processes by Inductor
@pytest.mark.inductor
def test_warm_starts_hit_the_caches_and_other_options_miss(tmp_path):
    assert _start(tmp_path) == [0, 0, 0]
    hits, bypasses, graph_hits = _start(tmp_path)
    if torch.__version__ < "2.12":
        # torch 2.11 hashes DTensor inputs anew in every process: only the compiled graphs are found again.
        assert (bypasses, graph_hits) == (0, 2)
    else:
        assert (hits, bypasses) == (1, 0)
    other = 'dsgraph.default_pipeline().without("bucket_small_reductions")'
    assert _start(tmp_path, other)[:2] == [0, 0]


@pytest.mark.full  # starts programs with cold and warm caches
@pytest.mark.inductor
def test_a_dump_is_complete_whatever_the_caches_hold(tmp_path, capsys):
    for number in (0, 1):
        folder = tmp_path / f"dump{number}"
        if number == 0:
            _start(tmp_path / "cache")
        hits, *_ = _start(tmp_path / "cache", DSGRAPH_DUMP=str(folder))
        assert hits == 0
        phases = {path.name.partition("-")[0] for path in folder.glob("rank0/compile1/*-*.json")}
        assert phases == {"capture", "joint", "forward", "backward"}
        assert main(["memory", str(folder)]) == 0
        assert "backward" in capsys.readouterr().out


@pytest.mark.slow
def test_the_backend_is_found_by_name_without_importing_dsgraph():
    script = "import torch; print(torch.compile(torch.nn.Linear(2, 2), backend='dsgraph', options={'codegen': 'eager'})"
    script += "(torch.ones(1, 2)).shape)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "torch.Size([1, 2])" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "mode", "awaits"),
    [
        ({"codegen": "eager"}, None, True),
        ({}, None, True),
        ({}, "reduce-overhead", False),
        ({"inductor": {"triton.cudagraphs": True}}, None, False),
        ({"pipeline": dsgraph.default_pipeline().without("await_copies")}, None, False),
    ],
)
def test_recorded_kernels_wait_for_nothing(options, mode, awaits):
    """Where a replay of CUDA graphs would not wait for gathered copies, the graph's caller does."""
    facts = CaptureFacts(gathered_copies=frozenset({0}))
    chosen = parse_options(options, {})
    assert Compilation(chosen, facts, build_pipeline(chosen, facts), mode=mode).awaits_copies is awaits
