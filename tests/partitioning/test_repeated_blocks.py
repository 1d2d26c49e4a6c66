"""Which blocks `partition(regions=...)` captures as regions, and why not the others."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.compat.torch_version import why_no_regions
from dsgraph.partitioning.classes import overrides
from dsgraph.partitioning.repeated_blocks import find_blocks
from dsgraph.utils.errors import PartitionError

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(bool(why_no_regions()), reason=why_no_regions()),
]


class _Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(_Block() for _ in range(2))
        self.second = nn.ModuleList([_Block(), _Block(), _Block(8)])
        self.alone = _Block()


def _regions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in overrides(module)]


def test_equal_blocks_of_lists_are_regions_and_others_are_not():
    model = dsgraph.partition(_Net(), regions="auto")
    assert _regions(model) == ["first.0", "first.1", "second.0", "second.1"]
    assert _regions(dsgraph.partition(_Net())) == []


def test_a_name_takes_the_blocks_of_its_list_alone():
    assert _regions(dsgraph.partition(_Net(), regions=["second"])) == ["second.0", "second.1"]
    with pytest.raises(PartitionError, match=r"'third', which is no list of equal blocks; there are first, second"):
        dsgraph.partition(_Net(), regions=["third"])


def test_a_second_call_takes_in_new_blocks_and_keeps_the_old_ones():
    model = dsgraph.partition(_Net(), regions=["second"])
    model.second.append(_Block())
    assert _regions(dsgraph.partition(model)) == ["second.0", "second.1", "second.3"]
    around = nn.Sequential(model, nn.Linear(4, 4))
    assert _regions(dsgraph.partition(around)) == ["0.second.0", "0.second.1", "0.second.3"]


def test_layers_of_torch_with_parts_are_blocks_and_single_operations_are_not():
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "mlp": nn.Sequential(*[nn.Linear(8, 8)] * 2),
        }
    )
    assert _regions(dsgraph.partition(model, regions="auto")) == ["encoder.layers.0", "encoder.layers.1"]


def test_what_cannot_be_a_region_is_told():
    model = _Net()
    model.first[1].forward = MethodType(lambda self, x: x, model.first[1])
    model.second[0].linear.track_running_stats = True
    found = find_blocks(model, "auto")
    assert found.blocks == {model.first[0], model.second[1]}
    assert found.left_out == (
        "first.1: no region, a forward was put in place of its class's",
        "second.0: no region, its linear writes running statistics to buffers",
    )


def test_batch_norm_in_blocks_is_told():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
    (line,) = dsgraph.partition(nn.ModuleList([model]), regions="auto")._dsgraph.partition.no_regions
    assert line == "0.0, 0.1: no region, its 1 writes running statistics to buffers"
