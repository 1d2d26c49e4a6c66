"""Ops never make the host wait for the device: read from the sources, because a CPU has nothing to wait for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from dsgraph import inductor_ext

ROOT = Path(inductor_ext.__path__[0])
# Calls that read a tensor on the host.
_METHODS = {"item", "tolist", "nonzero", "masked_select", "unique", "numpy", "cpu"}
_NUMBERS = {"int", "float", "bool"}
# Function -> why it reads no tensor of a device, though no condition around the call says so.
ON_THE_CPU = {
    "compat.py:share_memory": "no tensors, but whether two storages are the same",
    "compat.py:size_hint": "no tensors, but sizes",
    "kernels/decoding/decode_attention.py:_sliced": "CUDA takes the Triton kernel",
    "kernels/launch.py:on_gpu": "no tensors, but a setting of Triton",
    "kernels/seeded_random.py:seeded_random": "the seed is made on the CPU",
    "quant/signs.py:reference": "the formula, to compare kernels with",
    "quant/signs_cpp.py:take_in": "a kernel in C++",
    "sparse/block_sparse_attention.py:_seeded": "the seed is made on the CPU",
    "sparse/custom.py:_pack": "layouts are made on the CPU",
    "sparse/custom.py:from_mask_mod": "layouts are made on the CPU",
    "sparse/layouts.py:density": "layouts are made on the CPU",
    "sparse/layouts.py:flops": "layouts are made on the CPU",
    "sparse/layouts.py:intersected": "layouts are made on the CPU",
    "sparse/patterns.py:__post_init__": "no tensors, but options",
    "sparse/row_buckets.py:_buckets": "layouts are made on the CPU",
    "transfers/buffer_pool.py:view": "host memory",
}


def waits_of(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield function, line and text of each call that may wait for a device and is not under a test for the CPU."""
    yield from _waits(ast.parse(source), "")


def _waits(node: ast.AST, function: str) -> Iterator[tuple[str, int, str]]:
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and _may_wait(node):
        yield function, node.lineno, ast.unparse(node)
    on_cpu = node.body if isinstance(node, ast.If) and "device.type == 'cpu'" in ast.unparse(node.test) else ()
    for child in ast.iter_child_nodes(node):
        if child not in on_cpu:
            yield from _waits(child, function)


def _may_wait(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):  # of a number that is written out, or of a length, there is nothing to wait for
        return call.func.id in _NUMBERS and bool(call.args) and not isinstance(call.args[0], ast.Constant)
    if not isinstance(call.func, ast.Attribute):
        return False
    copies = ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor")  # from pageable memory
    return call.func.attr in _METHODS or (copies and any(keyword.arg == "device" for keyword in call.keywords))


def test_ops_do_not_wait():
    found = {
        f"{file.relative_to(ROOT)}:{function}": f"line {line}: {text}"
        for file in sorted(ROOT.rglob("*.py"))
        for function, line, text in waits_of(file.read_text())
    }
    assert {name: text for name, text in found.items() if name not in ON_THE_CPU} == {}
    assert set(ON_THE_CPU) <= set(found), "a name of this list no longer reads a tensor"


def test_what_waits_is_found():
    source = """
def op(x):
    if x.device.type == "cpu":
        return x.item()
    weights = torch.tensor([1], device=x.device)
    return weights, int(x.sum()), x.tolist(), float("inf"), torch.tensor(1)
"""
    assert [line for _, line, _ in waits_of(source)] == [5, 6, 6]
