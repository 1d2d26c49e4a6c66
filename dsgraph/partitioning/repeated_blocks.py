"""Repeated blocks of a model, whose forward Dynamo captures once as a region and calls for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn

from dsgraph.compat.torch_version import why_no_regions
from dsgraph.utils.errors import PartitionError
from dsgraph.utils.nearest import nearest

from .classes import overrides, plain_class

Blocks = Literal["auto", "none"] | tuple[str, ...]
"""Selection of the lists of modules that hold blocks: all lists of equal modules, none, or those of these names."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """The blocks of a model.

    Attributes:
        blocks: The modules that are captured as regions.
        left_out: Other equal modules, and why they are not captured; one line a list of modules and reason.
    """

    blocks: frozenset[nn.Module] = frozenset()
    left_out: tuple[str, ...] = ()


def find_blocks(model: nn.Module, chosen: Blocks) -> RepeatedBlocks:
    """Find the modules that are captured as regions.

    Args:
        model: The model that is about to be partitioned; blocks of earlier calls stay blocks.
        chosen: The argument `regions` of `partition`.

    Raises:
        PartitionError: A name is not that of a list with two equal blocks, and the model has no blocks yet; or torch is
            older than 2.13.
    """
    if chosen == "none":
        return RepeatedBlocks()
    if problem := why_no_regions():
        raise PartitionError(problem)
    known = {module for module in model.modules() if "forward" in overrides(module)}
    found = dict(repeated_blocks(model))
    names = list(found) if chosen == "auto" else chosen
    for name in names:
        if name not in found and not known:
            raise PartitionError(
                f"regions names {name!r}, which is no list of equal blocks{nearest(name, list(found))}; there are "
                f"{', '.join(found) or 'none'}"
            )
    equal = {f"{name}.{key}": block for name in names for key, block in found.get(name, {}).items()}
    reasons = {name: _why_not(block) for name, block in equal.items()}
    left_out: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason:
            left_out.setdefault(reason, []).append(name)
    return RepeatedBlocks(
        frozenset(known.union(block for name, block in equal.items() if not reasons[name])),
        tuple(f"{', '.join(names)}: no region, {reason}" for reason, names in left_out.items()),
    )


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the outermost lists of modules, with those of their modules, by name, that have an equal in the list."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        structures: dict[Hashable, dict[str, nn.Module]] = {}
        for key, block in module.named_children():
            structures.setdefault(_structure(block), {})[key] = block
        blocks = {key: block for same in structures.values() if len(same) > 1 for key, block in same.items()}
        blocks = {key: block for key, block in blocks.items() if _computes(block)}
        if blocks:
            yield name, blocks
            inside = f"{name}."


def _computes(block: nn.Module) -> bool:
    """Return whether a block is large enough: torch's own modules of one operation are too small."""
    return not type(block).__module__.startswith("torch.") or any(True for _ in block.children())


def _why_not(block: nn.Module) -> str:
    """Return why a block cannot be captured as a region; empty if it can."""
    if "forward" in block.__dict__:
        return "a forward was put in place of its class's"
    for name, module in block.named_modules():
        if getattr(module, "track_running_stats", False):
            return f"its {name or type(module).__name__} writes running statistics to buffers"
    return ""


def _structure(block: nn.Module) -> Hashable:
    parts = tuple((name, plain_class(module)) for name, module in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    buffers = tuple((name, tuple(buffer.shape), buffer.dtype) for name, buffer in block.named_buffers())
    return parts, parameters, buffers


def region_methods(module: nn.Module, blocks: Collection[nn.Module]) -> Mapping[str, Any]:
    """Return the overrides by which a module's forward is captured as a region, if it is one of `blocks`."""
    if module not in blocks:
        return {}
    return {"forward": _as_region(plain_class(module).forward)}


def _as_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, captured as a region.

    A region must not return one of its arguments: such results are added again outside it.
    """

    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _without(forward(self, *args, **kwargs), (*args, *kwargs.values()))

    region = torch.compiler.nested_compile_region(compute)

    @wraps(forward)
    def forward_as_region(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _put_back(region(self, *args, **kwargs), (*args, *kwargs.values()))

    return forward_as_region


@dataclass(frozen=True)
class _Given:
    """A placeholder of an argument that a block returns."""

    number: int


def _without(found: Any, given: tuple[Any, ...]) -> Any:
    if type(found) is tuple:
        return tuple(_without(item, given) for item in found)
    if not isinstance(found, torch.Tensor):
        return found
    number = next((at for at, value in enumerate(given) if value is found), None)
    return found if number is None else _Given(number)


def _put_back(found: Any, given: tuple[Any, ...]) -> Any:
    if type(found) is tuple:
        return tuple(_put_back(item, given) for item in found)
    return given[found.number] if isinstance(found, _Given) else found


def read_blocks(value: object) -> Blocks:
    """Check the argument `regions` of `partition`.

    Raises:
        PartitionError: The value is not supported.
    """
    if value in ("auto", "none"):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise PartitionError(
        f"regions is {value!r}; it takes 'auto', 'none' or a list of names of module lists, such as ['model.layers']"
    )
