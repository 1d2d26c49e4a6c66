"""Adds calls to a captured graph, with their fake values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from dsgraph.passes.compat import fake_mode_of

from .matching import fake_of


def add_call(node: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Node:
    """Add a call of a function, or of a method by its name, at the insertion point of a node's graph.

    It has its own fake value; other metadata is that of the node.
    """
    add = node.graph.call_method if isinstance(target, str) else node.graph.call_function
    call = add(target, args, dict(kwargs))
    values, named = map_arg((args, dict(kwargs)), fake_of)
    with fake_mode_of(fake_of(node)), torch.no_grad():
        call.meta = meta_like(node, compute(target, values, named))
    return call


def compute(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Call a function, or a method of the first argument by its name."""
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def meta_like(node: Node, value: Any) -> dict[str, Any]:
    """Return the metadata of a node, for another value."""
    kept = {key: item for key, item in node.meta.items() if key not in ("example_value", "val")}
    return {**kept, "example_value": value}


def with_gradient_as(plain: Any, made: Any) -> Any:
    """Return `made` with `requires_grad` if `plain`, the graph's own value, needs a gradient: other matches read it."""
    return made.detach().requires_grad_(plain.requires_grad) if isinstance(plain, Tensor) else made
