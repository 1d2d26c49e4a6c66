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
    *, fake: Callable[..., Any], like: Callable[..., Any] | None = None, tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function the op `dsgraph::<its name>`, which writes to no argument.

    Args:
        fake: Given the op's arguments, empty tensors of the shapes, dtypes and strides of its results.
        like: A function with the op's arguments, annotated with what `torch.library.infer_schema` knows; the function
            itself unless given.
        tags: Of the op.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        name = f"dsgraph::{function.__name__}"
        op = torch.library.custom_op(name, function, mutates_args=(), schema=_schema(like or function), tags=tags)
        op.register_fake(fake)
        return op

    return define


def define_composite(function: Callable[..., torch.Tensor]) -> None:
    """Makes an annotated function the op `dsgraph::<its name>`, of which autograd and compilers see the calls."""
    name = f"dsgraph::{function.__name__}"
    torch.library.define(name, _schema(function))
    torch.library.impl(name, "CompositeImplicitAutograd", function)


def _schema(function: Callable[..., Any]) -> str:
    """What torch infers, but a number alone is a plain one: torch takes each for a size that may be symbolic."""
    return torch.library.infer_schema(function, mutates_args=()).replace("SymInt ", "int ")
