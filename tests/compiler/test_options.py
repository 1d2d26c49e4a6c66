from __future__ import annotations

import pickle
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.compiler.build_pipeline import bind_options
from dsgraph.compiler.options import BackendOptions, parse_options
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.utils.byte_counts import on_device

RMS_NORM = next(spec for spec in KERNELS if spec.name == "rms_norm")


def test_defaults():
    options = parse_options(None, {})
    assert options == BackendOptions()
    assert options.codegen == "inductor"
    assert options.pipeline is None and bind_options(options) == dsgraph.default_pipeline()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"codgen": "eager"},
            r"unknown option 'codgen'; did you mean 'codegen'\?; known: activation_offload, codegen, dump",
        ),
        ({"zzz": 1}, r"unknown option 'zzz'; known:"),
        ({"zero_stage": 1}, r"unknown option 'zero_stage'; did you mean 'stage' of dsgraph.partition\?"),
        ({"blocks": "auto"}, r"unknown option 'blocks': write dsgraph.partition\(model, blocks=...\)"),
        ({"codegen": "eagr"}, r"option 'codegen' is 'eagr'; did you mean 'eager'\?; it takes 'inductor' or 'eager'"),
        ({"strict": "yes"}, r"option 'strict' is 'yes'"),
        ({"verify": 1}, r"option 'verify' is 1; it takes True or False"),
        ({"pipeline": 3}, r"option 'pipeline' is 3; it takes a Pipeline or a list of passes"),
        ({"dump": 7}, r"option 'dump' is 7; it takes the path of a folder"),
        ({"dump": ""}, r"option 'dump' is ''; it takes the path of a folder"),
        ({"inductor": {"max_autotun": True}}, r"'inductor' sets 'max_autotun'.*did you mean 'max_autotune'\?"),
        ({"recompile_limit": 3}, r"option 'recompile_limit' has no effect without strict=True"),
        ({"recompile_limit": 0, "strict": True}, r"option 'recompile_limit' is 0; it takes a number of compiles"),
        ({"recompile_limit": 99, "strict": True}, r"option 'recompile_limit' is 99, but Dynamo stops at 8"),
        ({"memory_limit": 0}, r"option 'memory_limit' is 0: it takes a number of bytes \(1 or more\), a text"),
        ({"memory_limit": "60 gigs"}, r"option 'memory_limit' is '60 gigs': it takes .*; units: B, KB, .*GiB"),
        ({"memory_limit": 1.5}, r"option 'memory_limit' is 1.5: it takes .* a share of the device such as 0.8"),
        ({"activation_offload": "gpu"}, r"option 'activation_offload' is 'gpu'; it takes 'host', 'disk' or None"),
        ({"kernels": "all"}, r"option 'kernels' is 'all'; it takes 'auto', 'none' or a list of kernels"),
        ({"kernels": ["rmsnorm"]}, r"option 'kernels' is .*'rmsnorm'; did you mean 'rms_norm'\?; known: .*rms_norm"),
        (
            {"kernels": "rms_norm"},
            r"option 'kernels' is 'rms_norm': it takes .* a list of kernels, such as \['rms_norm'\]",
        ),
        ({"kernels": RMS_NORM}, r"it takes 'auto', 'none' or a list of kernels, such as \[KernelSpec\('rms_norm'\)\]"),
        ({"kernels": [len]}, r"it holds len, which is no kernel: write @dsgraph.kernel\(\) above the function"),
        ({"kernels": ["few_rows_linear"]}, r"it holds 'few_rows_linear', which is called 'skinny_linear' now"),
        ({"kernels": [["rms_norm"]]}, r"it holds \['rms_norm'\]; did you mean 'rms_norm'\?"),
        (
            {"kernels": ["rms_norm", "rope", replace(RMS_NORM)]},
            r"two kernels of the name 'rms_norm' \(dsgraph.rms_norm.default and .*\): rename the function of one",
        ),
        ({"reduce_bucket_bytes": 0}, r"option 'reduce_bucket_bytes' is 0; it takes a number of bytes, 1 or more"),
        ({"overlap_comm": "no"}, r"option 'overlap_comm' is 'no'; it takes True or False"),
        (["eager"], r"options is \['eager'\]; it takes a dict"),
        (
            {"codegen": "eager", "inductor": {"max_autotune": True}},
            r"option 'inductor' has no effect with codegen='eager'",
        ),
    ],
)
def test_wrong_options_are_named(given, message):
    # transformers raises the limit for the whole process.
    with torch._dynamo.config.patch(recompile_limit=8), pytest.raises(dsgraph.OptionError, match=message):
        parse_options(given, {})


