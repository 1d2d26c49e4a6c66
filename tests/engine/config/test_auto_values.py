from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsgraph.engine.config.auto_values import filled
from dsgraph.utils.errors import ConfigError

ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "world_size": 4,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.1,
    "fp16": False,
    "fp16_full_eval": False,
    "bf16": True,
    "bf16_full_eval": False,
    "get_warmup_steps": lambda steps: steps // 10,
}
ALWAYS = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
}


def fill(hidden_size=None, **config):
    return filled(config, SimpleNamespace(**ARGUMENTS), hidden_size=hidden_size, steps=100)


def test_arguments_count_where_the_file_is_silent():
    assert fill() == ALWAYS
    assert fill(fp16={"enabled": "auto", "hysteresis": 3})["fp16"] == {"enabled": False, "hysteresis": 3}


def test_parameters_of_optimizer_and_schedule_count_where_they_are_auto():
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    found = fill(optimizer={"type": "AdamW", "params": params})["optimizer"]["params"]
    assert found == {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.1}
    assert fill(optimizer={"type": "AdamW"})["optimizer"] == {"type": "AdamW"}
    params = dict.fromkeys(("warmup_max_lr", "total_num_steps", "warmup_num_steps"), "auto")
    found = fill(scheduler={"type": "WarmupDecayLR", "params": params})["scheduler"]["params"]
    assert found == {"warmup_max_lr": 1e-3, "total_num_steps": 100, "warmup_num_steps": 10}


@pytest.mark.parametrize("name", ["stage3_param_persistence_threshold", "param_persistence_threshold"])
def test_sizes_follow_from_the_model(name):
    auto = {"reduce_bucket_size": "auto", name: "auto", "allgather_bucket_size": 7}
    found = fill(hidden_size=8, zero_optimization=auto)["zero_optimization"]
    assert found == {"reduce_bucket_size": 64, name: 80, "allgather_bucket_size": 7}
    assert fill(hidden_size=8, zero_optimization={name: 5})["zero_optimization"] == {name: 5}
    with pytest.raises(ConfigError, match=f'zero_optimization.{name} is "auto", and the model has no hidden size'):
        fill(zero_optimization={name: "auto"})


def test_a_contradiction_names_both():
    with pytest.raises(ConfigError, match=r"gradient_clipping is 1.0 and max_grad_norm 0.5; bf16.enabled is False and"):
        fill(gradient_clipping=1.0, bf16={"enabled": False})


def test_a_file_is_read_and_a_dict_is_not_changed(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": "auto"}')
    assert filled(path, SimpleNamespace(**ARGUMENTS), hidden_size=None, steps=1) == ALWAYS
    given: dict = {"fp16": {}}
    assert filled(given, SimpleNamespace(**ARGUMENTS), hidden_size=None, steps=1) == ALWAYS and given == {"fp16": {}}
