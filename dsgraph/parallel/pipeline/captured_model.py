"""The forward of a model as one graph, with the costs of its nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from dsgraph.compat.compiled import allowing_recompiles
from dsgraph.compat.dtensor import fake_like
from dsgraph.compat.dynamo import capture_errors, ignoring_log_messages
from dsgraph.compat.tensors import flatten_tree, map_tensors
from dsgraph.compiler.frames import remedy
from dsgraph.compiler.options import parse_options
from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.compat import (
    detect_fake_mode,
    is_to_local,
)
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.ir.graph import all_graph_modules, bodies, replace_and_erase
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.parallel.slice_walk import marked_slices
from dsgraph.passes.parallel.stages.root_values import is_small, root_values
from dsgraph.passes.parallel.stages.seed_draws import seed_draws
from dsgraph.passes.parallel.stages.split_stages import StagePlan
from dsgraph.passes.parallel.stages.stage_graphs import StageGraph, stage_graphs
from dsgraph.utils.errors import PartitionError

from .evaluation.output_tree import OutputTree
from .fake_values import FakeRun
from .written_buffers import Writes, assigned_buffers, find_writes, keeping_buffers


@dataclass(frozen=True)
class CapturedModel:
    """A captured forward.

    Attributes:
        graph_module: The graph; parameters, buffers and inputs are placeholders. `meta["val"]` holds fake values.
        state: Placeholder of a parameter or buffer -> its name in the model, and itself.
        inputs: Placeholder of an input -> its number among the leaves of (args, kwargs).
        results: The nodes of the tensors that the model returns.
        output: The structure in which it returns them.
        costs: Seconds of each node's forward, by the cost model.
        slices: Parameters of which each tensor-parallel rank holds a slice, by name; `state` has this rank's.
        repeated: Nodes that every rank can compute by itself, from inputs and small buffers.
        draws: True if the forward draws random numbers.
        seeds: Number of its random values that have a seed of their own, see `seed_draws`.
        unseeded: The functions that draw random numbers of each rank, with the modules that call them.
        writes: The buffers that the forward writes to.
    """

    graph_module: GraphModule
    state: Mapping[str, tuple[str, Tensor]]
    inputs: Mapping[str, int]
    results: Sequence[Node]
    output: OutputTree
    costs: Mapping[Node, float]
    slices: Mapping[str, ParameterSlice]
    repeated: frozenset[Node]
    draws: bool
    seeds: int
    unseeded: Sequence[str]
    writes: Writes

    def stages(self, plan: StagePlan, results: Sequence[Node]) -> list[StageGraph]:
        """Return the graphs of the stages of a plan, of which the last one returns these results."""
        written, gm = self.writes.values, self.graph_module
        return stage_graphs(gm, plan, state=self.state, results=results, repeated=self.repeated, written=written)

    def returned(self) -> list[Node]:
        """Return the nodes of the tensors in the output, without those of a cache, which is no part of it.

        Raises:
            PartitionError: The output cannot be made again from tensors.
        """
        self.output.check()
        return [self.results[number] for number in dict.fromkeys(self.output.results.values())]


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any],
    device: torch.device,
    costs: CostModel | None = None,
    changing: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
) -> CapturedModel:
    """Capture a model's forward by Dynamo. Buffers keep their values.

    Args:
        model: An unmodified model on the device of the stages, or its copy of `without_values`.
        args: Positional arguments of one micro-batch.
        kwargs: Keyword arguments of one micro-batch.
        device: The device of the stages.
        costs: The cost model; None: the defaults of the device type.
        changing: Names of buffers that another forward writes to, so that only one stage has their values.
        options: Options of the backend, of which one is for the slices of a tensor-parallel model.

    Raises:
        PartitionError: The forward has a graph break, writes to a parameter, or reads a tensor that is neither input
            nor part of the model.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]  # now: the forward may replace a buffer
    mode = detect_fake_mode([tensor for _, tensor in tensors])
    args, kwargs = map_tensors(
        lambda tensor: fake_like(tensor, mode, device=device) if mode else tensor.to(device), (args, dict(kwargs))
    )
    leaves = flatten_tree((args, kwargs))[0]
    with mode or nullcontext(), keeping_buffers(model, has_values=mode is None):
        gm, values, results, output = _graph_of(model, args, kwargs, is_copy=mode is not None)
        assigned = assigned_buffers(model, tensors, results=results, arguments=leaves)
    state, inputs = _origins(gm, values, tensors=tensors, leaves=leaves)
    values, state, slices = _own_slices(gm, values, state, SliceTensors(parse_options(options).sequence_parallel))
    if seeds := seed_draws(gm):
        values.append(torch.zeros(1, len(seeds), dtype=torch.int64))
    run = FakeRun(gm, device, costs or CostModel.default(device_type=device.type))
    run.values_of(values)
    run.costs.update(dict.fromkeys(seeds, 0.0))  # each stage computes its own, of one number
    writes = find_writes(gm, run, state, assigned=dict(tensors), numbers=assigned)
    repeated = _repeated(gm, run, state, {*changing, *(state[name][0] for name in writes.values)})
    return CapturedModel(
        *(gm, state, inputs, _results(gm), output, run.costs, slices, repeated),
        draws=bool(run.effects.draws or seeds),
        seeds=len(seeds),
        unseeded=run.unseeded(),
        writes=writes,
    )


