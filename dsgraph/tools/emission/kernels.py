"""What a Triton kernel takes of a GPU, found out by compiling it: registers, shared memory, spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgraph.errors import EmissionError
from dsgraph.passes.analysis.hardware import GPUS


@dataclass(frozen=True)
class Resources:
    """What one launch of a kernel takes.

    Attributes:
        registers: Of a thread.
        shared_bytes: Shared memory of a block.
        stack_bytes: Local memory of a thread: arrays that are indexed by what only the run knows, and spills.
        spill_bytes: What of it is written because registers did not do.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int = 0
    spill_bytes: int = 0


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

    Raises:
        EmissionError: `arch` is not known.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if arch not in GPUS:
        raise EmissionError(f"arch is {arch!r}; it takes one of {', '.join(GPUS)}")
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


def read_resources(cubin: bytes, ptx: str, *, shared_bytes: int) -> Resources:
    """What a compiled kernel takes, as NVIDIA's tools in Triton's wheel tell.

    Args:
        cubin: The kernel's binary.
        ptx: What it was assembled from.
        shared_bytes: What Triton asks for at each launch.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory(prefix="dsgraph-emit-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _said([knobs.nvidia.cuobjdump.path, "-res-usage", str(path)])
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise EmissionError(f"cuobjdump does not tell the registers of a kernel; it says: {usage.strip()}")
        registers, stack = map(int, found.groups())
        return Resources(registers, shared_bytes, stack, _spill_bytes(Path(folder), ptx) if stack else 0)


def _spill_bytes(folder: Path, ptx: str) -> int:
    """Bytes that are stored to local memory for want of registers; a stack alone may be an array."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert target is not None
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(int(target[2])).path, "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}"]
    said = _said([*command, str(source), "-o", str(folder / "again.cubin")])
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))


def _said(command: list[str]) -> str:
    """What a program prints.

    Raises:
        EmissionError: It fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmissionError(f"{Path(command[0]).name} failed: {' '.join(done.stderr.split())}")
    return done.stdout + done.stderr
