from __future__ import annotations

import pytest

from dsgraph.engine.config.conditions import check_keys
from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.key import entries_of
from dsgraph.utils.errors import ConfigError

DISK = {"device": "nvme", "nvme_path": "/tmp"}


def check(device=None, **sections):
    return check_keys(EngineConfig.model_validate(sections), device)


def zero(**keys):
    return {"zero_optimization": keys}


def test_defaults_need_nothing():
    assert check("cpu") == check("cuda") == []


@pytest.mark.parametrize(
    ("sections", "device", "message"),
    [
        (zero(offload_param=DISK), "cpu", r"offload_param.device needs zero_optimization.stage 3, and it is 0: other"),
        (zero(offload_optimizer=DISK), "cuda", r'device "nvme" needs the device of the model "cpu", and it is "cuda"'),
        (
            zero(offload_optimizer={"device": "nvme"}),
            None,
            r'device "nvme" needs zero_.*nvme_path as well: it names the',
        ),
        (zero(offload_optimizer={"ratio": 0.5}), None, r'ratio needs .*device "cpu" or "nvme", and it is "none"'),
        ({"dsgraph": {"delayed_update": True}}, None, r'delayed_update needs .*device "cpu", and it is "none"'),
    ],
)
def test_keys_that_cannot_be_combined_are_refused(sections, device, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(device, **sections)
    assert str(caught.value).endswith(". Change one of the two")


def test_conditions_on_an_unknown_device_wait():
    assert check(None, **zero(offload_optimizer=DISK)) == check("cpu", **zero(offload_optimizer=DISK)) == []


def test_a_condition_of_one_value_leaves_others_alone():
    assert check("cuda", **zero(offload_optimizer={"device": "cpu"})) == []


def test_a_condition_on_accelerators_refuses_only_the_cpu():
    own = {"host_memory_limit": "1GiB", "memory_limit": "1GiB"}
    assert check("xpu", dsgraph=own) == check("cuda", dsgraph=own) == []
    with pytest.raises(ConfigError, match=r'the device of the model other than "cpu", and it is "cpu": below the CPU'):
        check("cpu", dsgraph=own)
    assert check("xpu", **zero(offload_optimizer={"device": "cpu", "pin_memory": True})) == []


def test_a_key_that_a_plan_will_set_is_not_missed():
    own = {"delayed_update": True, "host_memory_limit": "1GiB", "memory_limit": "1GiB"}
    assert check("cuda", dsgraph=own) == []
    with pytest.raises(ConfigError, match="delayed_update needs"):
        check("cuda", dsgraph={"delayed_update": True})


def test_a_key_without_effect_is_one_line():
    (line,) = check(dsgraph={"compile": False, "memory_limit": 10**9, "num_workers": 1})
    assert line.startswith("dsgraph.memory_limit has no effect: dsgraph.compile is false, and ")
    found = check("cpu", **zero(offload_optimizer={"device": "cpu", "pin_memory": True}))
    assert [line.split(":")[0] for line in found] == ["zero_optimization.offload_optimizer.pin_memory has no effect"]
    assert len(check(activation_checkpointing={"cpu_checkpointing": True}, dsgraph={"compile": False})) == 1


def test_the_section_parallel_refuses_keys_that_do_not_support_it():
    divided = {"parallel": {"pp": 2}}
    assert check(**divided, gradient_clipping=0.5, **zero(stage=1)) == []
    assert check(**divided, optimizer={"type": "AdamW", "params": {"lr": 1e-3}}) == []
    assert check(**divided, checkpoint={"tag_validation": "Fail"}) == []
    assert check(**divided, bf16={"enabled": True}) == []
    assert check(parallel={}, memory_breakdown=True, steps_per_print=1) == []
    with pytest.raises(ConfigError, match=r"^memory_breakdown is not supported with pipeline stages"):
        check(**divided, memory_breakdown=True, steps_per_print=1)
    assert check(**divided, sparse_attention={}) == check(**divided, dsgraph={"blocks": "auto"}) == []
    assert check(**divided, quantize_training={"enabled": True}) == []
    with pytest.raises(
        ConfigError, match=r"^quantize_training.eigenvalue.enabled is not supported with pipeline stages"
    ):
        check(**divided, quantize_training={"enabled": True, "eigenvalue": {"enabled": True}})


def test_what_the_section_parallel_supports():
    supported = {path for path, _, entry in entries_of(EngineConfig) if entry.stages}
    assert {"gradient_clipping", "zero_optimization.stage", "optimizer.params", "parallel.pp"} <= supported
    assert {"fp16.enabled", "bf16.enabled", "zero_optimization.offload_optimizer.device"} <= supported
    assert {"quantize_training.enabled", "progressive_layer_drop.theta", "dsgraph.blocks"} <= supported
    assert not any(path.startswith(("flops_profiler.", "quantize_training.eigenvalue.")) for path in supported)
    assert "zero_optimization.offload_param.buffer_count" not in supported, "stages read each parameter once a step"


def test_blocks_that_cannot_be_apart_are_noted():
    (note,) = check(dsgraph={"compile": False, "blocks": "auto"})
    assert note.startswith("dsgraph.blocks has no effect: ")
    assert check(dsgraph={"compile": False, "blocks": "none"}) == []
    apart = {"flops_profiler": {"enabled": True}, "progressive_layer_drop": {"enabled": True}}
    assert check(dsgraph={"blocks": "auto"}, **apart) == []
