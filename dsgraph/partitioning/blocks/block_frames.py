"""The forward of a block as a frame of its own, which Dynamo captures once for all equal blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.compat.autograd import in_transform
from dsgraph.compat.compiled import allowing_recompiles, recompile_limit
from dsgraph.compat.dynamo import forget_compiles, is_set, only_inlined, options_of_calls
from dsgraph.partitioning.classes import plain_class
from dsgraph.partitioning.state import PartitionState, held_by
from dsgraph.passes.memory.fit import MemoryLimitError

from .block_copies import NEED_ONE_GRAPH, BlockCopies, may_end_graph
from .fake_step import around_blocks, kinds_of
from .repeated_blocks import IS_BLOCK, is_block, is_of_torch

ITS_OWN_FRAME = "a repeated block is a graph of its own (partition(blocks=...))"
"""The reason that Dynamo, and with it the report, gives for the end of a graph at a block."""


def block_methods(module: nn.Module, blocks: Collection[nn.Module], *, is_root: bool) -> Mapping[str, Any]:
    """Return the overrides by which a module's forward is a frame of its own, or that of a model with such modules.

    Args:
        module: The module.
        blocks: The blocks of the model.
        is_root: True if the module is the model.
    """
    forward = plain_class(module).forward
    if module in blocks:
        return {"forward": _as_frame(forward, len(blocks)), IS_BLOCK: True}
    return {"forward": _as_root(forward)} if is_root and blocks and not is_of_torch(module) else {}


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
            and may_end_graph(held_by(self).partition.plan)
            and _are_plain((args, kwargs))
        ):
            return _run_block(forward, blocks, self, args, kwargs)
        return forward(self, *args, **kwargs)

    return forward_as_frame


def _as_root(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_as_root(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        options = options_of_calls()
        if not is_set(options, "memory_limit") or any(is_set(options, name) for name in NEED_ONE_GRAPH):
            return forward(self, *args, **kwargs)
        before = _count_around(self, args, kwargs)
        try:
            return forward(self, *args, **kwargs)
        except MemoryLimitError as error:
            if before is None or not held_by(self).partition.plan.limit.is_kept:
                raise
            _give_up_blocks(self, before, error)
            refused = error.with_traceback(None)  # its frames hold what the first forward has computed
        try:
            return forward(self, *args, **kwargs)
        except MemoryLimitError as error:
            raise min(refused, error, key=lambda each: each.least) from None

    only_inlined(forward_as_root)
    return forward_as_root


@torch.compiler.disable
def _count_around(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Count the memory around the blocks of a model for a new kind of batch.

    Returns:
        The state of random numbers before the forward; None for a known kind of batch.
    """
    part = held_by(model).partition
    limit, batch = part.plan.limit, (model.training, kinds_of((args, kwargs)))
    if part.root is not model or limit.needs_one_graph or not part.plan.blocks:
        return None
    if batch in limit.counted:
        limit.around = limit.counted[batch]
        return None
    found = around_blocks(model, part.parameters, args, kwargs)
    if isinstance(found, str):
        limit.refuse(found)
    else:
        limit.around = limit.counted[batch] = found
        limit.is_kept = True
    return torch.get_rng_state()


@torch.compiler.disable
def _give_up_blocks(model: nn.Module, before: Tensor, error: MemoryLimitError) -> None:
    """Compile the model as one graph from now on: a plan of the whole step may keep a smaller limit."""
    held_by(model).partition.plan.limit.refuse(f"with blocks a step takes {error.least:,} bytes at least")
    torch.set_rng_state(before)
    forget_compiles()


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
