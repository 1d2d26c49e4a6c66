"""What a kernel is to the compiler: an op, the pattern that it replaces, and when it pays."""

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
    """What a kernel reads and the graph does not compute, as a call to be added: the rows of a tensor, say.

    Attributes:
        target: A function, or the name of a method; it writes to nothing.
        args: Its arguments: nodes, numbers, slices, other `Derived`.
    """

    target: Callable[..., Any] | str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Match:
    """Where a graph computes what a kernel computes.

    Attributes:
        node: Whose value the kernel gives.
        inputs: Arguments of the kernel's op, in order: nodes, numbers, None, `Derived`.
        options: Its keyword arguments.
        caveat: What is not proved to be the same, as a sentence that stands for itself; empty where all is. Then the
            kernel is substituted only where it was asked for by name.
        others: What the graph computes on the way and the kernel gives as well, which the rest of the graph may read:
            number of the result -> whose value it is.
    """

    node: Node
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    caveat: str = ""
    others: Mapping[int, Node] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class NearMiss:
    """Where a graph nearly computes what a kernel computes.

    Attributes:
        node: Where the difference is.
        reason: What differs, as the end of a sentence: "its weight has 8 elements and its input 16 columns".
    """

    node: Node
    reason: str


@dataclass(frozen=True)
class Setting:
    """For what a graph is compiled.

    Attributes:
        fuses: Whether a code generator behind the passes fuses pointwise ops and reductions, as Inductor does.
        device_type: Where the graph computes: "cpu", "cuda", ...
        training: Whether a backward follows.
    """

    fuses: bool
    device_type: str
    training: bool


@dataclass(frozen=True)
class Gain:
    """What a kernel is expected to spare in one place, by counting.

    Attributes:
        kernels: Launches, forward and backward.
        bytes: Of memory that is not taken, or not moved.
        why: In words, for the report: how it comes about, or why there is none.
    """

    kernels: int
    bytes: int
    why: str

    @property
    def is_worth_it(self) -> bool:
        """Whether it spares something."""
        return self.kernels > 0 or self.bytes > 0


@dataclass(frozen=True, repr=False)
class KernelSpec:
    """A kernel that the compiler may substitute.

    A pattern is found from its anchor, the one op without which it would be something else: the `rsqrt` of an RMSNorm,
    the `cross_entropy` of a loss. `match` is called for each node for which `is_anchor` holds and answers with the
    `Match`, or with the `NearMiss` that says what was different, or None where the op is used for something else.

    Attributes:
        name: As in `options={"kernels": [name]}`.
        op: The op, an overload such as `torch.ops.dsgraph.swiglu.default`; it takes `Match.inputs` and `Match.options`.
        results: How many tensors it gives. Of several, the first is the value; see `Match.others`.
        reference: The same in plain differentiable torch, with the op's arguments: the specification.
        is_anchor: Whether to look for the pattern at a node.
        match: Looks for it.
        supports: Given the fake values of `Match.inputs` and the options: why the op cannot take them, or None.
        gain: What is expected of it in one place.
        register: Tells Inductor how to lower the op; None where the op is called as it is.
        triton: The Triton functions that it launches on a GPU.
        already: torch's function by which the op computes: a graph that calls it has no need of the kernel. None where
            there is none.
        takes_from: Names of kernels whose places it may take because it computes more: those count as found then.
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
    """Return the kernel whose pattern a module holds; None for other modules."""
    return getattr(import_module(module), "SPEC", None)


def gain_of_fusion(setting: Setting, *, forward: int, backward: int) -> Gain:
    """What one pointwise or reduction kernel each way spares where `forward` and `backward` are called otherwise."""
    if setting.fuses:
        return Gain(0, 0, "Inductor makes one kernel of it as well")
    if setting.device_type == "cpu":
        return Gain(0, 0, "on the CPU it is the same calls")
    return Gain(forward - 1 + (backward - 1 if setting.training else 0), 0, "one kernel each way")


def gain_by_fusing(*, forward: int, backward: int) -> Callable[[Match, Setting], Gain]:
    """`gain_of_fusion` as the gain of a kernel, whatever the place."""
    return lambda match, setting: gain_of_fusion(setting, forward=forward, backward=backward)


def traced_kernel(
    name: str,
    kernel: ModuleType,
    *,
    is_anchor: Callable[[Node], bool],
    match: Callable[[Node], Match | NearMiss | None],
    gain: Callable[[Match, Setting], Gain],
    triton: Sequence[Any],
    results: int = 1,
    takes_from: tuple[str, ...] = (),
    traced: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> KernelSpec:
    """A kernel that Inductor traces through, so that it fuses with its neighbours.

    Args:
        name: Of the op `dsgraph::<name>`; its derivative is `dsgraph::<name>_backward`.
        kernel: Its file, with `reference`, `backward_reference` and `supports`.
        is_anchor: See `KernelSpec`.
        match: See `KernelSpec`.
        gain: See `KernelSpec`.
        triton: See `KernelSpec`.
        results: See `KernelSpec`.
        takes_from: See `KernelSpec`.
        traced: What stands for the two ops under Inductor; their references unless given.
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
        triton=triton,
        takes_from=takes_from,
    )
