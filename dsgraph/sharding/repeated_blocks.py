"""Repeated blocks of a model, whose forward Dynamo captures once as a region and calls for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn

from dsgraph.errors import PartitionError
from dsgraph.nearest import nearest

from .classes import plain_class

Blocks = Literal["auto", "none"] | tuple[str, ...]
"""Which lists of modules hold blocks: all whose modules are alike, none, or those of these names."""


def block_classes(model: nn.Module, blocks: Blocks) -> frozenset[type[nn.Module]]:
    """The classes of the modules that are captured as regions.

    Args:
        model: What is about to be partitioned.
        blocks: The argument `regions` of `partition`.

    Raises:
        PartitionError: A name is that of no list with two equal blocks.
    """
    if blocks == "none":
        return frozenset()
    found = dict(_repeated(model))
    if blocks == "auto":
        return frozenset(kind for kinds in found.values() for kind in kinds)
    for name in blocks:
        if name not in found:
            raise PartitionError(
                f"regions names {name!r}, which is no list of equal blocks{nearest(name, list(found))}; there are "
                f"{', '.join(found) or 'none'}"
            )
    return frozenset(kind for name in blocks for kind in found[name])


def _repeated(model: nn.Module) -> Iterator[tuple[str, frozenset[type[nn.Module]]]]:
    """Lists of modules outside other such lists, with the classes of which they hold two equal ones."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        structures: dict[Hashable, list[type[nn.Module]]] = {}
        for block in module:
            structures.setdefault(_structure(block), []).append(plain_class(block))
        kinds = frozenset(same[0] for same in structures.values() if len(same) > 1 and _computes(same[0]))
        if kinds:
            yield name, kinds
            inside = f"{name}."


def _computes(kind: type[nn.Module]) -> bool:
    """Whether a block is one of a model: layers of torch's own are too small, and all share their class."""
    return not kind.__module__.startswith("torch.")


def _structure(block: nn.Module) -> Hashable:
    parts = tuple((name, plain_class(module)) for name, module in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    buffers = tuple((name, tuple(buffer.shape), buffer.dtype) for name, buffer in block.named_buffers())
    return parts, parameters, buffers


def region_methods(original: type[nn.Module], classes: frozenset[type[nn.Module]]) -> Mapping[str, Any]:
    """What a partitioned module of class `original` overrides so that its forward is captured as a region."""
    if original not in classes:
        return {}
    return {"forward": _as_region(original.forward)}


def _as_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, captured as a region. A region may not return what it was given: that is put back outside it."""

    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        return _without(found, (*args, *kwargs.values())) if type(found) is tuple else found

    region = torch.compiler.nested_compile_region(compute)

    @wraps(forward)
    def forward_as_region(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = region(self, *args, **kwargs)
        return _put_back(found, (*args, *kwargs.values())) if type(found) is tuple else found

    return forward_as_region


@dataclass(frozen=True)
class _Given:
    """Stands for an argument that a block returns."""

    number: int


def _without(found: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    results: list[Any] = []
    for item in found:
        number = next((at for at, value in enumerate(given) if isinstance(item, torch.Tensor) and value is item), None)
        results.append(item if number is None else _Given(number))
    return tuple(results)


def _put_back(found: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(given[item.number] if isinstance(item, _Given) else item for item in found)


def read_blocks(value: object) -> Blocks:
    """Checks the argument `regions` of `partition`.

    Raises:
        PartitionError: It is none of what it takes.
    """
    if value in ("auto", "none"):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise PartitionError(
        f"regions is {value!r}; it takes 'auto', 'none' or a list of names of module lists, such as ['model.layers']"
    )
