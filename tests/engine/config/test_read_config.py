from __future__ import annotations

import json
from typing import Any

import pytest

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.options_of_config import backend_options
from dsgraph.engine.config.other_keys import NOT_YET, WITHOUT_EFFECT
from dsgraph.engine.config.read_config import read_config
from dsgraph.utils.errors import ConfigError

MINIMAL = {"train_batch_size": 8}


def _read(**sections):
    return read_config({**MINIMAL, **sections}, ranks=2)


def test_a_file_of_deepspeeds_is_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                "bf16": {"enabled": True},
                "zero_optimization": {
                    "stage": 3,
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                    "reduce_bucket_size": 5e8,
                    "stage3_param_persistence_threshold": 1e5,
                },
                "gradient_clipping": 0.5,
            }
        )
    )
    found = read_config(path, ranks=2)
    assert found.batch.step == 16
    assert found.config.zero_optimization.stage == 3
    assert found.config.zero_optimization.param_persistence_threshold == 100_000
    assert found.config.gradient_clipping == 0.5 and found.config.bf16.enabled
    (note,) = found.notes
    assert note.startswith("zero_optimization.contiguous_gradients has no effect: ")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"fp61": {}}, r"unknown key 'fp61'; did you mean 'fp16'\?"),
        ({"zero_optimization": {"stge": 1}}, r"'zero_optimization.stge'; did you mean 'stage'\?$"),
        ({"optimizer": {"type": "Adam", "parms": {}}}, r"'optimizer.parms'; did you mean 'params'\?"),
        ({"zero_optimization": {"stge": "auto"}}, r"'zero_optimization.stge'; did you mean 'stage'\?"),
        ({"optimizer": {"params": {"lr": "auto"}}}, "optimizer.type is missing"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"zero_optimization": 3}, "zero_optimization is 3; expected a section"),
        ({"zero_optimization": {"enabled": True}}, r"unknown key 'zero_optimization.enabled'; known here"),
        ({"memory_limit": 2**30}, r"unknown key 'memory_limit'; did you mean 'dsgraph.memory_limit'\?"),
        ({"tensor_parallel": 2}, r"unknown key 'tensor_parallel'; did you mean 'parallel.tp'\?"),
        ({"parallel": {"tensor": 2}}, r"unknown key 'parallel.tensor'; did you mean 'tp'\?"),
        ({"dsgraph": {"stage": 1}}, r"unknown key 'dsgraph.stage'; did you mean 'zero_optimization.stage'\?"),
        ({"dsgraph": {"memory_limit": "lots"}}, "dsgraph.memory_limit is 'lots': it takes .*GiB"),
        ({"fp16": {"enabled": "maybe"}}, "fp16.enabled is 'maybe'"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16.enabled needs bf16.enabled false, and it is true",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantized communication is not supported yet"),
        ({"amp": {"enabled": True}}, "apex is not supported yet"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "a secondary partition is not supported yet"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "train_batch_size 8 is not"),
    ],
)
def test_what_is_wrong_is_named(sections, message):
    with pytest.raises(ConfigError, match=message):
        _read(**sections)


def test_all_unknown_keys_are_named_at_once():
    sections = {"foo": 1, "optimiser": {}, "zero_optimization": {"stge": 1, "bar": 2}}
    with pytest.raises(ConfigError) as error:
        _read(**sections)
    assert sorted(str(error.value).splitlines()) == [
        "config: unknown key 'foo'",
        "config: unknown key 'optimiser'; did you mean 'optimizer'?",
        "config: unknown key 'zero_optimization.bar'",
        "config: unknown key 'zero_optimization.stge'; did you mean 'stage'?",
    ]


def test_comments_are_left_out():
    found = _read(_comment="for the large run", zero_optimization={"stage": 1, "_why": ["it", "fits"]})
    assert found.config == _read(zero_optimization={"stage": 1}).config and not found.notes


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": False}},
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "none"},
                }
            },
        ),
        ({"compile": {"deepcompile": True}}, {}),
    ],
)
def test_old_names_mean_the_present_ones(old, new):
    assert _read(**old).config == _read(**new).config


