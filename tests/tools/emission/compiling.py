"""Compiles a hand-written Triton kernel for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsgraph.tools.emission.kernels import Resources, read_resources


def compile_triton(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: str,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Resources:
    """Compiles a `@triton.jit` function for a GPU that need not be there.

    Args:
        kernel: The function.
        signature: Argument -> Triton's name of its type: `{"x": "*fp32", "n": "i32"}`. Pointers are taken to be
            aligned to 16 bytes, as torch's are.
        constants: `constexpr` argument -> value.
        arch: One of `GPUS`: "sm_80", "sm_90".
        num_warps: Of a block.
        num_stages: Of software pipelining.
    """
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(number,): [["tt.divisibility", 16]] for number, name in enumerate(names) if types[name][0] == "*"}
    source = ASTSource(
        kernel, types, constexprs={(names.index(name),): value for name, value in constants.items()}, attrs=aligned
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    return read_resources(compiled.asm["cubin"], compiled.asm["ptx"], shared_bytes=compiled.metadata.shared)
