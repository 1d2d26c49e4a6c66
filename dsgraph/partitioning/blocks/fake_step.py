"""A step of a model on fake tensors, in which blocks compute nothing: the memory of the code around the blocks.

That code runs uncompiled, or in graphs of its own, so no graph of a block shows it. A `memory_limit` has to count it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.compat.dtensor import fake_like
from dsgraph.compat.modules import remove_hooks
from dsgraph.compat.tensors import flatten_tree, new_fake_mode, unflatten_tree, without_fake_errors
from dsgraph.partitioning.classes import plain_class
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.passes.analysis.block_memory import AroundBlocks
from dsgraph.passes.compat import storage_id

from .live_bytes import BlockCall, LiveBytes, is_tensor, tensors
from .repeated_blocks import is_block, is_plain, structure_of


@torch.compiler.disable
def around_blocks(
    model: nn.Module, parameters: Sequence[ParameterState], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AroundBlocks | str:
    """Return the memory of a step of a partitioned model besides the graphs of its blocks, or why it is not known.

    Args:
        model: The partitioned model.
        parameters: Its parameters.
        args: The arguments of its forward.
        kwargs: Those given by name.
    """
    objects = [value for value in flatten_tree((args, kwargs))[0] if not is_plain(value)]
    if objects:
        return f"an argument is a {type(objects[0]).__name__}, in which the forward may keep a value"
    live, state = LiveBytes(), random.getstate()
    try:
        fakes, forward = _without_values(model, parameters, live)
        with without_fake_errors(), fakes, live, torch.autograd.graph.saved_tensors_hooks(live.save, live.load):
            given = _faked((args, kwargs), fakes, live)
            outputs = forward(*given[0], **given[1])
            live.end_forward(tensors(outputs))
            losses = losses_of(outputs)
            torch.autograd.backward(losses, [torch.empty_like(loss) for loss in losses])
    except Exception as error:  # of any operation of the model
        return f"the forward cannot run on fake tensors: {type(error).__name__}: {error}".splitlines()[0]
    finally:
        random.setstate(state)
    if not losses or not live.calls:
        return "the forward calls no block" if losses else "no output of the forward requires a gradient"
    return live.result()


class _StandIn(torch.autograd.Function):
    """A block that computes nothing, and keeps its inputs for the backward."""

    @staticmethod
    def forward(ctx: Any, live: LiveBytes, outputs: Sequence[Tensor], trained: Tensor | None, *inputs: Tensor) -> Any:
        ctx.live, ctx.inputs = live, inputs
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        live: LiveBytes = ctx.live
        live.begin_block()
        needed = [value for value, needs in zip(ctx.inputs, ctx.needs_input_grad[3:], strict=True) if needs]
        found, _ = live.computed_in(lambda: [torch.empty_like(value) for value in needed])
        ctx.inputs = ()
        for gradient in found:
            live.leave_out(gradient)
        given = iter(found)
        return (None, None, None, *(next(given) if needs else None for needs in ctx.needs_input_grad[3:]))


@dataclass
class _Block:
    """A block of the copy: a call makes results like those of the first call of an equal block with such arguments."""

    name: str
    module: nn.Module
    live: LiveBytes
    known: dict[Hashable, tuple[list[Any], Any, int]]
    kind: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.kind = structure_of(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.live.begin_block()
        leaves, _ = flatten_tree((args, kwargs))
        key = self.kind, kinds_of((args, kwargs))
        if key not in self.known:
            outputs, computed = self.live.computed_in(partial(self._run, args, kwargs))
            self.known[key] = (*flatten_tree(outputs), computed)
        outputs, structure, computed = self.known[key]
        self.live.calls.append(BlockCall(self.name, computed))
        made, _ = self.live.computed_in(lambda: [torch.empty_like(value) for value in outputs if is_tensor(value)])
        trained = next((param for param in self.module.parameters() if param.requires_grad), None)
        for value in made:
            self.live.leave_out(value)
        results = iter(_StandIn.apply(self.live, made, trained, *filter(is_tensor, leaves)))
        return unflatten_tree([next(results) if is_tensor(value) else value for value in outputs], structure)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return type(self.module).forward(self.module, *args, **kwargs)


def _without_values(
    model: nn.Module, parameters: Sequence[ParameterState], live: LiveBytes
) -> tuple[Any, Callable[..., Any]]:
    """Return a fake mode, and the forward of a copy of the model in it, in which blocks compute nothing."""
    fakes, made, copies = fake_copy(model, parameters, {entry: entry.spec.shape for entry in parameters})
    blocks = {name: module for name, module in model.named_modules() if is_block(module)}
    inside = {id(param) for block in blocks.values() for param in block.parameters()}
    for entry in parameters:
        param = copies.pop(id(entry.param))
        live.leave_out(param)
        if entry.spec.group and id(entry.param) not in inside:
            live.full[storage_id(param)] = param.untyped_storage().nbytes()
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_drop_gradient)
    for fake in copies.values():
        live.add(fake)
    known: dict[Hashable, tuple[list[Any], Any, int]] = {}
    for name, module in made.named_modules():
        if name in blocks:
            module.forward = _Block(name, module, live, known)
    return fakes, made.forward


def fake_copy(
    model: nn.Module, parameters: Sequence[ParameterState], shapes: Mapping[ParameterState, Sequence[int]]
) -> tuple[Any, nn.Module, dict[int, Tensor]]:
    """Return a copy of a partitioned model that has full parameters, no values and no hooks, and is not partitioned.

    Args:
        model: The model.
        parameters: Its parameters.
        shapes: Their shapes in the copy.

    Returns:
        The fake mode of the copy, the copy, and its parameters and buffers by the `id` of the model's.
    """
    fakes, copies = new_fake_mode(), dict[int, Tensor]()
    for entry in parameters:
        with fakes:
            dtype = entry.spec.dtypes(entry.param.dtype)[0]
            full = torch.empty(shapes[entry], dtype=dtype, device=entry.param.device)
        copies[id(entry.param)] = nn.Parameter(full, requires_grad=entry.param.requires_grad)
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in copies:
            copies[id(tensor)] = fake_like(tensor, fakes, device=tensor.device)
    held = [module.__dict__["_dsgraph"] for module in model.modules() if "_dsgraph" in module.__dict__]
    made = copy.deepcopy(model, {**copies, **{id(one): one for one in held}})
    for module in made.modules():
        module.__class__ = plain_class(module)
        module.__dict__.pop("_dsgraph", None)
        remove_hooks(module)
    return fakes, made, copies


def kinds_of(values: Any, *, with_numbers: bool = True) -> Hashable:
    """Return what distinguishes arguments of a forward on which its memory may depend.

    Args:
        values: The arguments.
        with_numbers: False leaves numbers out, such as that of a step, which are others in each call.
    """
    leaves, structure = flatten_tree(values)
    return (str(structure), *(_kind_of(value, with_numbers=with_numbers) for value in leaves))


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def _faked(values: Any, fakes: Any, live: LiveBytes) -> Any:
    """Return arguments with fake tensors, whose memory is counted."""

    def fake(value: Any) -> Any:
        if not is_tensor(value):
            return value
        made = fakes.from_tensor(value)
        live.add(made)
        return made

    leaves, structure = flatten_tree(values)
    return unflatten_tree([fake(value) for value in leaves], structure)


def losses_of(outputs: Any) -> list[Tensor]:
    """Return the outputs that a program differentiates: the numbers among them, or all."""
    trained = [value for value in tensors(outputs) if value.requires_grad]
    return [value for value in trained if not value.dim()] or trained


def _kind_of(value: Any, *, with_numbers: bool) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (bool, str)) or (with_numbers and isinstance(value, (int, float))):
        return value
    return str(type(value))
