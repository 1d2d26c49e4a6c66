"""`torch.compile(model, backend="dsgraph")`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.fx import GraphModule

from dsgraph import compat
from dsgraph.errors import StrictError
from dsgraph.passes import CaptureFacts
from dsgraph.passes.ir.sources import short_path
from dsgraph.sharding.agreement import Agreement
from dsgraph.sharding.stages import CopyLifetime
from dsgraph.step.last_micro_batch import add_sums, watch_sums
from dsgraph.step.state import PartitionState
from dsgraph.step.step_replicas import choose_step_replicas
from dsgraph.tools.bisecting.bisection import Bisection
from dsgraph.tools.dumping.writer import DumpFolder, GraphDump
from dsgraph.tools.emission.emission import Emission, read_target
from dsgraph.tools.reporting.compile_log import CompileEntry, CompileLog, owners_among
from dsgraph.tools.reporting.frames import Capture, read_capture
from dsgraph.tools.reporting.strict import refuse_capture, refuse_compile, refuse_given_up

from .capture import communication_lines, partitioned_mesh, read_facts
from .codegen import Compilation
from .costs.agreed import DEFAULTS, KnownCosts
from .options import MEMORY_SHARE, BackendOptions, parse_options
from .spare_memory import spare_bytes


class Backend:
    """The compiler that Dynamo calls with each graph it captures.

    One instance is registered with torch. Across compiles it keeps what the ranks have agreed on, the folders that
    receive dumps, whether it has warned, and a log for the report; everything else belongs to one compile.

    Attributes:
        log: The compiles of the models that are alive.
    """

    __name__ = "dsgraph"

    def __init__(self) -> None:
        self._agreements: dict[tuple[int, ...], tuple[weakref.ref[dist.ProcessGroup], Agreement]] = {}
        self.log = CompileLog()
        self._dumps: dict[Path, DumpFolder] = {}
        self._compiles = 0
        self._has_warned = False

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compiles one captured graph.

        Args:
            gm: Dynamo's graph; taken over.
            example_inputs: Its inputs.
            options: See `BackendOptions`.
            mode: One of Inductor's modes, such as "max-autotune".

        Raises:
            OptionError: An option is unknown or wrong.
            PassError: A pass failed or broke an invariant.
            RanksDisagreeError: Ranks are about to compile different collectives.
            StrictError: `strict=True` and something was not done that the options or the model asked for.
        """
        chosen = parse_options(options, os.environ)
        self._compiles += 1
        capture, module = read_capture(gm)
        given_up = self.log.look()
        if chosen.strict:
            refuse_given_up(given_up, capture)
            refuse_capture(capture, chosen, self.log)
        # Inductor's own partitioner, which knows nothing of sums, takes the graph where no pass is behind the capture.
        adds_sums = chosen.codegen == "eager" or not chosen.pipeline.ends_with_capture
        sums = add_sums(gm, example_inputs) if adds_sums else ()
        facts = replace(read_facts(gm, example_inputs), fuses=chosen.codegen == "inductor")
        mesh = partitioned_mesh(example_inputs, facts)
        communication: list[str] = []
        costs = DEFAULTS
        target = read_target(os.environ)  # set by `dsgraph emit`
        if mesh is not None:
            known = self._known_costs(mesh)
            limit = chosen.memory_limit or _device_memory_limit(facts.device_type)
            facts = replace(facts, costs=known.model(mesh, facts.axes), memory_limit=limit)
            costs = known.describe(mesh, facts.axes)
        if target is not None:
            facts = target.facts(facts, memory_limit=chosen.memory_limit)
        if mesh is not None:
            communication = communication_lines(gm, facts, training=_reduces(facts))
            spare = partial(spare_bytes, gm, example_inputs, facts=facts, module=module)
            keep_bytes = self._agreement(mesh).least_spare([f"within {facts.memory_limit}", *communication], spare)
            facts = replace(facts, keep_bytes=keep_bytes)
        bisect_in = os.environ.get("DSGRAPH_BISECT", "")  # set by `dsgraph bisect`
        dump = None if bisect_in or target is not None else self._begin_dump(chosen, facts, capture)
        compilation = Compilation(chosen, facts, mode=mode, dump=dump)
        # A recording would copy what lies elsewhere in each step; what is emitted for a GPU does not run here.
        if not compilation.records_cuda_graphs and target is None:
            choose_step_replicas(facts, module)
        bisect: Callable[..., Bisection] | None = None
        if bisect_in:
            bisect = partial(Bisection, Path(bisect_in), chosen, facts, mode=mode)
        emission: Emission | None = None
        if target is not None:
            function = replace(capture.function, file=short_path(capture.function.file))
            emission = Emission(target, chosen, facts, mode=mode, number=self._compiles, function=str(function))
        compiled = self._compile(compilation, gm, example_inputs, mesh, communication, bisect=bisect, emission=emission)
        trains = _trains(example_inputs)
        record = _record(
            self._compiles,
            capture,
            module,
            chosen,
            compilation,
            training=trains,
            reads_held=any(p.zero.copy_lifetime is CopyLifetime.USE for p in _partitions(example_inputs)),
            costs=costs,
        )
        if chosen.strict:
            refuse_compile(record)
        self.log.add(record, owners_among(example_inputs, module))
        return watch_sums(compiled, sums)

    def _compile(
        self,
        compilation: Compilation,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        mesh: DeviceMesh | None,
        communication: Sequence[str],
        *,
        bisect: Callable[..., Bisection] | None,
        emission: Emission | None,
    ) -> Callable[..., Any]:
        if mesh is None:
            self._warn_of_local_gradients(example_inputs, compilation.options)
            instead = bisect() if bisect is not None else emission
            compiled = (instead or compilation).compile(gm, example_inputs)
            await_them = instead is not None or not compilation.awaits_replicas
            return _refreshing_replicas(compiled, example_inputs, await_them=await_them)

        lines = [*(f"pass {name}" for name in compilation.pass_names), *communication]
        agreement = self._agreement(mesh)
        is_new = not agreement.knows(lines)
        if is_new:
            agreement.confirm("compile different collectives", lines)
        if bisect is not None:
            bisection = bisect(agreement=agreement)
            # Ranks meet to compare. A graph that communicates like one before may be compiled by some of them alone.
            compile_it = bisection.compile if is_new else bisection.compile_reference
            return _refreshing_replicas(compile_it(gm, example_inputs), example_inputs, await_them=True)
        if emission is not None:
            return _refreshing_replicas(emission.compile(gm, example_inputs), example_inputs, await_them=True)
        compiled = compilation.compile(gm, example_inputs)
        if is_new:
            agreement.confirm("run different collectives", compilation.collectives, steps=compilation.orders)
        return _refreshing_replicas(compiled, example_inputs, await_them=not compilation.awaits_replicas)

    def _begin_dump(self, options: BackendOptions, facts: CaptureFacts, capture: Capture) -> GraphDump | None:
        if options.dump is None:
            return None
        path = options.dump.absolute()
        folder = self._dumps.setdefault(path, DumpFolder(path))
        function = replace(capture.function, file=short_path(capture.function.file))
        return folder.begin(
            facts,
            of=str(function),
            codegen=options.codegen,
            strict=options.strict,
            most=options.dump_compiles,
        )

    def _agreement(self, mesh: DeviceMesh) -> Agreement:
        """What this mesh's ranks agreed on, for as long as the process group lives."""
        fresh, world = Agreement.over(mesh), dist.group.WORLD
        assert world is not None
        known = self._agreements.get(fresh.ranks)
        if known is not None and known[0]() is world:
            return known[1]
        self._agreements[fresh.ranks] = (weakref.ref(world), fresh)
        return fresh

    def _known_costs(self, mesh: DeviceMesh) -> KnownCosts:
        """What this mesh's ranks know of costs. They learn it together, before its first graph is compiled."""
        costs = self._agreement(mesh).costs
        if mesh.device_type not in costs:
            costs[mesh.device_type] = KnownCosts.of(self._agreement(mesh), mesh.device_type)
        return costs[mesh.device_type]

    def _warn_of_local_gradients(self, inputs: Sequence[Any], options: BackendOptions) -> None:
        if self._has_warned or not dist.is_initialized() or dist.get_world_size() == 1 or compat.active_ddp():
            return
        trained = [x for x in inputs if isinstance(x, nn.Parameter) and x.requires_grad and not isinstance(x, DTensor)]
        if not trained or not torch.is_grad_enabled():
            return
        message = (
            f"this model was not partitioned: the gradients of its {len(trained)} parameters will not be averaged over "
            f"the {dist.get_world_size()} ranks; call dsgraph.partition(model, mesh, stage=...) before torch.compile"
        )
        if options.strict:
            raise StrictError(message)
        self._has_warned = True
        warnings.warn(message, stacklevel=2)


