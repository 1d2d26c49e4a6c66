"""`@dsgraph.kernel`: the user's own kernels, from a reference in plain torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dsgraph.inductor_ext import on_device_of, on_gpu
from dsgraph.passes.kernels.likeness import Likeness
from dsgraph.passes.kernels.spec import Gain, KernelSpec, Match, NearMiss, Setting
from dsgraph.utils.errors import KernelError


def kernel(
    function: object = None,
    /,
    *,
    triton: Callable[..., Tensor] | None = None,
    backward: Callable[..., Sequence[Tensor | None]] | None = None,
    supports: Callable[..., str | None] | None = None,
    match: Callable[[Node], Match | NearMiss | None] | None = None,
    anchor: Callable[[Node], bool] | None = None,
    namespace: str = "dsgraph_user",
) -> Callable[[Callable[..., Tensor]], KernelSpec]:
    """Make a kernel from a function in plain torch, its reference: for `options={"kernels": [...]}`.

    It becomes the op `namespace::<name of the function>`, and replaces the same calls in a model, or the places that
    `match` finds. On the CPU, and without `triton`, the op is the reference: it is differentiated and compiled as if it
    were written in the model. On a GPU `triton` computes it.

        @dsgraph.kernel(triton=launch)
        def squared_relu(x: Tensor) -> Tensor:
            return torch.relu(x).square()

    If a pattern is more than the calls of the reference, `anchor` selects the nodes of the captured graph to examine,
    and `match` returns what is found: a `dsgraph.Match` with the node whose value the kernel computes and the arguments
    of the reference in order, a `dsgraph.NearMiss` with the reason, or None. See docs/guides/write-a-kernel.md.

        @dsgraph.kernel(anchor=lambda node: node.target is torch.tanh, match=find_cap)
        def soft_cap(x: Tensor, cap: float) -> Tensor:
            return torch.tanh(x / cap) * cap

    Args:
        function: Nothing; the decorator is written with parentheses.
        triton: The launcher, with the arguments of the reference; gives a new, contiguous tensor like the reference's.
            The GPU of its first tensor is the current one while it runs, and so it is for `backward`.
        backward: Takes the gradient of the result and the arguments of the reference, gives the gradient of each, None
            for a number. Default: the derivative of the reference. It is used where `triton` is.
        supports: Takes what the reference takes, but fake tensors; gives why the kernel cannot take it, or None.
        match: Finds what the kernel computes, see `KernelSpec`. Default: the calls of the reference, in any spelling.
        anchor: Where `match` is called; goes with it.
        namespace: Of the op.

    Raises:
        KernelError: It is used without parentheses; the reference has parameters that an op cannot have or returns
            something other than a tensor; it cannot be a pattern and there is no `match`; `match` or `anchor` is
            missing; `backward` has no effect.
    """
    if function is not None:
        raise KernelError(f"kernel {_name(function)}: write @dsgraph.kernel() above it, with parentheses")
    return partial(
        _spec_of, triton=triton, backward=backward, supports=supports, match=match, anchor=anchor, namespace=namespace
    )


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))


def _spec_of(
    reference: Callable[..., Tensor],
    *,
    triton: Callable[..., Tensor] | None,
    backward: Callable[..., Sequence[Tensor | None]] | None,
    supports: Callable[..., str | None] | None,
    match: Callable[[Node], Match | NearMiss | None] | None,
    anchor: Callable[[Node], bool] | None,
    namespace: str,
) -> KernelSpec:
    name = reference.__name__
    if (match is None) != (anchor is None):
        missing = "anchor" if anchor is None else "match"
        raise KernelError(f"kernel {name}: match and anchor go together: add {missing}=, or leave out both")
    if backward is not None and triton is None:
        raise KernelError(f"kernel {name}: backward has no effect without triton: remove it, or add the other")
    schema = _schema(reference)
    if match is None or anchor is None:
        likeness = _likeness(reference)
        match, anchor = likeness.match, likeness.is_anchor
    return KernelSpec(
        name=name,
        op=_define(f"{namespace}::{name}", schema, reference, triton=triton, backward=backward),
        reference=reference,
        is_anchor=anchor,
        match=match,
        gain=_gain,
        supports=supports or _supports_everything,
    )


def _supports_everything(*inputs: Any, **options: Any) -> str | None:
    return None


def _gain(match: Match, setting: Setting) -> Gain:
    return Gain(0, 0, "its savings are not known")


def _schema(reference: Callable[..., Tensor]) -> str:
    name = reference.__name__
    keyword_only = [p.name for p in inspect.signature(reference).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if keyword_only:
        raise KernelError(f"kernel {name}: its parameter {keyword_only[0]} is keyword-only: remove the *")
    try:
        schema = torch.library.infer_schema(reference, mutates_args=())
    except ValueError as error:
        said = str(error).partition("Got func with signature")[0].strip()
        raise KernelError(f"kernel {name}: an op cannot have its signature: {said}") from error
    if not schema.endswith("-> Tensor"):
        raise KernelError(f"kernel {name}: it returns {schema.rpartition('-> ')[2]}; a kernel returns one Tensor")
    return schema


def _likeness(reference: Callable[..., Tensor]) -> Likeness:
    try:
        return Likeness.of(reference)
    except ValueError as error:
        name = reference.__name__
        raise KernelError(f"kernel {name}: its reference is no pattern: {error}; give match= and anchor=") from error


def _define(
    name: str,
    schema: str,
    reference: Callable[..., Tensor],
    *,
    triton: Callable[..., Tensor] | None,
    backward: Callable[..., Sequence[Tensor | None]] | None,
) -> Any:
    """Register the op: the reference on the CPU, and on a GPU another op, which nothing traces into."""
    space, _, stem = name.partition("::")
    if hasattr(getattr(torch.ops, space), stem):
        raise KernelError(f"kernel {stem}: there is an op {name} already: rename the function, or give namespace=")
    compute = reference
    if triton is not None:
        compute = _where_it_runs(
            _define_opaque(f"{name}_triton", schema, reference, triton=triton, backward=backward), reference
        )
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeImplicitAutograd", compute)
    return getattr(getattr(torch.ops, space), stem).default


def _where_it_runs(opaque: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(*args: Any) -> Tensor:
        tensors = [item for item in args if isinstance(item, Tensor)]
        return opaque(*args) if tensors and all(map(on_gpu, tensors)) else reference(*args)

    return compute


def _define_opaque(
    name: str,
    schema: str,
    reference: Callable[..., Tensor],
    *,
    triton: Callable[..., Tensor],
    backward: Callable[..., Sequence[Tensor | None]] | None,
) -> Any:
    def launch(*args: Any) -> Tensor:
        with on_device_of(next(item for item in args if isinstance(item, Tensor))):
            return triton(*args)

    def fake(*args: Any) -> Tensor:
        return reference(*args).contiguous()

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(item for item in inputs if isinstance(item, Tensor)))
        ctx.rest = [None if isinstance(item, Tensor) else (item,) for item in inputs]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if item is None else item[0] for item in ctx.rest]
        if backward is not None:
            with on_device_of(grad):
                return tuple(backward(grad, *args))
        return _derivative(reference, grad, args, ctx.needs_input_grad)

    op = torch.library.custom_op(name, launch, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(differentiate, setup_context=setup_context)
    space, _, stem = name.partition("::")
    return getattr(getattr(torch.ops, space), stem).default


def _derivative(
    reference: Callable[..., Tensor], grad: Tensor, args: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments that need one, by differentiating the reference."""
    with torch.enable_grad():
        own = [x.detach().requires_grad_() if need else x for x, need in zip(args, needed, strict=True)]
        wanted = [x for x, need in zip(own, needed, strict=True) if need]
        found = iter(torch.autograd.grad(reference(*own), wanted, grad, allow_unused=True))
    return tuple(next(found) if need else None for need in needed)
