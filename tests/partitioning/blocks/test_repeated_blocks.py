"""Which blocks `partition(blocks=...)` takes, and which not."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.blocks.repeated_blocks import is_block
from dsgraph.utils.errors import PartitionError

pytestmark = pytest.mark.usefixtures("one_rank")


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


def _blocks(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_block(module)]


def test_equal_blocks_of_lists_are_blocks_and_others_are_not():
    assert _blocks(dsgraph.partition(_Net(), blocks="auto")) == ["first.0", "first.1", "second.0", "second.1"]
    assert _blocks(dsgraph.partition(_Net(), blocks="none")) == []


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_the_default_takes_all_blocks_at_stage_3_alone(stage):
    assert len(_blocks(dsgraph.partition(_Net(), stage=stage))) == (4 if stage == 3 else 0)


def test_a_name_takes_the_blocks_of_its_list_alone():
    assert _blocks(dsgraph.partition(_Net(), blocks=["second"])) == ["second.0", "second.1"]
    with pytest.raises(PartitionError, match=r"'third', which is no list of equal blocks; there are first, second"):
        dsgraph.partition(_Net(), blocks=["third"])


def test_a_second_call_takes_in_new_blocks_and_keeps_the_old_ones():
    model = dsgraph.partition(_Net(), blocks=["second"])
    model.second.append(_Block())
    assert _blocks(dsgraph.partition(model)) == ["second.0", "second.1", "second.3"]
    around = nn.Sequential(model, nn.Linear(4, 4))
    assert _blocks(dsgraph.partition(around)) == ["0.second.0", "0.second.1", "0.second.3"]


class _Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def _parametrized() -> nn.Module:
    linear = nn.Linear(8, 8)
    for _ in range(2):
        nn.utils.parametrize.register_parametrization(linear, "weight", _Swish())
    return linear


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False),
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))),
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
        lambda: nn.Sequential(nn.Linear(8, 8), _Swish(), nn.Linear(8, 8), _Swish(), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.ModuleList([_Block(), _Block()]), *(nn.Linear(8, 8) for _ in range(2))),
        _parametrized,
    ],
    ids=[
        "torch's layers",
        "torch's lists",
        "torch's operations",
        "small in a list",
        "small in a model",
        "parametrized",
    ],
)
def test_what_dynamo_skips_and_what_is_too_small_are_no_blocks(make):
    assert _blocks(dsgraph.partition(make(), blocks="auto")) == []


def test_torchs_layers_cannot_be_named():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)
    with pytest.raises(PartitionError, match=r"'layers', which is no list of equal blocks; .* Torch's own modules are"):
        dsgraph.partition(encoder, blocks=["layers"])


def test_torchs_layers_do_not_make_a_small_list_large():
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    model = nn.ModuleDict({"large": nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)})
    model["small"] = nn.ModuleList([_Block(), _Block()])
    assert _blocks(dsgraph.partition(model, blocks="auto")) == []


def test_a_forward_that_was_put_in_place_of_the_classs_stays_the_users():
    model = _Net()
    model.first[1].forward = MethodType(lambda self, x: x, model.first[1])
    assert _blocks(dsgraph.partition(model, blocks="auto")) == ["first.0", "second.0", "second.1"]


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ("all", r"blocks is 'all'; it takes 'auto', 'none' or a list of names"),
        (["secon"], r"'secon', which is no list of equal blocks; did you mean 'second'\?; there are first, second"),
    ],
)
def test_other_values_are_refused(blocks, said):
    with pytest.raises(PartitionError, match=said):
        dsgraph.partition(_Net(), blocks=blocks)
