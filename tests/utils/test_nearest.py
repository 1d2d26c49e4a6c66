from __future__ import annotations

import pytest

from dsgraph.compiler.options import BackendOptions
from dsgraph.engine.config.engine_config import EngineConfig, ParallelConfig, ZeroConfig
from dsgraph.parallel.planning.gpus import NODE_GPUS
from dsgraph.utils.nearest import SYNONYMS, near, nearest

ADAM = ["lr", "betas", "eps", "weight_decay", "amsgrad"]
ZERO = list(ZeroConfig.model_fields)
OPTIONS = list(BackendOptions.model_fields)


@pytest.mark.parametrize(
    ("found", "known", "meant"),
    [
        ("mode", OPTIONS, []),
        ("backend", OPTIONS, []),
        ("codgen", OPTIONS, ["codegen"]),
        ("memory", OPTIONS, ["memory_limit"]),
        ("cpu_offload", ZERO, ["offload_optimizer"]),
        ("cpu_offload_params", ZERO, ["offload_param"]),
        ("max_grad_norm", ADAM, []),
        ("max_grad_norm", EngineConfig.model_fields, ["gradient_clipping"]),
        ("learning_rate", ADAM, ["lr"]),
        ("h100", NODE_GPUS, ["h100-80gb"]),
        ("A100", NODE_GPUS, ["a100-40gb", "a100-80gb"]),
        ("h20", NODE_GPUS, ["h200"]),
        ("h300", NODE_GPUS, []),
        ("h100-94gb", NODE_GPUS, []),
        ("fp32", ["fp16", "bf16"], []),
        ("fp61", ["fp16", "bf16"], ["fp16"]),
        ("adan", ["Adam", "AdamW"], []),
        ("stage3", ["stage"], []),
        ("max_lr", ["lr"], []),
        ("zero_opt_stage", ["load_from", "opt_stage"], ["opt_stage"]),
        ("x", ["y", "lr"], []),
        ("", ["y"], []),
        ("of", ["of_a", "of_b", "of_c"], []),
    ],
)
def test_a_hint_is_right_or_absent(found, known, meant):
    assert near(found, known) == meant


def test_a_hint_is_a_question():
    assert nearest("A100", NODE_GPUS) == "; did you mean 'a100-40gb' or 'a100-80gb'?"
    assert (
        nearest("grad_clip", ["gradient_clipping"], where="at the top")
        == "; did you mean 'gradient_clipping' at the top?"
    )
    assert nearest("h300", NODE_GPUS) == ""


def test_synonyms_are_names_that_are_not_accepted_themselves():
    accepted = {*EngineConfig.model_fields, *ZERO, *ParallelConfig.model_fields, *OPTIONS, *ADAM, "Adam"}
    assert not accepted & SYNONYMS.keys()
    assert {name for names in SYNONYMS.values() for name in names} <= accepted
