from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsgraph.inductor_ext import kernels
from dsgraph.inductor_ext.kernels.launch import on_device_of, sum_over_rows
from examples import custom_kernel

FILES = sorted(Path(kernels.__path__[0]).rglob("*.py"))


def _launches(node: ast.AST, on_device: bool = False) -> Iterator[tuple[str, bool]]:
    """The calls `kernel[grid](...)` below a node, each with whether it stands under `with on_device_of(...)`."""
    if isinstance(node, ast.With):
        on_device = on_device or any("on_device_of(" in ast.unparse(item) for item in node.items)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
        name = ast.unparse(node.func.value)
        if name.endswith("kernel"):
            yield name, on_device
    for child in ast.iter_child_nodes(node):
        yield from _launches(child, on_device)


def test_every_launch_is_on_the_device_of_its_tensors():
    found = {(file.name, *launch) for file in FILES for launch in _launches(ast.parse(file.read_text()))}
    assert len(found) >= 8
    assert {launch for launch in found if not launch[-1]} == set()


def test_the_device_of_a_tensor_becomes_the_current_one():
    with on_device_of(torch.zeros(1)):  # on the CPU nothing happens, with CUDA or without
        pass
    with FakeTensorMode():
        context = on_device_of(torch.empty(1, device="cuda:1"))
    assert isinstance(context, torch.cuda.device) and context.idx == 1


@pytest.mark.parametrize("file", [*FILES, Path(custom_kernel.__file__)], ids=lambda file: file.name)
def test_offsets_of_large_tensors_do_not_overflow(file):
    assert re.findall(r"program_id\(0\) \* ", file.read_text()) == []


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4), (3, 0)])
def test_sums_over_rows(shape):
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    total = sum_over_rows(x)
    assert torch.equal(total, x.sum(list(range(x.ndim - 1))) if x.ndim > 1 else x)
    assert total.numel() == 0 or total.data_ptr() != x.data_ptr()
