"""Defining ops: a signature is written once, and the schema is read off it.

An op has as many functions of one signature as it has ways to compute. One of them is annotated, mostly the reference
in plain torch; the others name the arguments that they read.
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
    """Makes a function the op `dsgraph::<its name>`.

    Args:
        fake: Given the op's arguments, empty tensors of the shapes, dtypes and strides of its results.
        like: A function with the op's arguments, annotated with what `torch.library.infer_schema` knows; the function
            itself unless given.
        tags: Of the op.
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
    """Makes an annotated function the op `dsgraph::<its name>`, of which a library of C++ has a kernel for the CPU.

    The first call loads the library, whose kernel torch calls from then on. It takes no gradients.

    Args:
        fake: Given the op's arguments, empty tensors of the shapes, dtypes and strides of its results.
        load: Loads the library; gives None where there is none: the function computes.
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
    """Makes an annotated function the op `dsgraph::<its name>`, of which autograd and compilers see the calls."""
    name = f"dsgraph::{function.__name__}"
    torch.library.define(name, _schema(function))
    torch.library.impl(name, "CompositeImplicitAutograd", function)


def _schema(function: Callable[..., Any], writes: tuple[str, ...] = ()) -> str:
    """What torch infers, but a number alone is a plain one: torch takes each for a size that may be symbolic."""
    return torch.library.infer_schema(function, mutates_args=writes).replace("SymInt ", "int ")
