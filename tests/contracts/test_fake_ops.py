"""Each op of `dsgraph::` has a fake result on the GPU of its tensors: what compiled graphs are planned by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import dsgraph  # noqa: F401  # defines the ops
from dsgraph.inductor_ext.kernels import seeded_random  # noqa: F401  # defines its op where a pipeline is split
from dsgraph.sparse import Fixed
from tests.inductor_ext.kernels import test_layouts

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_COMMON = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}
_SPARSE = {"scale": 0.3, "dropout_p": 0.1, "causal": True}
# Op -> its results that are on the CPU: handles of transfers, and the seed of a kernel that is given it by the host.
ON_THE_CPU = {
    "offload": {0},
    "finish_offload": {0},
    "fetch_parameter": {0},
    "block_sparse_attention": {2},
}


def _ops() -> set[str]:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsgraph::"))
    # test_collectives.py defines an op to read its entry in the table.
    own = {name.removeprefix("dsgraph::") for name in names if not name.endswith("_of_a_test")}
    return own - {"run_forward", "run_backward"}  # nodes of the graph of a step, which are never called


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)


def _wide(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _bytes(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.uint8)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _collectives(group: str) -> dict[str, Call]:
    """Op -> arguments, for a group of eight ranks."""
    dtypes = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32, "group": group, "outer_groups": []}
    compressed = (_wide(64, 16), _wide(1024), _wide(128), _wide(2))
    return {
        "gather_param": ((_wide(8, 16), None, [64, 16]), dtypes),
        "reduce_grad": ((_empty(64, 16), [8, 16]), dtypes),
        "reduce_compressed": ((_empty(64, 16), [8, 16], *compressed), {"group": group, "splits_rows": True}),
        "compress_momentum": ((_empty(64, 16), _wide(64, 16), _wide(1024), _wide(2), 8), {}),
        "compress_average": ((_bytes(8, 20), _wide(128), 128), {}),
        "gather_by_messages": ((_empty(8, 16), 8, group), {}),
        "gather_by_messages_coalesced": (([_empty(8, 16), _wide(8)], 8, group), {}),
        "exchange_by_messages": ((_empty(64, 16), 8, group), {}),
        "exchange_by_messages_coalesced": (([_empty(64, 16), _wide(64)], 8, group), {}),
        "enter_slices": ((_empty(4, 16), group), {}),
        "sum_slices": ((_empty(4, 16), group), {}),
        "scatter_sum": ((_empty(4, 16), 1, 1, 8, group), {}),
        "gather_entered": ((_empty(4, 16), 1, 1, 8, group), {}),
        "own_slice": ((_empty(4, 16), 1, 1, 8, group), {}),
        "gather_slices": ((_empty(4, 16), 1, 1, 8, group), {}),
        "multiply_sliced_weight": ((_empty(4, 64), _bytes(16, 2, 16), _wide(16, 2), _wide(16, 2), 0, 1, 8, group), {}),
        "write_heads": ((_empty(2, 1, 64, 32), _empty(2, 8, 4, 32), _empty(4, dtype=torch.int64), 8, group), {}),
    }


def _attentions() -> dict[str, Call]:
    q, layout = _empty(2, 4, 64, 32), Fixed(block=16).text
    sums, seed = _wide(2, 4, 64), torch.empty(1, dtype=torch.int64, device=CPU)
    dense = {"keeps": True, "fill": float("-inf"), "scale": 0.3, "dropout_p": 0.0, "causal": False}
    cache, visible = _empty(2, 2, 64, 32), _empty(2, 1, 1, 64, dtype=torch.bool)
    one = (_empty(2, 4, 1, 32), cache, cache, visible)
    return {
        "attention": ((q, q.mT, q, None, None), {**dense, "dtype": torch.bfloat16, "contiguous": True}),
        "block_sparse_attention": ((q, q, q, None, None, layout), _SPARSE),
        "block_sparse_attention_backward": (
            (q, q, q, q, q, sums, seed, None, None, layout),
            {**_SPARSE, "bias_needs_grad": False},
        ),
        "decode_attention": (one, {"scale": 0.3}),
        "decode_attention_product": ((*one, 0.3), {}),
    }


def _products() -> dict[str, Call]:
    x, bytes_of_groups, of_groups = _empty(4, 64), _bytes(16, 2, 16), _wide(16, 2)
    weight, target = _empty(100, 64), _empty(4, dtype=torch.int64)
    return {
        "skinny_linear": ((x, _empty(16, 64, dtype=torch.int8), None, _wide(16)), {}),
        "skinny_product": ((x, _empty(16, 64, dtype=torch.int8), None, _wide(16)), {}),
        "skinny_groups": ((x, bytes_of_groups, of_groups, of_groups), {}),
        "skinny_product_groups": ((x, bytes_of_groups, of_groups, of_groups, None), {}),
        "linear_cross_entropy": ((x, weight, target), {}),
        "linear_cross_entropy_rows": ((x, weight, target, None), _COMMON),
        "linear_cross_entropy_grads": (
            (x, weight, target, None, _wide(4)),
            {"needs": [True, True, False], **_COMMON},
        ),
        "seeded_random": ((torch.empty(1, dtype=torch.int64, device=CPU), x, False), {}),
        "pack_signs": ((_wide(8, 128), 1000), {}),
        "unpack_signs": ((_bytes(8, 20), 128), {}),
        "fake_quantize": (
            (_empty(16, 64), _wide(3)),
            {"groups": 4, "transposed": False, "symmetric": True, "stochastic": False},
        ),
    }


def _transfers() -> dict[str, Call]:
    x, handle = _empty(8, 16), torch.empty(1, dtype=torch.int64, device=CPU)
    return {
        "offload": ((x, "host"), {}),
        "finish_offload": ((handle, x), {}),
        "reload": ((handle, [8, 16], [16, 1], torch.bfloat16, GPU), {}),
        "wait_transfer": ((x,), {}),
        "fetch_parameter": ((x,), {}),
        "take_parameter": ((handle, x), {}),
        "store_gradient": ((x, x), {}),
    }


@pytest.fixture
def calls(fake_ranks) -> Iterator[dict[str, Call]]:
    """Op -> sample arguments, fake tensors on a GPU that is not there."""
    with FakeTensorMode(), torch.no_grad():
        with GPU:
            of_layouts = test_layouts.calls(torch.empty(4, test_layouts.N))
        of_group = _collectives(dist.group.WORLD.group_name)
        yield {**of_layouts, **of_group, **_attentions(), **_products(), **_transfers()}


def test_each_op_has_results_on_the_device_of_its_tensors(calls):
    assert _ops() - set(calls) == set(), "ops without a call in this file"
    wrong = {}
    for name, (args, options) in calls.items():
        results = pytree.tree_leaves(getattr(torch.ops.dsgraph, name)(*args, **options))
        devices = [item.device for item in results if isinstance(item, Tensor)]
        expected = [CPU if place in ON_THE_CPU.get(name, ()) else GPU for place in range(len(devices))]
        if devices != expected or not devices:
            wrong[name] = devices
    assert wrong == {}
