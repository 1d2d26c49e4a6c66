"""Resources of a compiled Triton kernel: registers, shared memory, spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dsgraph.utils.errors import EmissionError


@dataclass(frozen=True)
class Resources:
    """The resources of one launch of a kernel.

    Attributes:
        registers: Registers of a thread.
        shared_bytes: Shared memory of a block.
        stack_bytes: Local memory of a thread: arrays with indices that are only known at run time, and spills.
        spill_bytes: The part of it that is written because registers did not suffice.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int = 0
    spill_bytes: int = 0


def read_resources(cubin: bytes, ptx: str, *, shared_bytes: int) -> Resources:
    """Return the resources of a compiled kernel, as reported by NVIDIA's tools in Triton's wheel.

    Args:
        cubin: The kernel's binary.
        ptx: The assembly that it was made from.
        shared_bytes: The shared memory that Triton asks for at each launch.
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
    """Return the bytes that are stored to local memory for want of registers; a stack alone may be an array."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert target is not None
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(int(target[2])).path, "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}"]
    said = _said([*command, str(source), "-o", str(folder / "again.cubin")])
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))


def _said(command: list[str]) -> str:
    """Return what a program prints.

    Raises:
        EmissionError: It fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmissionError(f"{Path(command[0]).name} failed: {' '.join(done.stderr.split())}")
    return done.stdout + done.stderr
