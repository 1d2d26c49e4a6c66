"""Passes and ops name no CUDA device without its number: that would be the current one, on whichever thread runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from dsgraph import inductor_ext, passes

# File -> what it may make without a number.
ALLOWED = {"compat.py": ["torch.device(device_type)"]}  # a process group has one backend for all devices of a type
ROOTS = [Path(package.__path__[0]) for package in (passes, inductor_ext)]


def devices_of(source: str) -> Iterator[str]:
    """Yield each call with "cuda", or with a device type, as an argument that is a device."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        makes = ast.unparse(call.func) == "torch.device" and len(call.args) == 1
        takes = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
        takes += call.args if makes or (isinstance(call.func, ast.Attribute) and call.func.attr == "to") else []
        if any(_is_kind(value) for value in takes):
            yield ast.unparse(call)


def _is_kind(value: ast.expr) -> bool:
    text = ast.unparse(value)
    return text == "'cuda'" or text.endswith(("device_type", "device.type"))


def test_no_pass_and_no_op_makes_a_device_without_a_number():
    files = [file for root in ROOTS for file in sorted(root.rglob("*.py"))]
    assert len(files) > 100
    assert {file.name: found for file in files if (found := list(devices_of(file.read_text())))} == ALLOWED


def test_what_lacks_a_number_is_found():
    found = """
torch.device("cuda")
torch.ones(2, device="cuda")
x.to(facts.device_type)
x.new_zeros(2, device=torch.device(y.device.type))
"""
    assert len(list(devices_of(found))) == 4
    right = 'torch.device("cuda", 0)\nx.to(y.device)\ndefault_links(backend, device_type="cuda")\ntorch.device("cpu")\n'
    assert list(devices_of(right)) == []
