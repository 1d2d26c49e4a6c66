"""The forward of a model as one graph, with the costs of its nodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

from dsgraph.compat.autograd import version_of
from dsgraph.compat.compiled import allowing_recompiles
from dsgraph.compat.dtensor import fake_like
from dsgraph.compat.dynamo import capture_errors, ignoring_log_messages
from dsgraph.compat.tensors import flatten_tree, map_tensors
from dsgraph.compiler.remedies import remedy
from dsgraph.partitioning.transforms.parameter_slice import ParameterSlice
from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.compat import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    detect_fake_mode,
    is_batched,
    is_to_local,
    schema_of,
    storage_id,
)
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.ir.graph import all_graph_modules, bodies, replace_and_erase
from dsgraph.passes.parallel.root_values import is_small, root_values
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.parallel.slice_walk import marked_slices
from dsgraph.utils.errors import PartitionError


@dataclass(frozen=True)
class CapturedModel:
    """A captured forward.

    Attributes:
        graph_module: The graph; parameters, buffers and inputs are placeholders. `meta["val"]` holds fake values.
        state: Placeholder of a parameter or buffer -> its name in the model, and itself.
        inputs: Placeholder of an input -> its number among the leaves of (args, kwargs).
        results: The nodes of the tensors that the model returns.
        costs: Seconds of each node's forward, by the cost model.
        slices: Parameters of which each tensor-parallel rank holds a slice, by name; `state` has this rank's.
        repeated: Nodes that every rank can compute by itself, from inputs and small buffers.
        draws: True if the forward draws random numbers.
    """

    graph_module: GraphModule
    state: Mapping[str, tuple[str, Tensor]]
    inputs: Mapping[str, int]
    results: Sequence[Node]
    costs: Mapping[Node, float]
    slices: Mapping[str, ParameterSlice]
    repeated: frozenset[Node]
    draws: bool


def fake_values(gm: GraphModule, device: torch.device) -> dict[Node, Any]:
    """Return the current fake values of a captured graph's nodes; under autocast some have other dtypes.

    Args:
        gm: Graph of a `CapturedModel`, whose parameters may be freed already.
        device: The device of the stages.
    """
    run = _FakeRun(gm, device, CostModel.default(device_type=device.type))
    return run.values_of([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any],
    device: torch.device,
    costs: CostModel | None = None,
) -> CapturedModel:
    """Capture a model's forward by Dynamo.

    Args:
        model: An unmodified model on the device of the stages, or its copy of `without_values`.
        args: Positional arguments of one micro-batch.
        kwargs: Keyword arguments of one micro-batch.
        device: The device of the stages.
        costs: The cost model; None: the defaults of the device type.

    Raises:
        PartitionError: The forward has a graph break, writes to a buffer, or reads a tensor that is neither input nor
            part of the model.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]  # now: the forward may replace a buffer
    mode = detect_fake_mode([tensor for _, tensor in tensors])
    args, kwargs = map_tensors(
        lambda tensor: fake_like(tensor, mode, device=device) if mode else tensor.to(device), (args, dict(kwargs))
    )
    with mode or nullcontext():
        gm, values = _graph_of(model, args, kwargs, is_copy=mode is not None)
    state, inputs = _origins(gm, values, tensors=tensors, leaves=flatten_tree((args, kwargs))[0])
    slices = _slices(gm, state)
    values, state = _own_slices(gm, values, state)
    run = _FakeRun(gm, device, costs or CostModel.default(device_type=device.type))
    run.values_of(values)
    _refuse_changes(gm, state)
    held = {node for node in gm.graph.find_nodes(op="placeholder") if node.name in state}
    apart = {node for node in held if isinstance(state[node.name][1], nn.Parameter) or not is_small(node)}
    repeated = frozenset(root_values(gm.graph, parameters=apart, impure=run.impure()))
    results: Any = gm.graph.output_node().args[0]
    return CapturedModel(gm, state, inputs, list(results), run.costs, slices, repeated, bool(run.effects.draws))


