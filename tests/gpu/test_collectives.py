"""The collectives that graphs contain, in a group of one rank: NCCL's forms, dtypes, in-place rule and lifetimes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsgraph.compat import process_groups
from dsgraph.inductor_ext import backend_name, c10d_functional
from tests.gpu.device import ON_CUDA, synchronize

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
wait = c10d_functional.wait_tensor


def group_name() -> Any:
    return dist.group.WORLD.group_name


def test_the_group_is_the_device_s(device, record):
    group = dist.group.WORLD
    record(backend=backend_name(group, device.type), timeout=str(process_groups.group_timeout(group, device.type)))
    assert backend_name(group, device.type) == ("nccl" if ON_CUDA else "gloo")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, device):
    x = torch.ones(64, 8, device=device).to(dtype)
    assert torch.equal(wait(c10d_functional.all_gather_into_tensor(x, 1, group_name())), x)
    if dtype is not torch.bool:
        assert torch.equal(wait(c10d_functional.reduce_scatter_tensor(x, "sum", 1, group_name())), x)
        assert torch.equal(wait(c10d_functional.all_reduce(x, "sum", group_name())), x)


FORMS: dict[str, Callable[[Tensor, Any], Any]] = {
    "all_gather": lambda x, g: c10d_functional.all_gather_into_tensor(x, 1, g),
    "all_gather_coalesced": lambda x, g: c10d_functional.all_gather_into_tensor_coalesced([x, x], 1, g),
    "reduce_scatter sum": lambda x, g: c10d_functional.reduce_scatter_tensor(x, "sum", 1, g),
    "reduce_scatter avg": lambda x, g: c10d_functional.reduce_scatter_tensor(x, "avg", 1, g),
    "reduce_scatter_coalesced": lambda x, g: c10d_functional.reduce_scatter_tensor_coalesced([x, x], "sum", 1, g),
    "all_reduce sum": lambda x, g: c10d_functional.all_reduce(x, "sum", g),
    "all_reduce avg": lambda x, g: c10d_functional.all_reduce(x, "avg", g),
    "all_reduce max": lambda x, g: c10d_functional.all_reduce(x, "max", g),
    "all_reduce_coalesced": lambda x, g: c10d_functional.all_reduce_coalesced([x, x], "sum", g),
    "all_to_all": lambda x, g: c10d_functional.all_to_all_single(x, [64], [64], g),
    "broadcast": lambda x, g: c10d_functional.broadcast(x, 0, g),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forms(form, dtype, device):
    if not ON_CUDA and "avg" in form:
        pytest.skip("gloo has no averages")
    x = torch.randn(64, 8, device=device).to(dtype)
    kept = x.clone()
    result = FORMS[form](x, group_name())
    for y in result if isinstance(result, (list, tuple)) else [result]:
        assert torch.equal(wait(y), kept)
    assert torch.equal(x, kept), "the input was written to"


def test_two_gathers_in_place_that_are_waited_for_late(device):
    first, second = (torch.randn(2**22, device=device) for _ in range(2))
    expected = first.clone(), second.clone()
    for x in (first, second):
        c10d_functional.all_gather_into_tensor_out(x, 1, group_name(), out=x)
    for x in (second, first, first):
        wait(x)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


@pytest.mark.parametrize("form", ["all_gather", "reduce_scatter sum", "all_gather_coalesced", "all_to_all"])
def test_an_input_that_is_freed_before_the_wait(form, device):
    """A tensor that gets the freed memory must not be sent in place of the input."""
    size = (64, 2**18) if ON_CUDA else (64, 64)
    wrong = 0
    for number in range(20):
        x = torch.full(size, float(number), device=device)
        results = FORMS[form](x, group_name())
        del x
        other = torch.full(size, -1.0, device=device)
        for y in results if isinstance(results, (list, tuple)) else [results]:
            wrong += int((wait(y) != number).any())
        del other
    assert wrong == 0


@pytest.mark.inductor
@pytest.mark.parametrize("form", FORMS)
def test_forms_that_inductor_compiles(form, device):
    if not ON_CUDA and "avg" in form:
        pytest.skip("gloo has no averages")
    name = group_name()

    def function(x: Tensor) -> Tensor:
        result = FORMS[form](x * 2, name)
        results = result if isinstance(result, (list, tuple)) else [result]
        return sum(wait(y) for y in results) + 1

    x = torch.randn(64, 8, device=device)
    count = 2 if "coalesced" in form else 1
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), 2 * x * count + 1)


@pytest.mark.alone
def test_time_that_the_host_needs_for_a_collective(device, record):
    x, whole = torch.randn(2**16, device=device), torch.empty(2**16, device=device)
    many = [torch.randn(2**14, device=device) for _ in range(16)]
    gather, name = c10d_functional.all_gather_into_tensor, group_name()

    def microseconds(function: Callable[[], object], times: int) -> float:
        function()
        synchronize()
        started = time.perf_counter()
        for _ in range(times):
            function()
        return round(1e6 * (time.perf_counter() - started) / times, 1)

    record(
        all_gather=microseconds(lambda: wait(gather(x, 1, name)), 200),
        all_gather_out=microseconds(
            lambda: wait(c10d_functional.all_gather_into_tensor_out(x, 1, name, out=whole)), 200
        ),
        coalesced_of_16=microseconds(
            lambda: [wait(y) for y in c10d_functional.all_gather_into_tensor_coalesced(many, 1, name)], 30
        ),
    )
