"""Full tensors outside any module's call: writes to them take effect on the shards.

    model.head.weight.data.clamp_(-1, 1)          # on every rank, in every ZeRO stage: the shards are clamped
    torch.nn.init.normal_(model.head.weight)      # the values that the mesh's first rank draws
    model.head.weight.grad[padding] = 0           # the gradients' shards

A `FullTensor` computes like the plain tensor that it represents: `__torch_function__` substitutes that one, and results
are plain. A result that shares its memory (a view, `.data`, `.detach()`) is a `FullTensor` of the same source. An op
that writes runs on the current values of the source, in the dtype of the shards, and `Source.store` writes the result
to the shards. Ranks run the same program, so reading and writing may be collectives; if values differ, those of the
first rank are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dsgraph.compat.dynamo import break_graph, compiling_backend, only_inlined
from dsgraph.compat.tensors import without_overrides
from dsgraph.inductor_ext import share_memory
from dsgraph.passes.compat import detect_fake_mode
from dsgraph.utils.errors import GradientError, PartitionError

from .source import Source

_OPERATORS = "add sub mul div truediv floordiv mod pow and or xor lshift rshift"
_WRITING = frozenset({"__setitem__", "__set__", "__delete__", *(f"__i{name}__" for name in _OPERATORS.split())})


class FullTensor(Tensor):
    """A part of a full parameter, or of its gradient, that shares its memory.

    Attributes:
        plain: The tensor that it represents.
        source: The parameter or gradient that it was gathered from.
    """

    __slots__ = ("plain", "source")

    plain: Tensor
    source: Source

    @classmethod
    def over(cls, plain: Tensor, source: Source) -> FullTensor:
        """Return `plain` as a tensor whose writes reach `source`."""
        self = plain.as_subclass(cls)
        self.plain, self.source = plain, source
        return self

    def read(self) -> Tensor:
        """Return the tensor, gathered again if the shards have changed since. All ranks call it together."""
        self.source.refresh()
        return self.plain

    def part_of(self, full: Tensor) -> Tensor:
        """Return the part of another full value, contiguous, that corresponds to this tensor's part of its source."""
        plain, whole = self.plain, self.source.plain
        if plain.dtype != whole.dtype:
            raise PartitionError(
                f"{self.source.name}: a view of it in another dtype cannot be written to: write to the parameter"
            )
        offset = full.storage_offset() + plain.storage_offset() - whole.storage_offset()
        return full.as_strided(plain.shape, plain.stride(), offset)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on plain tensors, and write its writes back to the shards."""
        if torch.compiler.is_compiling():
            # Other backends look at the classes of their inputs; this one puts plain tensors in their place.
            if _writes(func, kwargs or {}) or compiling_backend() != "dsgraph":
                break_graph()
            return without_overrides(func, args, kwargs or {})
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """The same without gradients."""
        return FullTensor.over(self.plain.detach(), self.source)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise PartitionError(f"{self.source.name}: `.data` of a part of it cannot be replaced; use `copy_`")

    def __iter__(self) -> Iterator[Tensor]:
        """Yield row by row; writes to rows reach the shards as well."""
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor with the same values."""
        memo[id(self)] = copied = self.plain.detach().clone()
        return copied

    def set_(self, *_: object) -> NoReturn:
        """Refuse: the memory belongs to the shards."""
        raise PartitionError(
            f"{self.source.name} cannot be given other memory: write to it with copy_; parametrizations are registered "
            "and removed before dsgraph.partition"
        )

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Return a plain tensor over the same values, which is no part of the model."""
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise PartitionError(
                f"nn.Parameter(...) got the memory of {self.source.name}, which is split over ranks: "
                "give it a copy, nn.Parameter(weight.detach().clone())"
            )
        return self.plain.requires_grad_(requires_grad)


only_inlined(FullTensor.__torch_function__.__func__)  # type: ignore[attr-defined]


@torch.compiler.disable
def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = _written(func, args, kwargs)
    if written:
        return _write(func, args, kwargs, written)
    read = list(_full_tensors((args, kwargs)))
    if detect_fake_mode() is None:  # a compiler reads metadata
        for tensor in read:
            tensor.source.refresh()
    try:
        result = func(*_each(args, plain_of), **_each(kwargs, plain_of))
    except RuntimeError as error:
        if func is torch.autograd.grad and "not have been used in the graph" in str(error):
            _refuse_unused(args, kwargs)
        raise
    if func is torch.autograd.grad and None in result:  # `allow_unused=True`
        _refuse_unused(args, kwargs)
    return _each(result, lambda value: _shared(value, read))


def _refuse_unused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to differentiate with respect to a parameter that was read after the forward: it is another tensor."""
    for tensor in _full_tensors([kwargs["inputs"]] if "inputs" in kwargs else args[1:2]):
        name = getattr(tensor.source.shards, "dsgraph_name", tensor.source.name)
        raise GradientError(
            f"torch.autograd.grad got parameter {name!r} as an attribute, which is a new tensor each time that it is "
            f"read: pass dict(model.named_parameters())[{name!r}], whose gradient is averaged over the ranks"
        )


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FullTensor]:
    """Return the full tensors that `func` writes to: its first argument, or what is given as `out`."""
    if not _writes(func, kwargs):
        return []
    return list(_full_tensors([kwargs["out"]] if "out" in kwargs else [args[:1] or kwargs]))


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    return _is_in_place(func) or kwargs.get("inplace") is True or kwargs.get("out") is not None


