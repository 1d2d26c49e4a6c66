"""`dsgraph.checkpointing`, and the section `activation_checkpointing` of a configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.checkpointing import checkpoint, configure, is_configured, reset
from dsgraph.engine.activation_checkpointing import take_switches
from dsgraph.engine.config.read_config import read_config
from dsgraph.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh():
    reset()
    yield
    reset()


def test_arguments_go_before_the_configuration():
    section = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": False}}
    configure(None, section, checkpoint_in_cpu=False)
    assert is_configured()
    read = read_config({"train_batch_size": 2, **section}, ranks=2, sections=take_switches())
    assert not read.config.activation_checkpointing.cpu_checkpointing
    assert any(note.startswith("activation_checkpointing.profile has no effect: ") for note in read.notes)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"contiguous_checkpointing": True}, "packing activations into one block of memory is not supported yet"),
        ({"checkpoint_in_cpu": "often"}, "activation_checkpointing.cpu_checkpointing is 'often'"),
        ({"deepspeed_config": "/no/such/file"}, "config file /no/such/file: No such file"),
    ],
)
def test_what_cannot_be_had_is_refused_and_nothing_is_set(how, said):
    with pytest.raises(ConfigError, match=said):
        configure(None, **how)
    assert not is_configured()


def test_switches_that_come_too_late_are_refused():
    take_switches()
    with pytest.raises(ConfigError, match=r"an engine was made already: call it before dsgraph.initialize"):
        configure(None, checkpoint_in_cpu=True)


class _Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def part(self, x, *, twice):
        return self.second(nn.functional.dropout(torch.sin(self.first(x)), 0.5)) * twice

    def forward(self, x):
        return checkpoint(self.part, x, twice=2.0).sum()


def test_what_is_marked_is_computed_again(one_rank):
    torch.manual_seed(0)
    model = dsgraph.partition(_Marked(), stage=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    compiled(x).backward()
    found = [param.grad.full_tensor().clone() for param in model.parameters()]
    assert dsgraph.report(model).compiles[0].activations.recomputed
    for param in model.parameters():
        param.grad = None
    torch.manual_seed(1)
    model(x).backward()
    assert all(
        torch.equal(mine, param.grad.full_tensor()) for mine, param in zip(found, model.parameters(), strict=True)
    )


def _train(switches):
    torch._dynamo.reset()
    reset()
    configure(None, **switches)
    torch.manual_seed(0)
    settings = {"train_micro_batch_size_per_gpu": 2, "dsgraph": {"codegen": "eager"}}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = dsgraph.initialize(model=_Large(), config={**settings, **optimizer})
    torch.manual_seed(1)
    engine.backward(engine(torch.randn(64, 256)))
    engine.step()
    moved = [item.changed for each in dsgraph.report(engine.module).compiles for item in each.passes
             if item.name == "offload_activations"]  # fmt: skip
    return [param.full_tensor() for param in engine.module.parameters()], moved


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return checkpoint(lambda x: self.second(torch.sin(self.first(x))), torch.sin(self.second(self.first(x)))).sum()


def test_cpu_checkpointing_moves_what_is_saved_to_the_host(one_rank):
    here, nothing = _train({})
    there, moved = _train({"checkpoint_in_cpu": True})
    assert not nothing and moved[0] > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, there, strict=True))
