"""The description of a kernel for the compiler: an op, the pattern that it replaces, and when it pays off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.compat import decompose


@dataclass(frozen=True)
class Derived:
    """An input of a kernel that the graph does not compute, as a call to add, such as the rows of a tensor.

    Attributes:
        target: A function, or the name of a method; it writes to nothing.
        args: Its arguments: nodes, numbers, slices, other `Derived`.
    """

    target: Callable[..., Any] | str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Match:
    """A place where a graph computes the same as a kernel.

    Attributes:
        node: The node whose value the kernel computes.
        inputs: Arguments of the kernel's op, in order: nodes, numbers, None, `Derived`.
        options: Its keyword arguments.
        caveat: A complete sentence about what is not proved to be equal; empty if everything is. With a caveat the
            kernel is substituted only if it was requested by name.
        others: Intermediate results that the kernel returns as well, which the rest of the graph may read: number of
            the result -> the node of its value.
    """

    node: Node
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    caveat: str = ""
    others: Mapping[int, Node] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class NearMiss:
    """A place where a graph computes nearly the same as a kernel.

    Attributes:
        node: The node of the difference.
        reason: The difference, as the end of a sentence: "its weight has 8 elements and its input 16 columns".
    """

    node: Node
    reason: str


@dataclass(frozen=True)
class Setting:
    """The target for which a graph is compiled.

    Attributes:
        fuses: True if the code generator fuses pointwise ops and reductions, as Inductor does.
        device_type: The device type of the graph: "cpu", "cuda", ...
        training: True if a backward follows.
    """

    fuses: bool
    device_type: str
    training: bool


@dataclass(frozen=True)
class Gain:
    """The expected gain of a kernel in one place, by counting.

    Attributes:
        kernels: Saved launches, forward and backward.
        bytes: Saved bytes of memory, or of memory traffic.
        why: The reason in words, for the report.
    """

    kernels: int
    bytes: int
    why: str

    @property
    def is_worth_it(self) -> bool:
        """True if it saves something."""
        return self.kernels > 0 or self.bytes > 0


@dataclass(frozen=True, repr=False)
class KernelSpec:
    """A kernel that the compiler may substitute.

    A pattern is found from its anchor, the one op without which it would be something else: the `rsqrt` of an RMSNorm,
    the `cross_entropy` of a loss. `match` is called for each node for which `is_anchor` is true. It returns a `Match`,
    or a `NearMiss` with the difference, or None if the op is used for something else.

    Attributes:
        name: Its name in `options={"kernels": [name]}`.
        op: The op, an overload such as `torch.ops.dsgraph.swiglu.default`; it takes `Match.inputs` and `Match.options`.
        results: Number of tensors that it returns. The first is the value; see `Match.others`.
        reference: The same in plain differentiable torch, with the op's arguments: the specification.
        is_anchor: True for nodes at which to search for the pattern.
        match: Searches for the pattern.
        supports: Given the fake values of `Match.inputs` and the options: why the op cannot take them, or None.
        gain: Its expected gain in one place.
        register: Registers the op's lowering with Inductor; None if the op is called as it is.
        triton: The Triton functions that it launches on a GPU.
        already: torch's function that the op uses: a graph that calls it does not need the kernel. None if there is
            none.
        takes_from: Names of kernels that it may replace because it computes more: those count as found then.
    """

    name: str
    op: Any
    reference: Callable[..., Any]
    is_anchor: Callable[[Node], bool]
    match: Callable[[Node], Match | NearMiss | None]
    gain: Callable[[Match, Setting], Gain]
    supports: Callable[..., str | None] = lambda *inputs, **options: None
    results: int = 1
    register: Callable[[], None] | None = None
    triton: Sequence[Any] = ()
    already: Callable[..., Any] | None = None
    takes_from: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"KernelSpec({self.name!r})"

    def __reduce__(self) -> Any:
        # Ops cannot be pickled, and pipelines that name kernels are sent to other processes: send the pattern's module.
        module = self.match.__module__
        return (_built_in, (module,)) if _built_in(module) is self else super().__reduce__()


def _built_in(module: str) -> KernelSpec | None:
    """Return the kernel whose pattern a module contains; None for other modules."""
    return getattr(import_module(module), "SPEC", None)


def gain_of_fusion(setting: Setting, *, forward: int, backward: int) -> Gain:
    """Return the gain of one pointwise or reduction kernel each way in place of `forward` and `backward` calls."""
    if setting.fuses:
        return Gain(0, 0, "Inductor makes one kernel of it as well")
    if setting.device_type == "cpu":
        return Gain(0, 0, "on the CPU it is the same calls")
    return Gain(forward - 1 + (backward - 1 if setting.training else 0), 0, "one kernel each way")


def gain_by_fusing(*, forward: int, backward: int) -> Callable[[Match, Setting], Gain]:
    """Return `gain_of_fusion` as the gain of a kernel, whatever the place."""
    return lambda match, setting: gain_of_fusion(setting, forward=forward, backward=backward)


def traced_kernel(
    name: str,
    kernel: ModuleType,
    *,
    is_anchor: Callable[[Node], bool],
    match: Callable[[Node], Match | NearMiss | None],
    gain: Callable[[Match, Setting], Gain],
    triton: Sequence[Any] | None = None,
    results: int = 1,
    takes_from: tuple[str, ...] = (),
    traced: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> KernelSpec:
    """Return a kernel that Inductor traces through, so that it fuses with its neighbours.

    Args:
        name: The name of the op `dsgraph::<name>`; its derivative is `dsgraph::<name>_backward`.
        kernel: Its file, with `reference`, `backward_reference` and `supports`.
        is_anchor: See `KernelSpec`.
        match: See `KernelSpec`.
        gain: See `KernelSpec`.
        triton: See `KernelSpec`; by default its `forward_kernel` and `backward_kernel`.
        results: See `KernelSpec`.
        takes_from: See `KernelSpec`.
        traced: Replacements of the two ops under Inductor; by default their references.
    """
    ops = [getattr(torch.ops.dsgraph, stem).default for stem in (name, f"{name}_backward")]

    def register() -> None:
        for op, function in zip(ops, traced or (kernel.reference, kernel.backward_reference), strict=True):
            decompose(op, function)

    return KernelSpec(
        name=name,
        op=ops[0],
        reference=kernel.reference,
        is_anchor=is_anchor,
        match=match,
        gain=gain,
        supports=kernel.supports,
        results=results,
        register=register,
        triton=triton or (kernel.forward_kernel, kernel.backward_kernel),
        takes_from=takes_from,
    )