@torch.compiler.assume_constant_result
def _is_in_place(func: Callable[..., Any]) -> bool:
    return is_name_of_write(getattr(func, "__name__", ""))


def is_name_of_write(name: str) -> bool:
    """Return whether an op of this name writes to its first argument, by torch's naming rule.

    `mul_`, `mul_.Tensor`, `__imul__` and `imul` of the module `operator` do.
    """
    name = name.partition(".")[0]
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return in_place or name in _WRITING or f"__{name}__" in _WRITING


def _write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: list[FullTensor]) -> Any:
    opened = {tensor.source: tensor.source.open() for tensor in written}
    stand_ins: list[tuple[Tensor, FullTensor]] = []

    def stand_in(value: Any) -> Any:
        if not isinstance(value, FullTensor) or value.source not in opened:
            return plain_of(value)
        # A leaf where the parameter is one: torch itself refuses what it would refuse of a parameter.
        plain = value.part_of(opened[value.source]).detach().requires_grad_(value.requires_grad)
        stand_ins.append((plain, value))
        return plain

    result = func(*_each(args, stand_in), **_each(kwargs, stand_in))
    for plain, value in stand_ins:
        is_same = plain.shape == value.plain.shape and plain.stride() == value.plain.stride()
        if not is_same or not share_memory(plain, opened[value.source]):
            raise PartitionError(f"{value.source.name}: {func.__name__} would give it another shape or memory")
    for written_source, full in opened.items():
        written_source.store(full)
    return _each(result, lambda value: next((own for plain, own in stand_ins if plain is value), value))


def _shared(value: Any, read: list[FullTensor]) -> Any:
    """Return a result as a full tensor if it shares memory with one that was read."""
    if not isinstance(value, Tensor):
        return value
    for tensor in read:
        if value is tensor.plain:
            return tensor
        if type(value) is Tensor and share_memory(value, tensor.plain):
            return FullTensor.over(value, tensor.source)
    return value


def plain_of(value: Any) -> Any:
    """Return the tensor that a full tensor represents; anything else unchanged."""
    return value.plain if isinstance(value, FullTensor) else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to the contents of its tuples, lists and dicts."""
    if isinstance(value, tuple):
        changed = [_each(item, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    return change(value)


def _full_tensors(value: Any) -> Iterator[FullTensor]:
    if isinstance(value, FullTensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _full_tensors(item)
