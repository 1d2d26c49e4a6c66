"""The kernels that Inductor has scheduled for a graph: Triton kernels, library calls, and collectives.

The internals of torch that this reads were checked on the versions in `harness.CHECKED`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import Node

from dsgraph.passes.compat import OpOverload


@dataclass
class ScheduledKernel:
    """A kernel of a lowered graph, or an op that Inductor leaves to a library.

    Attributes:
        name: Of the Triton kernel, or of what is called.
        ops: The nodes of the graph that it computes, in the graph's order.
        is_triton: True if it is a Triton kernel.
        bytes: That it reads and writes, each operand once; None where that is to be read off `ops`.
        counts: Name of an elementwise operation -> number of times that the kernel executes it; None where that is to
            be read off `ops`, or is not known.
        calls: Number of calls in the graph.
    """

    name: str
    ops: list[Node]
    is_triton: bool
    bytes: int | None = None
    counts: dict[str, int] | None = None
    calls: int = 1


@dataclass(frozen=True)
class Lowered:
    """The result of Inductor for a graph.

    Attributes:
        code: The Python code that runs it.
        sources: Triton kernel -> what its module, which the code holds as text, calls it, and the module.
        kernels: What runs, in order of first calls; collectives and waits are left out.
        collectives: Kind of collective -> number of calls.
    """

    code: str
    sources: dict[str, tuple[str, str]]
    kernels: list[ScheduledKernel]
    collectives: dict[str, int]


class Recorder:
    """Which scheduler nodes each Triton kernel computes, by name, as Inductor defines it."""

    def __init__(self) -> None:
        self.kernels: dict[str, ScheduledKernel] = {}  # name -> it
        self.of_node: dict[str, str] = {}  # scheduler node -> kernel

    def define(self, name: str, schedule: Iterable[Any], kernel: Any) -> None:
        """Record a kernel; for `harness.defined_kernels`."""
        from torch._inductor.scheduler import BaseSchedulerNode

        nodes = [leaf for node in schedule if isinstance(node, BaseSchedulerNode) for leaf in node.get_nodes()]
        self.of_node |= {node.get_name(): name for node in nodes}
        if name in self.kernels:
            self.kernels[name].calls += 1
            return
        origins = {origin for node in nodes for origin in cast("Any", node.node).origins}
        self.kernels[name] = ScheduledKernel(name, list(origins), True, _bytes_of_kernel(kernel), _operations(nodes))


def _bytes_of_kernel(kernel: Any) -> int:
    """Return the bytes that a kernel of Inductor's reads and writes.

    Inductor leaves out buffers that something else has written to in place (a collective, a user's kernel).
    """
    from torch._inductor.virtualized import V

    found = int(kernel.estimate_kernel_num_bytes())
    in_place = len({buffer.inner_name for buffer in kernel.args.inplace_buffers.values()})
    _, arguments, _, _ = kernel.args.python_argdefs()
    known = kernel.features.buf_accesses()
    for number, name in enumerate(arguments):
        buffer = V.graph.try_get_buffer(name) if isinstance(name, str) and name not in known else None
        if buffer is not None:
            count = V.graph.sizevars.optimization_hint(V.graph.get_numel(name))
            found += count * V.graph.get_dtype(name).itemsize * (2 if number < in_place else 1)
    return found


def _operations(nodes: Iterable[Any]) -> dict[str, int]:
    """Return how many times each elementwise operation is executed by the loops of some scheduler nodes."""
    from torch._inductor.virtualized import V

    found: dict[str, int] = {}
    for node in nodes:
        body = getattr(node, "_body", None)
        if body is None:  # a template
            continue
        times = math.prod(V.graph.sizevars.optimization_hint(size) for part in node.get_ranges() for size in part)
        for name, count in body.op_counts.items():
            found[name] = found.get(name, 0) + count * times
    return found


def read_lowered(code: str, recorder: Recorder, scheduled: Iterable[Any], graph_nodes: Sequence[Node]) -> Lowered:
    """Put together what is known of a graph that Inductor has just generated code for.

    Args:
        code: The code.
        recorder: Has heard of all its Triton kernels.
        scheduled: The scheduler's nodes, in order.
        graph_nodes: Those of the graph.
    """
    position = {node: number for number, node in enumerate(graph_nodes)}
    tree = ast.parse(code)
    sources = _kernel_sources(tree)
    own_kernels = iter(_runs_of_own_kernels(tree, sources))
    found: dict[str, ScheduledKernel] = {}
    collectives: dict[str, int] = {}
    for node in scheduled:
        names = [recorder.of_node[leaf.get_name()] for leaf in node.get_nodes() if leaf.get_name() in recorder.of_node]
        found |= {name: recorder.kernels[name] for name in names if name not in found}
        if not names:
            _add_extern(node.node, found, collectives, own_kernels)
    for kernel in found.values():
        kernel.ops.sort(key=lambda node: position.get(node, len(position)))
    return Lowered(code, sources, list(found.values()), collectives)


def _add_extern(
    op: Any, found: dict[str, ScheduledKernel], collectives: dict[str, int], own_kernels: Iterator[str]
) -> None:
    """Add what Inductor did not generate itself: calls of libraries, of a user's Triton kernels, of collectives."""
    from torch._inductor import ir

    if not isinstance(op, ir.ExternKernel) or isinstance(op, (ir.MultiOutput, ir._WaitKernel)):
        return
    origin, overload = op.get_origin_node(), getattr(op, "op_overload", None)
    ops = [origin] if origin is not None else [node for node in op.origins if node.target is overload]
    ops = ops or list(op.origins)
    if isinstance(op, ir.UserDefinedTritonKernel):
        name = next(own_kernels)
        if name in found:
            found[name].calls += 1
        else:
            found[name] = ScheduledKernel(name, ops, True, _bytes_of(op))
        return
    name = str(overload) if isinstance(overload, OpOverload) else str(op.python_kernel_name)
    if isinstance(op, ir._CollectiveKernel):
        collectives[name] = collectives.get(name, 0) + 1
    else:
        found[f"{name} {op.get_name()}"] = ScheduledKernel(name, ops, False)


def _bytes_of(op: Any) -> int:
    """Return the bytes of a user's kernel's buffers, each counted once: its use of them is not known."""
    from torch._inductor.virtualized import V

    buffers = {buffer.get_name(): buffer for buffer in op.inputs}.values()
    sizes = (V.graph.sizevars.optimization_hints(buffer.get_size()) for buffer in buffers)
    return sum(math.prod(size) * b.get_dtype().itemsize for size, b in zip(sizes, buffers, strict=True))


def _kernel_sources(tree: ast.AST) -> dict[str, tuple[str, str]]:
    """Return the Triton kernels that stand in a wrapper's code as text, by the names that it gives them."""
    found = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
            name, text = (ast.literal_eval(argument) for argument in call.args[:2])
            found[ast.unparse(node.targets[0])] = (name, text)
    return found


def _runs_of_own_kernels(tree: ast.AST, sources: dict[str, tuple[str, str]]) -> list[str]:
    """Return the user's own Triton kernels in the order in which the code runs them; it numbers them anew."""
    own = {name for name, (original, _) in sources.items() if name != original}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    runs = [(call.lineno, ast.unparse(cast("ast.Attribute", call.func).value)) for call in calls]
    return [name for _, name in sorted(runs) if name in own]
