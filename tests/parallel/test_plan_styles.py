"""Styles of a plan, as transformers spells them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgraph.parallel.tensor.tensor_plan import plan_by_names
from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import PartitionError

STYLES = {
    "colwise": {"up.weight": Slice(0), "up.bias": Slice(0)},
    "colwise_gather_output": {"up.weight": Slice(0), "up.bias": Slice(0)},
    "packed_colwise": {"up.weight": Slice(0, 2), "up.bias": Slice(0, 2)},
    "rowwise": {"up.weight": Slice(1)},
    "rowwise_split_input": {"up.weight": Slice(1)},
    "packed_rowwise": {"up.weight": Slice(1, 2)},
    "mla_kv_a_proj": {},
    "replicated_with_grad_allreduce": {},
    "moe_tp_experts": {},
}


class _Model(nn.Module):
    base_model_prefix = "inner"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"table": nn.Embedding(8, 4), "layers": nn.ModuleList(_Layer() for _ in range(2))})
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.inner["table"].weight
        self._tp_plan = {"inner.layers.*.shared_experts.up": "colwise"}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = nn.Linear(4, 8), nn.Parameter(torch.zeros(2, 8, 4))


@pytest.mark.parametrize("style", STYLES)
def test_each_style_is_a_slice_of_the_layer(style):
    found = plan_by_names(_Model(), {"inner.layers.*.up": style})
    assert found == {f"inner.layers.{layer}.{name}": held for layer in (0, 1) for name, held in STYLES[style].items()}


def test_names_of_the_base_model_and_of_parameters():
    found = plan_by_names(_Model(), {"layers.*.experts": "packed_colwise", "table": "embedding_rowwise"})
    assert found == {
        **{f"inner.layers.{layer}.experts": Slice(1, 2) for layer in (0, 1)},
        "inner.table.weight": Slice(0),
    }
    assert plan_by_names(_Model(), {"layers.0.experts": "rowwise"}) == {"inner.layers.0.experts": Slice(2)}


def test_a_later_entry_replicates_a_layer():
    found = plan_by_names(_Model(), {"layers.*.up": "rowwise", "layers.1.up": "replicate"})
    assert found == {"inner.layers.0.up.weight": Slice(1)}


def test_tied_parameters_are_one_and_are_not_sharded_in_two_ways():
    assert plan_by_names(_Model(), {"head": "colwise"}) == {"inner.table.weight": Slice(0)}
    with pytest.raises(PartitionError, match=r"'inner.table.weight' and 'head.weight' are one parameter"):
        plan_by_names(_Model(), {"table": "embedding_colwise", "head": "colwise"})


def test_a_plan_of_transformers_may_name_modules_that_the_model_lacks():
    model = _Model()
    assert plan_by_names(model, model._tp_plan) == {}
    with pytest.raises(PartitionError, match=r"no module or parameter is called 'layers.*.down'"):
        plan_by_names(model, {"layers.*.down": "rowwise"})


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("ep_dispatch_experts", "gives each rank some experts.*use 'packed_colwise'"),
        ("grouped_gemm", "gives each rank some experts"),
        ("sequence_parallel", "remove it, and compile with sequence_parallel=True"),
        ("columns", r"it takes ColwiseParallel\(\).*colwise, .*embedding_rowwise"),
    ],
)
def test_styles_that_are_not_supported_are_named(style, message):
    with pytest.raises(PartitionError, match=rf"plan\['layers.\*.up'\] is '{style}'.*{message}"):
        plan_by_names(_Model(), {"layers.*.up": style})


def test_every_style_of_transformers_is_known():
    styles = pytest.importorskip("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    for style in styles:
        try:
            plan_by_names(_Model(), {"table": style})
        except PartitionError as error:
            assert "it takes" not in str(error), style


def test_an_empty_plan_is_refused():
    with pytest.raises(PartitionError, match=r"it is empty.*use plan='auto'"):
        plan_by_names(_Model(), {})
