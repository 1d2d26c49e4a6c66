"""Kernels of a program's graphs for devices that this machine does not have, written while the program runs on the CPU.

`dsgraph emit` sets DSGRAPH_EMIT to a folder; the backend then hands each captured graph to an `Emission`, by way of a
`Target`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from dsgraph.compiler.codegen import Compilation, unidentified
from dsgraph.compiler.options import BackendOptions
from dsgraph.compiler.request import CompileOutcome, CompileRequest, CompileWatch
from dsgraph.passes import CaptureFacts, CostModel, Pipeline
from dsgraph.passes.analysis.hardware import GPUS, default_links
from dsgraph.utils.byte_counts import MEMORY_SHARE
from dsgraph.utils.errors import EmissionError, on_one_line
from dsgraph.utils.files import write_whole

from .cuda_attention import capture_cuda_attention, replace_cpu_attention
from .harness import fake_device, fake_driver
from .kernels import read_resources
from .lowering import compile_module, lower, retarget, trace
from .operators import refuse_cpu_operators
from .record import Configuration, EmittedGraph, KernelRecord, describe_kernel, merge_calls
from .scheduled_kernels import Lowered, ScheduledKernel

SETTINGS = "settings.json"
"""The file of the folder that says what to emit, and where to: `{"archs": ["sm_90"], "out": "/somewhere"}`."""
FRESH = "out"
"""The folder in it for new code and kernels; they replace the older ones when the program has ended."""


@dataclass(frozen=True)
class Target:
    """The settings of `dsgraph emit`.

    Attributes:
        archs: Of `GPUS`. Passes decide by the costs of the first.
        out: The final folder of code and kernels, which debug information refers to.
        records: The folder of the records, one file a graph and architecture.
    """

    archs: tuple[str, ...]
    out: Path
    records: Path

    @property
    def fresh(self) -> Path:
        """The folder to which code and kernels are written."""
        return self.records / FRESH

    def facts(self, facts: CaptureFacts, options: BackendOptions) -> CaptureFacts:
        """Return the facts of a capture as they would be on the device."""
        gpu, limit = GPUS[self.archs[0]], options.memory_limit or MEMORY_SHARE
        links = {axis.group: default_links(axis.backend, device_type="cuda") for axis in facts.axes}
        return replace(
            facts,
            costs=CostModel(gpu.product.device, facts.axes, MappingProxyType(links), gpu.product.tiers),
            memory_limit=limit if isinstance(limit, int) else int(limit * gpu.memory_bytes),
            device_type="cuda",
            fuses=True,
        )

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> Emission:
        """Return the emission of a graph.

        The program does not run what passes make of it, so `watch` sees none of it.
        """
        return Emission(self, request)


def read_target(environ: Mapping[str, str]) -> Target | None:
    """Return the settings that DSGRAPH_EMIT points to, or None where it is not set."""
    folder = environ.get("DSGRAPH_EMIT")
    if not folder:
        return None
    settings = json.loads((Path(folder) / SETTINGS).read_text())
    return Target(tuple(settings["archs"]), Path(settings["out"]), Path(folder))


class Emission:
    """One captured graph, compiled twice.

    The program runs the graph without any pass (codegen "eager"). Another copy goes through all passes and Inductor,
    with costs and memory of the device, and its kernels are written to files.
    """

    awaits_copies = False

    def __init__(self, target: Target, request: CompileRequest) -> None:
        self._target = target
        self._options = request.options
        self._facts = request.facts
        self._pipeline = request.pipeline
        self._mode = request.mode
        self._number = request.number
        self._function = request.function
        self._blocks = request.unit.blocks

    @property
    def outcome(self) -> CompileOutcome:
        """The outcome of the graph that the program runs: it contains no passes."""
        return CompileOutcome(unidentified=unidentified(self._options, self._pipeline))

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Write the kernels of all graphs that `gm` becomes; the result runs `gm` on the CPU.

        What cannot be emitted is written down as a problem of its graph; the program goes on.
        """
        plain = self._options.model_copy(update={"codegen": "eager", "inductor": {}, "dump": None})
        program = Compilation(plain, self._facts, Pipeline(), mode=None)
        compiled = program.compile(copy.deepcopy(gm), inputs)
        for_device = self._options.model_copy(update={"codegen": "inductor", "dump": None})
        try:
            compilation = Compilation(for_device, self._facts, self._pipeline, mode=self._mode, inductor=self._trace)
            compilation.compile(gm, inputs)
        except Exception as error:  # from a pass or from tracing: there is no graph
            for arch in self._target.archs:
                self._write(self._record("capture", arch, problem=on_one_line(error, unnamed=EmissionError)))
        return compiled

    def _trace(
        self, gm: GraphModule, inputs: Sequence[Any], *, patches: dict[str, Any], cache_tag: str, anew: bool
    ) -> Callable[..., Any]:
        """Write the kernels of a graph; used in place of `compile_with_inductor`."""

        def emit(graph: GraphModule, fakes: Sequence[Any], phase: str) -> None:
            for arch in self._target.archs:
                self._emit(graph, fakes, phase=phase, arch=arch, patches=patches)

        capture_cuda_attention(gm)
        with fake_driver(self._target.archs[0]):  # to see what a user's own Triton kernels write to
            trace(gm, inputs, patches=patches, each_joint=replace_cpu_attention, receive=emit)
        return gm

    def _emit(
        self, gm: GraphModule, inputs: Sequence[Any], *, phase: str, arch: str, patches: Mapping[str, Any]
    ) -> None:
        print(f"dsgraph emit: graph {self._number}, {phase}, {arch}", file=sys.stderr, flush=True)
        try:
            refuse_cpu_operators(gm.graph.nodes)
            with fake_device(arch):
                lowered = lower(*retarget(gm, inputs), phase=phase, patches=patches)
                refuse_cpu_operators(node for kernel in lowered.kernels for node in kernel.ops)
                record = self._save(lowered, phase=phase, arch=arch)
        except Exception as error:  # the other graphs may do better
            record = self._record(phase, arch, problem=on_one_line(error, unnamed=EmissionError))
        self._write(record)

    def _save(self, lowered: Lowered, *, phase: str, arch: str) -> EmittedGraph:
        """Write the code of a graph and its kernels, compiled."""
        folder = Path(arch) / f"graph{self._number}-{phase}"
        code = folder.with_suffix(".py")
        write_whole(self._target.fresh / code, lowered.code.encode())
        kernels = merge_calls(self._save_kernel(kernel, lowered.sources, folder, arch) for kernel in lowered.kernels)
        return self._record(phase, arch, code=str(code), kernels=kernels, collectives=lowered.collectives)

    def _save_kernel(
        self, kernel: ScheduledKernel, sources: Mapping[str, tuple[str, str]], folder: Path, arch: str
    ) -> KernelRecord:
        configurations = []
        if kernel.is_triton:
            path = folder / f"{kernel.name}.py"
            called, text = sources[kernel.name]
            write_whole(self._target.fresh / path, text.encode())
            for number, binary in enumerate(compile_module(text, called, path=self._target.out / path)):
                stem = folder / f"{kernel.name}.{number}"
                for suffix, content in (("ttir", binary.ttir.encode()), ("ptx", binary.ptx.encode())):
                    write_whole(self._target.fresh / f"{stem}.{suffix}", content)
                write_whole(self._target.fresh / f"{stem}.cubin", binary.cubin)
                resources = read_resources(binary.cubin, binary.ptx, shared_bytes=binary.shared_bytes)
                configurations.append(Configuration(binary.config, binary.warps, resources, f"{stem}.cubin"))
        return describe_kernel(kernel, configurations, GPUS[arch])

    def _record(self, phase: str, arch: str, **found: Any) -> EmittedGraph:
        return EmittedGraph(self._number, phase, arch, GPUS[arch].name, self._function, self._blocks, **found)

    def _write(self, record: EmittedGraph) -> None:
        path = self._target.records / f"graph{record.graph}-{record.phase}-{record.arch}.json"
        write_whole(path, json.dumps(asdict(record)).encode())