def _graph_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_copy: bool
) -> tuple[GraphModule, Sequence[Any]]:
    """Return the forward as Dynamo captures it, and the values of its placeholders."""
    kept: list[tuple[GraphModule, Sequence[Any]]] = []

    def keep(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        kept.append((gm, inputs))
        return torch.no_grad()(gm.forward)  # it runs once, and nothing that it computes is kept

    _install_hooks(model, kwargs)
    try:
        with ignoring_log_messages(), allowing_recompiles():
            torch.compile(model, backend=keep, fullgraph=True, dynamic=False)(*args, **kwargs)
    except capture_errors() as error:
        outside = " In the copy that is captured, other tensors of the model stay on its device." if is_copy else ""
        why = f"pipeline: the model's forward cannot be captured as one graph.{remedy(str(error))}{outside}"
        raise PartitionError(f"{why} Torch says: {error}") from error
    return kept.pop()  # torch's cache of compiled code keeps `keep` alive, and all that `kept` contains


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
    gm: GraphModule, values: Sequence[Any], state: Mapping[str, tuple[str, Tensor]]
) -> tuple[list[Any], dict[str, tuple[str, Tensor]]]:
    """Let the graph of a tensor-parallel model compute with this rank's slices, which replace the parameters."""
    if not any(isinstance(value, DTensor) for value in values):
        return list(values), dict(state)
    SliceTensors().run(gm, PassContext(Phase.CAPTURE))
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
    return new, {key: (name, own.get(key, tensor)) for key, (name, tensor) in state.items()}


class _Effects(TorchDispatchMode):
    """A dispatch mode that records which nodes draw random numbers, and which memory is written to.

    Attributes:
        node: The node that is run.
        draws: Nodes that draw.
        writes: Nodes that write.
        written: Storages that are written to.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.node: Node | None = None
        self.draws: set[Node | None] = set()
        self.writes: set[Node | None] = set()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):  # a higher-order operator, whose effects are unknown
            self.draws.add(self.node)
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.add(self.node)
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.writes.add(self.node)
                self.written.add(storage_id(value))
        return func(*args, **(kwargs or {}))


class _FakeRun(Interpreter):
    """An interpreter that runs a graph under fake tensors, and records the value and cost of each node.

    Attributes:
        costs: Seconds of each node.
        effects: Nodes that have effects besides their value.
    """

    def __init__(self, gm: GraphModule, device: torch.device, costs: CostModel) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._device = device
        self._model = costs
        self._counter = FlopCounterMode(display=False)
        self._values: dict[Node, Any] = {}
        self.costs: dict[Node, float] = {}
        self.effects = _Effects()

    def values_of(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Return the fake values of all nodes."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), self._counter, self.effects:
            self.run(*map(self._fake, inputs))
        return self._values

    def impure(self) -> set[Node]:
        """Return the nodes that draw random numbers, that write, or whose memory is written to or unknown."""
        written = {
            node
            for node, value in self._values.items()
            if isinstance(value, Tensor) and (is_batched(value) or storage_id(value) in self.effects.written)
        }
        return written | {node for node in self.effects.draws | self.effects.writes if node is not None}

    def run_node(self, n: Node) -> Any:
        before = self._counter.get_total_flops()
        self.effects.node = n
        value = super().run_node(n)
        self._values[n] = value
        n.meta.setdefault("val", value)  # keep the value of the first run
        if n.op.startswith("call"):
            read_bytes = sum(tensor_bytes(self._values.get(read)) for read in n.all_input_nodes)
            operations = self._counter.get_total_flops() - before
            moved = number_of(n, tensor_bytes(value) + read_bytes)
            self.costs[n] = self._model.kernel_seconds(operations, moved, dtype=torch.float32)
        return value

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
        return fake.requires_grad_(value.requires_grad)


def _refuse_changes(gm: GraphModule, state: Mapping[str, tuple[str, Tensor]]) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in state and version_of(node.meta["val"]) > 0:
            raise PartitionError(
                f"pipeline: the forward writes to {state[node.name][0]!r}, once a micro-batch on one rank alone: "
                "call eval() on the module that does, or use one without running statistics"
            )