def _device_memory_limit(device_type: str) -> int | None:
    if device_type != "cuda":
        return None
    return int(MEMORY_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _reduces(facts: CaptureFacts) -> bool:
    return torch.is_grad_enabled() and any(info.requires_grad for info in facts.params.values())


def _trains(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _record(
    number: int,
    capture: Capture,
    module: nn.Module | None,
    options: BackendOptions,
    compilation: Compilation,
    *,
    training: bool,
    reads_held: bool,
    costs: str,
) -> CompileEntry:
    measured = compilation.measurements
    return CompileEntry(
        number=number,
        capture=capture,
        module=id(module) if module is not None else 0,
        module_type=type(module) if module is not None else None,
        codegen=options.codegen,
        training=training,
        reduces=compilation.reduces,
        reads_held=reads_held,
        from_cache=compilation.from_cache,
        unidentified=compilation.unidentified,
        passes=compilation.passes,
        graphs=tuple(measured.graphs),
        activations=measured.activations,
        memory=measured.memory,
        costs=costs,
        ignored_tags=measured.ignored_tags,
        unlowered=tuple(sorted(measured.unlowered.items())),
    )


def _refreshing_replicas(
    compiled: Callable[..., Any], inputs: Sequence[Any], *, await_them: bool
) -> Callable[..., Any]:
    """`compiled`, preceded by a refresh of the replicas that it reads, if it reads any.

    Args:
        compiled: A compiled graph.
        inputs: Its inputs.
        await_them: Whether `compiled` takes the replicas to be there when it is called.
    """
    numbers = tuple(_partitions(inputs).values())
    if not numbers:
        return compiled

    def run(*args: Any) -> Any:
        partitions: list[PartitionState] = [args[number].dsgraph_partition for number in numbers]
        for partition in partitions:
            partition.refresh()
            if await_them:
                partition.finish()
        outputs = compiled(*args)
        if torch.is_grad_enabled():
            _note_gradients(outputs, partitions)
        return outputs

    return run


def _partitions(inputs: Sequence[Any]) -> dict[PartitionState, int]:
    """The partitions of which inputs are replicas, each with the number of one such input."""
    found: dict[PartitionState, int] = {}
    for number, value in enumerate(inputs):
        partition = getattr(value, "dsgraph_partition", None)
        if isinstance(partition, PartitionState):
            found.setdefault(partition, number)
    return found


def _note_gradients(outputs: Any, partitions: Sequence[PartitionState]) -> None:
    def note(_: Any) -> None:
        for partition in partitions:
            partition.note_gradient()

    for node in {out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None}:
        node.register_prehook(note)


backend = Backend()
