"""The forward of a block as a frame of its own, which Dynamo captures once for all equal blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import wraps
from typing import Any

import torch
from torch import nn

from dsgraph.compat.autograd import in_transform
from dsgraph.compat.compiled import allowing_recompiles, recompile_limit
from dsgraph.compat.dynamo import may_end_frame
from dsgraph.partitioning.classes import plain_class
from dsgraph.partitioning.state import PartitionState, held_by

from .block_copies import NEED_ONE_GRAPH, BlockCopies
from .repeated_blocks import is_block

ITS_OWN_FRAME = "a repeated block is a graph of its own (partition(blocks=...))"
"""The reason that Dynamo, and with it the report, gives for the end of a graph at a block."""


def block_methods(module: nn.Module, blocks: Collection[nn.Module]) -> Mapping[str, Any]:
    """Return the overrides by which a module's forward is a frame of its own, if it is one of `blocks`."""
    if module not in blocks:
        return {}
    return {"forward": _as_frame(plain_class(module).forward, len(blocks))}


def define_blocks(model: nn.Module, part: PartitionState) -> None:
    """Give each block of a model of stage 3 the gathered copies of its parameters, in place of earlier ones.

    A parameter that several blocks share belongs to the first; one on disk is read where it is used.
    """
    if not part.zero.gathers_each_use:
        return
    part.plan.clear()
    by_owner = {owner: entry for entry in part.parameters for owner in entry.owners}
    taken: set[int] = set()
    for name, module in model.named_modules():
        if not is_block(module):
            continue
        places = ((inner, attribute) for inner in module.modules() for attribute in inner._parameters)
        entries = {id(entry): entry for place in places if (entry := by_owner.get(place)) is not None}
        own = [entry for key, entry in entries.items() if key not in taken and not entry.tier]
        taken.update(map(id, own))
        sharded, replicated = (
            [entry for entry in own if bool(entry.spec.group) is is_sharded] for is_sharded in (True, False)
        )
        copies = BlockCopies(name, part.plan, sharded, replicated)
        held_by(module).block = copies
        part.plan.blocks.append(copies)


def _as_frame(forward: Callable[..., Any], blocks: int) -> Callable[..., Any]:
    @wraps(forward)
    def forward_as_frame(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            and not in_transform()
            and may_end_frame(*NEED_ONE_GRAPH)
            and _are_plain((args, kwargs))
        ):
            return _run_block(forward, blocks, self, args, kwargs)
        return forward(self, *args, **kwargs)

    return forward_as_frame


def _are_plain(value: object) -> bool:
    """Return True if a value contains only tensors, numbers, text, dtypes, devices, enumerations, lists and dicts.

    A graph that reads another object, such as a cache, is rarely equal to that of another block.
    """
    if isinstance(value, (list, tuple)):
        return all(_are_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_are_plain(item) for item in value.values())
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str, Enum, torch.dtype, torch.device))


@torch.compiler.disable(recursive=False, reason=ITS_OWN_FRAME)  # what it calls is captured
def _run_block(
    forward: Callable[..., Any], blocks: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        _begin(block)
        # A graph may be that of one block alone: a layer that writes to a cache reads its own number.
        with _allowing_more_recompiles(blocks):
            outputs = forward(block, *args, **kwargs)
    except BaseException:
        _end(block, failed=True)
        raise
    _end(block)
    return outputs


@torch.compiler.disable
def _allowing_more_recompiles(number: int) -> Any:
    return allowing_recompiles(recompile_limit() + number)


@torch.compiler.disable
def _begin(block: nn.Module) -> None:
    held = held_by(block)
    if held.block is not None:
        held.partition.plan.begin(held.block)


@torch.compiler.disable
def _end(block: nn.Module, *, failed: bool = False) -> None:
    held = held_by(block)
    if held.block is not None:
        held.partition.plan.end(held.block, failed=failed)