def _results(gm: GraphModule) -> list[Node]:
    """Return what the graph returns; a value may be there twice."""
    nodes: Any = gm.graph.output_node().args[0]
    return list(nodes)


def _repeated(
    gm: GraphModule, run: FakeRun, state: Mapping[str, tuple[str, Tensor]], changing: Collection[str]
) -> frozenset[Node]:
    """Return the nodes that every rank can compute by itself, from inputs and small buffers that do not change."""
    held = {node for node in gm.graph.find_nodes(op="placeholder") if node.name in state}
    apart = {node for node in held if isinstance(state[node.name][1], nn.Parameter) or not is_small(node)}
    apart |= {node for node in held if state[node.name][0] in changing}
    return frozenset(root_values(gm.graph, parameters=apart, impure=run.impure()))


def _graph_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_copy: bool
) -> tuple[GraphModule, Sequence[Any], Sequence[Any], OutputTree]:
    """Return the forward as Dynamo captures it, the values of its placeholders and results, and the output's tree."""
    kept: list[Any] = []

    def keep(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        def run(*values: Any) -> Any:  # once
            with torch.no_grad():
                results = gm.forward(*values)
            kept.append(results)
            return results

        kept.extend((gm, inputs))
        return run

    _install_hooks(model, kwargs)
    try:
        with ignoring_log_messages(), allowing_recompiles():
            output = torch.compile(model, backend=keep, fullgraph=True, dynamic=False)(*args, **kwargs)
    except capture_errors() as error:
        hint = remedy(str(error)) or (_of_copy(str(error)) if is_copy else "")
        why = f"pipeline: the model's forward cannot be captured as one graph.{hint}"
        raise PartitionError(f"{why} Torch says: {error}") from error
    gm, values, results = kept
    kept.clear()  # torch's cache of compiled code keeps `keep` alive, and all that `kept` contains
    leaves = flatten_tree((args, kwargs))[0]
    return gm, values, results, OutputTree.of(output, results=results, inputs=values, arguments=leaves)


def _of_copy(said: str) -> str:
    """Return why the copy of a model may fail where the model does not, from torch's words."""
    if re.search(r"got \w+\(.*(dtype|scalar type)", said):
        return (
            " An operator gets two dtypes, and param_dtype casts only parameters and inputs: convert other tensors in "
            "the forward, such as buffer.to(x.dtype)."
        )
    return " In the copy that is captured, other tensors of the model stay on its device."


def _install_hooks(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Let transformers install its hooks that collect outputs such as router logits: its lock cannot be captured."""
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None or not hasattr(library, "maybe_install_capturing_hooks"):
        return
    collects = any(value for key, value in kwargs.items() if key.startswith("output_"))
    for module in model.modules():
        config = getattr(module, "config", None)
        flags = [value for key, value in vars(config).items() if key.startswith("output_")] if config else []
        if (collects or any(flags)) and type(module).__module__.startswith("transformers."):
            library.maybe_install_capturing_hooks(module)
            return


def _origins(
    gm: GraphModule, values: Sequence[Any], *, tensors: Sequence[tuple[str, Tensor]], leaves: Sequence[Any]
) -> tuple[dict[str, tuple[str, Tensor]], dict[str, int]]:
    """Return the origin of each placeholder: the model, or the arguments."""
    names = {id(tensor): name for name, tensor in tensors}
    numbers = {id(leaf): number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    state, inputs = {}, {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
        if id(value) in names:
            state[node.name] = (names[id(value)], value)
        elif id(value) in numbers:
            inputs[node.name] = numbers[id(value)]
        else:
            raise PartitionError(
                f"pipeline: the forward reads {node.name}, which is neither an argument, a parameter nor a buffer: "
                "register it as a buffer, or pass it"
            )
    return state, inputs


def _slices(gm: GraphModule, state: Mapping[str, tuple[str, Tensor]]) -> dict[str, ParameterSlice]:
    """Return the tensor-parallel parameters that a graph reads."""
    found = {}
    for graph, outer in ((gm, {}), *bodies(gm)):
        for marker, held, ranks, group in marked_slices(graph):
            (source,) = marker.all_input_nodes
            (placeholder,) = source.all_input_nodes or (source,)
            name = state[outer.get(placeholder, placeholder).name][0]
            found[name] = ParameterSlice(held.dim, held.parts, ranks, group)
    return found


def _own_slices(
    gm: GraphModule, values: Sequence[Any], state: Mapping[str, tuple[str, Tensor]], slicing: SliceTensors
) -> tuple[list[Any], dict[str, tuple[str, Tensor]], dict[str, ParameterSlice]]:
    """Let the graph of a tensor-parallel model compute with this rank's slices, which replace the parameters."""
    if not any(isinstance(value, DTensor) for value in values):
        return list(values), dict(state), {}
    slices = _slices(gm, state)
    slicing.run(gm, PassContext(Phase.CAPTURE))
    own: dict[str, Tensor] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
        if not isinstance(value, DTensor):
            continue
        own[node.name] = nn.Parameter(value.to_local().detach(), requires_grad=value.requires_grad)
    for graph in all_graph_modules(gm):
        for node in filter(is_to_local, list(graph.graph.nodes)):
            replace_and_erase(node, node.args[0])
        graph.recompile()
    placeholders = gm.graph.find_nodes(op="placeholder")
    new = [own.get(node.name, value) for node, value in zip(placeholders, values, strict=True)]
    return new, {key: (name, own.get(key, tensor)) for key, (name, tensor) in state.items()}, slices
