"""Parameters as an uncompiled forward reads them: plain tensors, except that writes reach the shards.

    self.weight.data.clamp_(-1, 1)      # in a forward, or in a hook around it: the shards are clamped

Only writes are intercepted: computing costs the same as with a plain tensor, and torch uses the same fast paths.
Methods that write, and methods that return views where gradients are disabled, are those of a `FullTensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsgraph.compat.dynamo import only_inlined
from dsgraph.compat.tensors import NO_OVERRIDES

from .full_tensor import FullTensor, is_name_of_write
from .source import Source

_VIEWS = (
    "__getitem__ view view_as reshape t transpose permute flatten unflatten unsqueeze squeeze narrow select chunk "
    "split unbind diagonal movedim swapaxes expand expand_as"
)


class ForwardParameter(Tensor):
    """A full parameter inside a forward.

    Attributes:
        source: The parameter that it was gathered from.
    """

    __slots__ = ("source",)
    __torch_function__ = NO_OVERRIDES  # type: ignore[assignment]

    source: Source

    @classmethod
    def over(cls, plain: Tensor, source: Source) -> ForwardParameter:
        """Return `plain` with writing methods that reach `source`."""
        self = plain.as_subclass(cls)
        self.__dict__ = plain.__dict__  # the attributes of a quantized weight
        self.source = source
        return self

    @property
    def written(self) -> FullTensor:
        """The same tensor, which can be written to."""
        with torch.no_grad():
            return FullTensor.over(self.source.plain.detach(), self.source)

    @property
    def data(self) -> Tensor:
        """The same without gradients."""
        return self.written

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.written.copy_(value)

    def detach(self) -> Tensor:
        """Return the same without gradients."""
        return self.written

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor with the same values."""
        memo[id(self)] = copied = self.source.plain.detach().clone()
        return copied


def _writing(name: str) -> Callable[..., Any]:
    plain_method = getattr(Tensor, name)

    def write(self: ForwardParameter, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.requires_grad:
            return plain_method(self, *args, **kwargs)  # which torch refuses, as of every parameter
        return getattr(self.written, name)(*args, **kwargs)

    only_inlined(write)
    return write


def _viewing(name: str) -> Callable[..., Any]:
    plain_method = getattr(Tensor, name)

    def view(self: ForwardParameter, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return plain_method(self, *args, **kwargs)
        return getattr(self.written, name)(*args, **kwargs)

    only_inlined(view)
    return view


for _name in dir(Tensor):
    # `set_`, `resize_` and their like are refused by the full tensor, `requires_grad_` writes nothing.
    if is_name_of_write(_name) and _name not in ("__set__", "__delete__"):
        setattr(ForwardParameter, _name, _writing(_name))
for _name in _VIEWS.split():
    setattr(ForwardParameter, _name, _viewing(_name))
