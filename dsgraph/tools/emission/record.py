"""The record of each kernel, as plain data: the rows of the table and of `kernels.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from dsgraph.passes.analysis.cost import CostModel, computed_dtype, flops, moved_bytes
from dsgraph.passes.analysis.hardware import Gpu
from dsgraph.passes.analysis.sizes import number_of
from dsgraph.passes.compat import OpOverload

from .kernels import Resources
from .scheduled_kernels import ScheduledKernel

# Ops of a kernel's loops besides arithmetic.
_NO_ARITHMETIC = frozenset(
    {
        *("load", "store", "store_reduction", "output", "constant", "index_expr", "get_index", "load_seed"),
        *("to_dtype", "to_dtype_bitcast", "identity", "check_bounds", "device_assert_async"),
    }
)
# Ops that a list of a kernel's ops leaves out, unless the kernel has no others.
_VIEWS_AND_CASTS = frozenset(
    {
        *(
            "convert_element_type",
            "expand",
            "view",
            "_unsafe_view",
            "reshape",
            "permute",
            "full",
            "unsqueeze",
            "squeeze",
        ),
        *("clone", "slice", "select", "split", "split_with_sizes", "as_strided", "iota", "alias"),
    }
)
_LIBRARIES = {
    **{name: f"cuBLAS {name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm")},
    **{name: f"cuDNN {name}" for name in ("convolution", "convolution_backward")},
    "_scaled_dot_product_flash_attention": "flash attention",
    "_scaled_dot_product_flash_attention_backward": "flash attention backward",
    "_scaled_dot_product_efficient_attention": "efficient attention",
    "_scaled_dot_product_efficient_attention_backward": "efficient attention backward",
}


@dataclass(frozen=True)
class Configuration:
    """A Triton kernel as it is compiled with one choice of block sizes.

    Attributes:
        config: The choice: "XBLOCK=256".
        warps: Of a block.
        resources: What it takes.
        cubin: Its binary, relative to the folder of the emission.
    """

    config: str
    warps: int
    resources: Resources
    cubin: str


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a graph.

    Attributes:
        name: Of the Triton kernel; of a library's, "cuBLAS mm".
        kind: "triton" or "library".
        ops: What it computes, each op once, in the graph's order.
        calls: How often the graph runs it.
        bytes: That a call reads and writes, each operand once.
        flops: That a call does, a division or an exponential counted as one; None where they are not known.
        seconds: That a call is predicted to take.
        configurations: Those that Inductor would choose from by a measurement; none for a library.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    calls: int
    bytes: int
    flops: int | None
    seconds: float
    configurations: tuple[Configuration, ...] = ()


@dataclass(frozen=True)
class EmittedGraph:
    """The result of one graph on one architecture.

    Attributes:
        graph: Number of the compile in its process.
        phase: "forward", "backward" or "inference"; "capture" if it failed before these.
        arch: "sm_90".
        gpu: The device that costs are predicted of.
        function: What was compiled.
        blocks: The repeated blocks that may share the graph.
        code: Inductor's code, relative to the folder of the emission; None where there is none.
        problem: Why there is none; None where there is.
        kernels: In the order of their first calls.
        collectives: Op -> number of calls in the code.
    """

    graph: int
    phase: str
    arch: str
    gpu: str
    function: str
    blocks: tuple[str, ...] = ()
    code: str | None = None
    problem: str | None = None
    kernels: tuple[KernelRecord, ...] = ()
    collectives: dict[str, int] = field(default_factory=dict)


def describe_kernel(kernel: ScheduledKernel, configurations: Sequence[Configuration], gpu: Gpu) -> KernelRecord:
    """Return the record of a kernel, with what it is predicted to take on a GPU."""
    if kernel.is_triton:
        moved, counts = kernel.bytes or 0, kernel.counts
        operations = None
        if counts is not None:
            operations = sum(count for name, count in counts.items() if name not in _NO_ARITHMETIC)
        dtype: torch.dtype | None = torch.float32  # as Inductor computes, whatever it loads
    else:
        moved = sum(number_of(node, moved_bytes(node)) for node in kernel.ops)
        operations = sum(number_of(node, flops(node)) for node in kernel.ops)
        dtype = computed_dtype(kernel.ops[0]) if kernel.ops else None
    return KernelRecord(
        name=kernel.name if kernel.is_triton else _library_name(kernel.name),
        kind="triton" if kernel.is_triton else "library",
        ops=_op_names(kernel),
        calls=kernel.calls,
        bytes=moved,
        flops=operations,
        seconds=CostModel(gpu.product.device).kernel_seconds(operations or 0, moved, dtype=dtype),
        configurations=tuple(configurations),
    )


def _op_names(kernel: ScheduledKernel) -> tuple[str, ...]:
    """Return the ops of a kernel that compute something, each once."""
    targets = [node.target for node in kernel.ops]
    names = [target.overloadpacket.__name__ for target in targets if isinstance(target, OpOverload)]
    names = [name.removeprefix("_scaled_dot_product_") for name in names]
    computing = [name for name in names if name not in _VIEWS_AND_CASTS]
    return tuple(dict.fromkeys(computing or names))


def _library_name(called: str) -> str:
    """Return the library's name: `aten.mm.out` -> `cuBLAS mm`; an op of no known library keeps its own name."""
    parts = called.split(".")
    name = parts[-2] if len(parts) > 2 else parts[-1]
    return _LIBRARIES.get(name, called)


def merge_calls(kernels: Iterable[KernelRecord]) -> tuple[KernelRecord, ...]:
    """Merge the calls of one library op with the same amount of work into one record."""
    merged: dict[object, KernelRecord] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.ops, kernel.bytes, kernel.flops, kernel.seconds, kernel.configurations)
        before = merged.get(key)
        merged[key] = kernel if before is None else replace(before, calls=before.calls + kernel.calls)
    return tuple(merged.values())
