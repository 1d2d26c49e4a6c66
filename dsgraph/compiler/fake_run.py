"""Running a captured graph on fake tensors: nothing is computed, and every size is a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext import size_hint
from dsgraph.passes.compat import FakeTensorMode


@contextlib.contextmanager
def on_fakes(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Enter a context in which tensors are fake, and return fakes of `inputs`.

    The modes of gradients and autocast are restored: a graph that fails may have switched gradients off, or entered a
    region of autocast.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [_fake(value, mode) for value in inputs]
    with mode, torch.set_grad_enabled(torch.is_grad_enabled()), _keeping_autocast():
        yield fakes


@contextlib.contextmanager
def _keeping_autocast() -> Iterator[None]:
    """Restore autocast at the end, also if regions that were entered inside are not left."""
    kinds = ["cpu", *([accelerator.type] if (accelerator := torch.accelerator.current_accelerator()) else [])]
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    depth = _autocast_depth()
    try:
        yield
    finally:
        for kind, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth


def _fake(value: object, mode: Any) -> object:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    return size_hint(value) if isinstance(value, torch.SymInt) else value
