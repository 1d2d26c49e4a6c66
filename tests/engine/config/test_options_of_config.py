from __future__ import annotations

import pytest
import torch

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.options_of_config import backend_options, partition_options


def config(**sections):
    return EngineConfig.model_validate(sections)


def test_defaults_set_nothing():
    assert backend_options(config()) == {}
    assert partition_options(config()) == {"stage": 0}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero_optimization": {"reduce_bucket_size": 8}}, {"reduce_bucket_bytes": 32}),
        ({"zero_optimization": {"allgather_bucket_size": 8}, "bf16": {"enabled": True}}, {"gather_bucket_bytes": 16}),
        ({"zero_optimization": {"overlap_comm": False}}, {"overlap_comm": False}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"activation_offload": "host"}),
        ({"dsgraph": {"memory_limit": "1GiB", "codegen": "eager"}}, {"memory_limit": 2**30, "codegen": "eager"}),
        ({"dsgraph": {"codegen": "inductor"}}, {"codegen": "inductor"}),
        ({"dsgraph": {"kernels": ["rms_norm"]}}, {"kernels": ("rms_norm",)}),
        ({"zero_optimization": {"offload_param": {"buffer_count": 2, "buffer_size": 10}}}, {}),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "buffer_count": 2, "buffer_size": 10}}},
            {"read_ahead_bytes": 80},
        ),
    ],
)
def test_keys_set_backend_options(sections, expected):
    assert backend_options(config(**sections)) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero_optimization": {"stage": 3}}, {"stage": 3}),
        ({"bf16": {"enabled": True}}, {"stage": 0, "param_dtype": torch.bfloat16, "cast_forward_inputs": False}),
        ({"communication_data_type": "fp32"}, {"stage": 0, "reduce_dtype": torch.float32}),
        ({"zero_optimization": {"param_persistence_threshold": 7}}, {"stage": 0, "keep_whole_below": 7}),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, {"stage": 0}),
        ({"dsgraph": {"blocks": ["layers"]}}, {"stage": 0, "blocks": ("layers",)}),
        ({"flops_profiler": {"enabled": True}}, {"stage": 0}),
        ({"progressive_layer_drop": {"enabled": True}}, {"stage": 0}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            {"stage": 0, "offload": {"optimizer": "host", "ratio": {"optimizer": 0.5}}},
        ),
        (
            {
                "zero_optimization": {
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                    "offload_param": {"device": "nvme", "nvme_path": "/b"},
                }
            },
            {
                "stage": 0,
                "offload": {
                    "optimizer": "disk",
                    "parameters": "disk",
                    "ratio": {"optimizer": 1.0, "parameters": 1.0},
                    "folder": "/b",
                },
            },
        ),
    ],
)
def test_keys_set_arguments_of_partition(sections, expected):
    assert partition_options(config(**sections)) == expected
