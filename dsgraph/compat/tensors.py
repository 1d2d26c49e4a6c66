"""Tensors: pytrees of them, subclasses, fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

_R = TypeVar("_R")
_P = ParamSpec("_P")


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return `tree` with each tensor replaced; torch knows lists, dicts and registered classes."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, function, tree)


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested tuples, lists and dicts, and their structure, which compares and prints."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def unflatten_tree(leaves: list[Any], spec: Any) -> Any:
    """Return other leaves in the structure that `flatten_tree` found."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place, on a GPU in a few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True for a tensor without values, as while torch traces."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def without_overrides(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch as if subclasses of tensors among its arguments were plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def keep_hooks(tensor: torch.Tensor) -> None:
    """Register the hooks of a tensor again after torch has swapped its memory: it leaves them with the old one."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, name):
            setattr(tensor, name, hooks)


NO_OVERRIDES = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass of tensors that computes as a plain tensor, as `nn.Parameter` does."""


def unseen_by_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose calls no `TorchFunctionMode` sees, because one may keep the tensors that it sees."""

    @wraps(function)
    def unseen(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return unseen


def default_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative and the absolute tolerance of `torch.testing.assert_close`."""
    from torch.testing._comparison import default_tolerances

    rtol, atol = default_tolerances(dtype)
    return rtol, atol


@contextmanager
def without_fake_errors() -> Iterator[None]:
    """Return a context in which torch logs no error of an operation on fake tensors, besides raising it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def new_fake_mode() -> Any:
    """Return a mode in which tensors have shapes and no memory, and in which plain tensors may appear."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
