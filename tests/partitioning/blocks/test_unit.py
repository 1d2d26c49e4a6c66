"""The unit that a module is part of, by names in the partitioned model."""

from __future__ import annotations

import torch
from torch import nn

import dsgraph
from dsgraph.partitioning.blocks.unit import WHOLE_MODEL, Unit, unit_in, unit_of


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x):
        return self.up(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer(16), Layer(16)])
        self.head = nn.Linear(8, 8)


def test_blocks_share_a_unit_with_their_equals_only(one_rank):
    model = dsgraph.partition(Model(), stage=3, keep_whole_below=0)
    assert unit_of(model.layers[1]) == Unit("layers.1", "layers.1", ("layers.0", "layers.1"))
    assert unit_of(model.layers[2].up) == Unit("layers.2.up", "layers.2", ("layers.2", "layers.3"))
    assert unit_of(model.head) == Unit("head")
    assert unit_of(model) == unit_of(nn.Linear(2, 2)) == unit_of(None) == WHOLE_MODEL


def test_names_have_a_star_for_what_differs_between_blocks():
    unit = Unit("body.layers.1", "body.layers.1", ("body.layers.0", "body.layers.1"))
    assert unit.shared_name("body.layers.1.up.weight") == "body.layers.*.up.weight"
    assert unit.shared_name("body.layers.10.up.weight") == "body.layers.10.up.weight", "of another block"
    assert unit.name_in("body.layers.0", "body.layers.*.up.weight") == "body.layers.0.up.weight"
    assert unit.name_in("body.layers.0", "embedding.weight") == "embedding.weight"
    alone = Unit("layers.0", "layers.0", ("layers.0",))
    assert alone.shared_name("layers.0.up.weight") == "layers.0.up.weight"
    assert WHOLE_MODEL.shared_name("head.weight") == WHOLE_MODEL.name_in("", "head.weight") == "head.weight"


def test_layers_that_are_compiled_by_themselves_are_units():
    model = nn.Sequential(Layer(), Layer(), nn.Linear(8, 8))
    assert unit_in(model, model[0]) == Unit("0")
    for layer in model:
        layer.compile(backend="eager")
    assert unit_in(model, model[1]) == Unit("1", "1", ("0", "1"))
    assert unit_in(model, model[2]) == Unit("2"), "it has no equal"
    wrapped = nn.Sequential(torch.compile(model[0], backend="eager"), torch.compile(model[1], backend="eager"))
    assert unit_in(wrapped, model[0]) == Unit("0", "0", ("0", "1"))
