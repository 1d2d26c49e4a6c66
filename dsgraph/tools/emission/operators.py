"""Ops of a graph that can only run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch.fx import Node

from dsgraph.passes.compat import OpOverload
from dsgraph.passes.ir.user_source import user_source
from dsgraph.utils.errors import EmissionError

from .harness import has_kernel

_OF_THE_CPU = frozenset({"mkl", "mkldnn", "onednn", "quantized", "xnnpack", "_quantized"})
_NAMED_FOR_THE_CPU = re.compile(r"_for_cpu|(^|_)mkldnn_|(^|_)fbgemm_|_cpu(_|$)")
# Namespaces whose CUDA kernels are part of torch, and missing if torch was built without CUDA.
_OF_TORCH = frozenset(
    {"aten", "prims", "inductor", "inductor_prims", "rngprims", "_c10d_functional", "c10d_functional"}
)


def refuse_cpu_operators(nodes: Iterable[Node]) -> None:
    """Refuse a graph that contains an op that no CUDA device can run: its code would look right and be wrong.

    Raises:
        EmissionError: There is such an op; the message names it, and the user's line.
    """
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and _is_of_the_cpu(node.target):
            place, _ = user_source(node.stack_trace)
            raise EmissionError(
                f"{node.target} has only a kernel for the CPU{f' ({place})' if place else ''}: "
                "tracing on the CPU chose it, and a GPU cannot run it"
            )


def _is_of_the_cpu(op: OpOverload) -> bool:
    name = op.overloadpacket.__name__
    if op.namespace in _OF_THE_CPU or _NAMED_FOR_THE_CPU.search(name):
        return True
    return op.namespace not in _OF_TORCH and has_kernel(op, "CPU") and not has_kernel(op, "CUDA")
