"""Repeated blocks of a model: equal modules of a list."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from typing import Literal

import torch
from torch import nn

from dsgraph.partitioning.classes import overrides, plain_class
from dsgraph.utils.errors import PartitionError
from dsgraph.utils.nearest import nearest

Blocks = Literal["auto", "none"] | tuple[str, ...]
"""Selection of the lists of modules that hold blocks: all lists of equal modules, none, or those of these names."""


IS_BLOCK = "_dsgraph_is_block"
"""Among the overrides of a module's class: the module is a repeated block."""


def is_block(module: nn.Module) -> bool:
    """Return True for a repeated block of a partitioned model."""
    return IS_BLOCK in overrides(module)


def find_blocks(model: nn.Module, chosen: Blocks) -> frozenset[nn.Module]:
    """Find the modules whose forwards are frames of their own.

    Args:
        model: The model that is about to be partitioned; blocks of earlier calls stay blocks.
        chosen: The argument `blocks` of `partition`.

    Raises:
        PartitionError: A name is not that of a list with two equal blocks, and the model has no blocks yet.
    """
    if chosen == "none":
        return frozenset()
    known = frozenset(filter(is_block, model.modules()))
    lists = {
        name: [block for block in blocks.values() if not is_of_torch(block)] for name, blocks in repeated_blocks(model)
    }
    found = {name: blocks for name, blocks in lists.items() if blocks}
    if chosen == "auto":
        large = [blocks for name, blocks in found.items() if _hold_most(blocks, model.get_submodule(name))]
        equal = [block for blocks in large for block in blocks]
        return known | _without_replaced(equal if _hold_most(equal, model) else ())
    for name in chosen:
        if name not in found and not known:
            raise PartitionError(
                f"blocks names {name!r}, which is no list of equal blocks{nearest(name, list(found))}; there are "
                f"{', '.join(found) or 'none'}. Torch's own modules are no blocks"
            )
    return known | _without_replaced(block for name in chosen for block in found.get(name, ()))


def is_of_torch(block: nn.Module) -> bool:
    """Return True for a module with a forward of torch, which Dynamo does not capture by itself."""
    return plain_class(block).forward.__module__.startswith("torch.")


def _without_replaced(blocks: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Return the blocks without those whose forward the user has replaced."""
    return frozenset(block for block in blocks if "forward" not in block.__dict__)


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the outermost lists of modules, with those of their modules, by name, that have an equal in the list."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or type(module).__module__.startswith(
            "torch.nn.utils"
        ):
            continue
        structures: dict[Hashable, dict[str, nn.Module]] = {}
        for key, block in module.named_children():
            structures.setdefault(structure_of(block), {})[key] = block
        blocks = {key: block for same in structures.values() if len(same) > 1 for key, block in same.items()}
        blocks = {key: block for key, block in blocks.items() if _computes(block)}
        if blocks:
            yield name, blocks
            inside = f"{name}."


def _hold_most(blocks: Iterable[nn.Module], module: nn.Module) -> bool:
    """Return whether most of the innermost modules of `module` are inside blocks, so that compiling them once pays."""
    inside = sum(map(_innermost, blocks))
    return 2 * inside > _innermost(module)


def _innermost(module: nn.Module) -> int:
    return sum(not any(True for _ in inner.children()) for inner in module.modules())


def _computes(block: nn.Module) -> bool:
    """Return whether a block is large enough: torch's own modules of one operation are too small."""
    return not type(block).__module__.startswith("torch.") or any(True for _ in block.children())


def structure_of(block: nn.Module) -> Hashable:
    """Return what equal blocks have in common: classes of modules, and names, shapes and dtypes of tensors."""
    parts = tuple((name, plain_class(module)) for name, module in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    buffers = tuple((name, tuple(buffer.shape), buffer.dtype) for name, buffer in block.named_buffers())
    return parts, parameters, buffers


def is_plain(value: object) -> bool:
    """Return True if a value contains only tensors, numbers, text, dtypes, devices, enumerations, lists and dicts.

    A graph that reads another object, such as a cache, is rarely equal to that of another block.
    """
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(item) for item in value.values())
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str, Enum, torch.dtype, torch.device))


def read_blocks(value: object) -> Blocks:
    """Check the argument `blocks` of `partition`.

    Raises:
        PartitionError: The value is not supported.
    """
    if value in ("auto", "none"):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise PartitionError(
        f"blocks is {value!r}; it takes 'auto', 'none' or a list of names of module lists, such as ['model.layers']"
    )