def test_dump_has_an_environment_variable():
    assert parse_options({}, {"DSGRAPH_DUMP": "graphs"}).dump == Path("graphs")
    assert parse_options({"dump": "here"}, {"DSGRAPH_DUMP": "graphs"}).dump == Path("here")


def test_wrong_options_stop_torch_compile():
    model = torch.compile(nn.Linear(2, 2), backend="dsgraph", options={"codgen": "eager"})
    with pytest.raises(
        dsgraph.OptionError, match=r"^unknown option 'codgen'; did you mean 'codegen'\?.*verify$"
    ) as caught:
        model(torch.randn(1, 2))
    assert "BackendCompilerFailed" not in "".join(traceback.format_exception(caught.value))
    assert type(pickle.loads(pickle.dumps(caught.value))) is dsgraph.OptionError
    with pytest.raises(dsgraph.OptionError, match=r"write dsgraph.compile\(model, mode=...\)"):
        torch.compile(nn.Linear(2, 2), backend="dsgraph", options={"mode": "default"})(torch.randn(1, 2))


@pytest.mark.parametrize(
    "given", [{"dynamic": "x"}, {"dynamic": 1}, {"fullgraph": "yes"}, {"fullgraph": None}, {"mode": 3}]
)
def test_compile_refuses_values_that_torch_would_take(one_rank, given):
    model, (name,) = nn.Linear(2, 2), given
    with pytest.raises(dsgraph.OptionError, match=f"compile: {name} is "):
        dsgraph.compile(model, codegen="eager", **given)
    assert type(model) is nn.Linear


def test_compile_refuses_before_it_changes_anything(one_rank):
    model = nn.Linear(2, 2)
    with pytest.raises(
        dsgraph.OptionError, match=r"compile: unknown option 'parm_dtype'; did you mean 'param_dtype'\?"
    ):
        dsgraph.compile(model, parm_dtype=torch.bfloat16)
    with pytest.raises(dsgraph.OptionError, match="'eagr'"):
        dsgraph.compile(model, codegen="eagr")
    assert type(model) is nn.Linear


def test_compile_takes_all_arguments_of_partition(one_rank):
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(dsgraph.PartitionError, match="blocks is 'all'"):
        dsgraph.compile(model, blocks="all")
    with pytest.raises(dsgraph.PartitionError, match="offload"):
        dsgraph.compile(model, offload={"optimiser": "host"})


@pytest.mark.inductor
def test_compile_takes_a_mode_beside_options(one_rank):
    seen = []

    @dsgraph.graph_pass(phase="joint")
    def note_settings(gm, ctx):
        seen.append((torch._inductor.config.max_autotune, torch._inductor.config.epilogue_fusion))
        return 0

    options = {"pipeline": dsgraph.default_pipeline() + [note_settings], "inductor": {"epilogue_fusion": False}}
    model = dsgraph.compile(nn.Linear(2, 2), mode="max-autotune-no-cudagraphs", **options)
    model(torch.randn(3, 2))
    assert seen == [(True, False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode 'fast' is not one of Inductor's"),
        ({"mode": "max-autotune", "inductor": 3}, "option 'inductor' is 3; it takes a dict"),
        ({"mode": "max-autotune", "codegen": "eager"}, "mode 'max-autotune' has no effect with codegen='eager'"),
        (
            {"mode": "max-autotune", "inductor": {"max_autotune": False}},
            "'max_autotune' is given twice: mode 'max-autotune' sets it to True, option 'inductor' to False",
        ),
    ],
)
def test_compile_refuses_a_mode_before_it_changes_anything(one_rank, options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(dsgraph.OptionError, match=message):
        dsgraph.compile(model, **options)
    assert type(model) is nn.Linear


def test_compile_partitions_and_compiles(one_rank):
    torch.manual_seed(0)
    alone = nn.Linear(3, 2)
    torch.manual_seed(0)
    model = dsgraph.compile(nn.Linear(3, 2), stage=3, keep_whole_below=0, codegen="eager", fullgraph=True)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), alone(x))
    assert [name for name, _ in model.named_parameters()] == ["_orig_mod.weight", "_orig_mod.bias"]


def test_a_memory_limit_may_be_bytes_a_text_or_a_share():
    found = [parse_options({"memory_limit": limit}).memory_limit for limit in (7, "60GiB", "1.5 kb", 0.25)]
    assert found == [7, 60 * 2**30, 1500, 0.25]
    machine = on_device(1.0, "cpu", {})
    assert [on_device(size, "cpu", {"LOCAL_WORLD_SIZE": "2"}) for size in (7, 0.25)] == [7, machine // 8]
