"""The forward of a block as a frame of its own, which Dynamo captures once for all equal blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from dsgraph.compat.autograd import in_transform
from dsgraph.compat.compiled import allowing_recompiles, recompile_limit
from dsgraph.compat.dynamo import is_set, only_inlined, options_of_calls
from dsgraph.partitioning.classes import plain_class
from dsgraph.partitioning.state import PartitionState, held_by
from dsgraph.partitioning.transforms.quantized_weight import forward_of
from dsgraph.passes.memory.fit import MemoryLimitError

from .block import Block, may_end_graph
from .fake_step import around_blocks, kinds_of
from .repeated_blocks import IS_BLOCK, is_block, is_of_torch, is_plain

ITS_OWN_FRAME = "a repeated block is a graph of its own (partition(blocks=...))"
"""The reason that Dynamo, and with it the report, gives for the end of a graph at a block."""


def block_methods(module: nn.Module, blocks: Collection[nn.Module], *, is_root: bool) -> Mapping[str, Any]:
    """Return the overrides by which a module's forward is a frame of its own, or that of a model with such modules.

    Args:
        module: The module.
        blocks: The blocks of the model.
        is_root: True if the module is the model.
    """
    forward = forward_of(plain_class(module))
    if module in blocks:
        return {"forward": _as_frame(forward, len(blocks)), IS_BLOCK: True}
    if is_root and blocks and not is_of_torch(module):
        forward = _as_root(forward)
    return {} if forward is plain_class(module).forward else {"forward": forward}


def define_blocks(model: nn.Module, part: PartitionState) -> None:
    """Drop a model's plans; at stage 3, list its blocks, and give its parameters stand-ins for the graphs of units.

    A parameter that several blocks share belongs to the first; one on disk is read where it is used.
    """
    part.step.clear()
    if not part.zero.gathers_each_use:
        return
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
        part.step.blocks.append(Block(name, sharded, replicated))
    for entry in part.parameters:
        entry.stand_ins = ()
        if part.step.blocks and not entry.tier and entry.param.device.type != "meta":
            entry.renew_stand_ins()


def _as_frame(forward: Callable[..., Any], blocks: int) -> Callable[..., Any]:
    @wraps(forward)
    def forward_as_frame(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            and not in_transform()
            and may_end_graph(held_by(self).partition.step.limit)
            and is_plain((args, kwargs))
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
        if not is_set(options, "memory_limit"):
            return forward(self, *args, **kwargs)
        _count_around(self, options["memory_limit"], args, kwargs)
        outputs = forward(self, *args, **kwargs)
        _note_forward(self)
        return outputs

    only_inlined(forward_as_root)
    return forward_as_root


@torch.compiler.disable
def _note_forward(model: nn.Module) -> None:
    """Note that a forward under a limit has returned; warn if it took more than was planned for."""
    part = held_by(model).partition
    gap = part.step.limit.excess(len(part.step.ran()))
    if gap and gap not in part.limit_gaps:
        part.limit_gaps.append(gap)
        warnings.warn(f"memory_limit cannot be promised for {type(model).__name__}: {gap}", stacklevel=3)


@torch.compiler.disable
def _count_around(model: nn.Module, value: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count the memory around the blocks of a model for a new kind of batch.

    Args:
        model: The model.
        value: The option `memory_limit`.
        args: The arguments of the forward.
        kwargs: Those given by name.

    Raises:
        MemoryLimitError: It cannot be counted for the first batch.
    """
    part = held_by(model).partition
    limit, batch = part.step.limit, (model.training, kinds_of((args, kwargs), with_numbers=False))
    if part.root is not model or not part.step.blocks:
        return
    if value != limit.value:
        part.step.drop()
        limit.begin(value)
    if batch not in limit.counted:
        found = around_blocks(model, part.parameters, args, kwargs)
        if isinstance(found, str) and not limit.counted:
            raise MemoryLimitError(
                f"memory_limit={value!r} cannot be planned with repeated blocks, because {found}: use "
                'partition(blocks="none")'
            )
        if isinstance(found, str):
            part.limit_gaps.append(f"the memory around the blocks is not known for a batch of another size: {found}")
            found = max(limit.counted.values(), key=lambda each: each.between)
        limit.counted[batch] = found
    limit.around, limit.is_kept = limit.counted[batch], True


@torch.compiler.disable(recursive=False, reason=ITS_OWN_FRAME)  # what it calls is captured
def _run_block(
    forward: Callable[..., Any], blocks: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # A graph may be that of one block alone: a layer that writes to a cache reads its own number.
    with _allowing_more_recompiles(blocks):
        return forward(block, *args, **kwargs)


@torch.compiler.disable
def _allowing_more_recompiles(number: int) -> Any:
    return allowing_recompiles(recompile_limit() + number)
