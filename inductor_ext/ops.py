"""Definition of ops: a signature is written once, and the schema is derived from it.

An op has several functions with one signature, one for each way to compute it. One of them is annotated, usually the
reference in plain torch; the others name the arguments that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import CustomOpDef


def define_op(
    *,
    fake: Callable[..., Any],
    like: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
    writes: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Define a function as the op `dsgraph::<its name>`.

    Args:
        fake: Returns, for the op's arguments, empty tensors of the shapes, dtypes and strides of its results.
        like: A function with the op's arguments, annotated for `torch.library.infer_schema`; by default the function
            itself.
        tags: Tags of the op.
        writes: The arguments that it writes to.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        name = f"dsgraph::{function.__name__}"
        schema = _schema(like or function, writes)
        op = torch.library.custom_op(name, function, mutates_args=writes, schema=schema, tags=tags)
        op.register_fake(fake)
        return op

    return define


def define_native(*, fake: Callable[..., Any], load: Callable[[], object | None]) -> Callable[..., Any]:
    """Define an annotated function as the op `dsgraph::<its name>`, with a CPU kernel in a C++ library.

    The first call loads the library, whose kernel torch calls from then on. The op has no derivative.

    Args:
        fake: Returns, for the op's arguments, empty tensors of the shapes, dtypes and strides of its results.
        load: Loads the library; returns None if there is none: then the function computes.
    """

    def define(function: Callable[..., Any]) -> Any:
        name = f"dsgraph::{function.__name__}"

        def compute(*args: Any) -> Any:
            on_cpu = all(each.device.type == "cpu" for each in args if isinstance(each, torch.Tensor))
            return op(*args) if on_cpu and load() is not None else function(*args)

        torch.library.define(name, _schema(function))
        torch.library.impl(name, "CompositeExplicitAutograd", compute)
        torch.library.register_fake(name, fake)
        op = getattr(torch.ops.dsgraph, function.__name__).default
        return op

    return define


def define_composite(function: Callable[..., torch.Tensor]) -> None:
    """Define an annotated function as the op `dsgraph::<its name>`, whose calls autograd and compilers see."""
    name = f"dsgraph::{function.__name__}"
    torch.library.define(name, _schema(function))
    torch.library.impl(name, "CompositeImplicitAutograd", function)


def _schema(function: Callable[..., Any], writes: tuple[str, ...] = ()) -> str:
    """Return torch's inferred schema with plain integers: torch assumes that each may be a symbolic size."""
    return torch.library.infer_schema(function, mutates_args=writes).replace("SymInt ", "int ")
