"""The objects that carry the passes into a code generator: one for training graphs, one for inference graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from typing_extensions import Self

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.compat import (
    CustomGraphPass,
    CustomPartitionerFn,
    captured_gradients,
    captured_input,
    is_tangent,
    min_cut_rematerialization_partition,
    put_opaque_values_last,
)
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.ir.coalesced import results_of
from dsgraph.passes.ir.graph import collectives, emit, is_returned, is_wait, placeholders, replace_and_erase
from dsgraph.passes.ir.local_sums import write_local_sums
from dsgraph.passes.ir.mesh_axis import MeshAxis
from dsgraph.passes.ir.parameters import ParamInfo

from .runner import Runner


@dataclass(frozen=True)
class CaptureFacts:
    """What the backend knows of a captured graph.

    Attributes:
        axes: The mesh axes of its parameters.
        params: Input number of the captured graph -> parameter.
        costs: How long computing and communicating takes; None for the defaults of the device.
        memory_limit: See `PassContext`.
        keep_bytes: See `PassContext`.
        device_type: Where the parameters lie: "cpu", "cuda", ...
        replicas: Input numbers of gathered copies of parameters that are on their way when the graph begins to run.
        fuses: See `PassContext`.
    """

    axes: tuple[MeshAxis, ...] = ()
    params: Mapping[int, ParamInfo] = field(default_factory=lambda: MappingProxyType({}))
    costs: CostModel | None = None
    memory_limit: int | None = None
    keep_bytes: int | None = None
    device_type: str = "cpu"
    replicas: frozenset[int] = frozenset()
    fuses: bool = False

    def context(
        self, gm: GraphModule, phase: Phase, *, inference: bool = False, user_outputs: int | None = None
    ) -> PassContext:
        """The facts as passes over `gm` see them: parameters by the names of its placeholders."""
        params, replicas = {}, set[str]()
        for number, node in enumerate(placeholders(gm)):
            origin = number if phase is Phase.CAPTURE else captured_input(node)
            if origin in self.replicas:
                replicas.add(node.name)
            is_tensor = phase is Phase.CAPTURE or isinstance(node.meta.get("val"), torch.Tensor)
            if origin is not None and origin in self.params and is_tensor:  # a DTensor's mesh is a placeholder, too
                params[node.name] = self.params[origin]
        (output,) = gm.graph.find_nodes(op="output")
        origins = captured_gradients(output) if phase in (Phase.JOINT, Phase.BACKWARD) else {}
        gradients = {number: self.params[origin].name for number, origin in origins.items() if origin in self.params}
        return PassContext(
            phase=phase,
            axes=self.axes,
            params=MappingProxyType(params),
            replicas=frozenset(replicas),
            fuses=self.fuses,
            gradients=MappingProxyType(gradients),
            inference=inference,
            user_outputs=user_outputs,
            costs=self.costs or CostModel.default(self.axes, device_type=self.device_type),
            memory_limit=self.memory_limit,
            keep_bytes=self.keep_bytes,
        )


class _HeldByReference:
    """What Inductor's configuration holds: copied as a reference, and pickled, into cache keys, as its identity."""

    def __init__(self, runner: Runner, facts: CaptureFacts) -> None:
        self._runner = runner
        self._facts = facts

    def uuid(self) -> object | None:
        """Identifies passes, options and facts in torch's cache keys."""
        return _identity(self._runner, self._facts)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[tuple[object, ...]], tuple[tuple[object, ...]]]:
        return tuple, ((type(self).__name__, self.uuid()),)


class Partitioner(_HeldByReference, CustomPartitionerFn):
    """Splits a joint graph: joint passes, min-cut rematerialization, then forward and backward passes.

    Inductor takes it as `custom_partitioner_fn`, AOTAutograd as `partition_fn`, so that every code generator runs
    exactly the same passes.
    """

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Returns the forward and the backward graph of a joint graph."""
        if write_local_sums(gm):
            gm.recompile()
        self._runner.run(gm, self._facts.context(gm, Phase.JOINT))
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        for part in (forward, backward):
            _merge_waits(part)
        put_opaque_values_last(forward, backward, num_fwd_outputs=kwargs["num_fwd_outputs"])
        user_outputs = kwargs["num_fwd_outputs"]
        self._runner.run(forward, self._facts.context(forward, Phase.FORWARD, user_outputs=user_outputs))
        self._runner.run(backward, self._facts.context(backward, Phase.BACKWARD))
        return forward, backward


class InferenceLowering(_HeldByReference, CustomGraphPass):
    """Runs the joint and forward passes over a graph that has no backward, which no partitioner ever sees.

    Inductor calls it for joint graphs of training as well; those it leaves to the partitioner.
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrites an inference graph in place."""
        gm = graph.owning_module
        if gm is None or any(map(is_tangent, graph.find_nodes(op="placeholder"))):
            return
        for phase in (Phase.JOINT, Phase.FORWARD):
            self._runner.run(gm, self._facts.context(gm, phase, inference=True))


def _merge_waits(gm: GraphModule) -> None:
    """Leaves each collective one wait.

    Where a parameter is gathered twice, once in a checkpoint region and once to be returned, torch's partitioner makes
    one gather of the two, but not one wait, because it leaves alone what is returned.
    """
    merged = 0
    for result in (result for started in collectives(gm) for result in results_of(started)):
        first, *others = sorted(filter(is_wait, result.users)) or [result]
        for wait in others:
            both = is_returned(first) and is_returned(wait)  # by the model, which may write to one of them
            replace_and_erase(wait, emit(wait, torch.ops.aten.clone.default, first) if both else first)
            merged += 1
    if merged:
        gm.recompile()


def _identity(runner: Runner, facts: CaptureFacts) -> object | None:
    prints = runner.pipeline.fingerprint()
    if prints is None:
        return None
    params, replicas = sorted(facts.params.items()), sorted(facts.replicas)
    known = (facts.axes, params, replicas, facts.costs, facts.device_type)
    return ("dsgraph", source_hash(), prints, repr((*known, facts.memory_limit, facts.keep_bytes)))


@cache
def source_hash() -> str:
    """Hash of every source file of the compiler and of the ops, for torch's cache keys."""
    here = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in (here, here.parent / "inductor_ext"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