def test_a_key_under_both_names_is_refused():
    with pytest.raises(ConfigError, match="bfloat16 is the old name of bf16, which is set too: remove one"):
        _read(bfloat16={"enabled": True}, bf16={"enabled": False})


def test_what_is_not_there_yet_may_be_switched_off():
    zero = {"offload_param": {"device": "none"}, "zero_hpz_partition_size": 1}
    found = _read(amp={"enabled": False}, sparse_gradients=False, zero_optimization=zero)
    assert found.notes == ()
    assert _read(zero_optimization={"zero_hpz_partition_size": False}).notes == ()
    with pytest.raises(ConfigError, match="sparse gradients is not supported yet"):
        _read(sparse_gradients=0)


def test_a_breakdown_that_is_never_printed_is_said():
    (note,) = _read(wall_clock_breakdown=True).notes  # it has an effect: `engine.timings`
    assert note.startswith("wall_clock_breakdown is not printed: steps_per_print is not set")
    found = _read(memory_breakdown=True)
    assert found.notes == (
        "memory_breakdown is not printed: steps_per_print is not set, and it is printed with the lines of steps",
    )
    assert not _read(memory_breakdown=True, steps_per_print=1).notes


def test_options_of_graphs_without_graphs_are_said():
    found = _read(dsgraph={"compile": False, "memory_limit": 10**9, "num_workers": 1})
    assert found.notes == (
        "dsgraph.memory_limit has no effect: dsgraph.compile is false, and it is an option of compiled graphs",
    )


def test_auto_is_the_default_and_said():
    assert _read(zero_optimization={"stage3_param_persistence_threshold": "auto"}).notes
    found = _read(gradient_clipping="auto", fp16={"enabled": "auto"})
    assert found.config.gradient_clipping == EngineConfig().gradient_clipping
    assert [note.split(":")[0] for note in found.notes] == ["gradient_clipping", "fp16.enabled"]


def test_every_idle_key_is_said():
    for key, reason in WITHOUT_EFFECT.items():
        *sections, name = key.split(".")
        given: dict[str, Any] = {name: 1}
        for section in reversed(sections):
            given = {section: given}
        found = _read(**given)
        assert found.notes == (f"{key} has no effect: {reason}",)


def test_nothing_is_both_known_and_refused():
    assert not set(NOT_YET) & set(WITHOUT_EFFECT)
    assert not set(EngineConfig.model_fields) & {*NOT_YET, *WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1: not JSON"), ("[]", "holds a list"), ('{"fp16": {}, "fp16": {}}', "the key 'fp16' appears twice")],
)
def test_a_file_that_is_none_is_named(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(path, ranks=1)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "none.json", ranks=1)


def test_passes_are_chosen_by_name():
    def resolved(**own):
        return read_config({"train_batch_size": 2, "dsgraph": own}, ranks=1).config

    def names(**own):
        return list(backend_options(resolved(**own))["pipeline"])

    assert names(pipeline=["merge_gathers", "insert_zero_collectives"]) == ["merge_gathers", "insert_zero_collectives"]
    assert backend_options(resolved()) == {}
    with pytest.raises(ConfigError, match="unknown pass 'merge_gather'; did you mean 'merge_gathers'"):
        names(pipeline=["merge_gather"])
    with pytest.raises(ConfigError, match=r"dsgraph.pipeline: pass prefetch_forward_gathers requires"):
        names(pipeline=["prefetch_forward_gathers"])
    with pytest.raises(
        ConfigError, match=r"dsgraph.pipeline: option 'kernels' has no effect without SubstituteKernels"
    ):
        names(pipeline=["merge_gathers"], kernels=["rms_norm"])
