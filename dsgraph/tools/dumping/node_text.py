"""Texts of a node's parts for its record: target, arguments, sizes, module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dsgraph.passes.compat import OpOverload

from .records import Size


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a node's value."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


def size_of(size: Any) -> Size:
    """Return a size as a number, or as the text of a symbolic expression."""
    return size if type(size) is int else str(size)


def target_text(node: Node) -> str:
    """Return the name of what a node calls."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return str(target)
    name = getattr(target, "__qualname__", getattr(target, "__name__", type(target).__name__))
    module = getattr(target, "__module__", None) or ""
    module = {"_operator": "operator", "torch._VariableFunctions": "torch"}.get(module, module)
    return f"{module}.{name}" if module else str(name)


def call_text(node: Node) -> str:
    """Return the arguments of a node as Python text, in which `%name` stands for another node."""
    if node.op == "output":
        return _text(node.args[0] if node.args else ())
    parts = [_text(value) for value in node.args]
    parts += [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
    return ", ".join(parts)


def _text(value: Any) -> str:
    """Return an argument as Python text; `%name` for a node. A tensor or an unknown object is only described."""
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_text, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, OpOverload):
        return f"torch.ops.{value}"
    return f"<{getattr(value, '__qualname__', type(value).__name__)}>"


def module_path(path: str) -> str:
    """Return the path of a module from Dynamo's name of it."""
    path = re.sub(r"^[LG]\['[^']*'\]\.?", "", path)
    return re.sub(r"\.?_modules\['([^']*)'\]", r".\1", path).strip(".")
