"""A model's forward as one graph, with what its nodes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import FlopCounterMode

from dsgraph import compat
from dsgraph.compiler.remedies import remedy
from dsgraph.errors import PartitionError
from dsgraph.passes.analysis.cost import CostModel, number_of, tensor_bytes
from dsgraph.passes.compat import FakeTensorMode, is_to_local
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.ir.graph import replace_and_erase
from dsgraph.passes.parallel.slice_tensors import SliceTensors
from dsgraph.passes.parallel.slice_walk import marked_slices
from dsgraph.sharding.slices import ParameterSlice


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
    """

    graph_module: GraphModule
    state: Mapping[str, tuple[str, Tensor]]
    inputs: Mapping[str, int]
    results: Sequence[Node]
    costs: Mapping[Node, float]
    slices: Mapping[str, ParameterSlice]


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any],
    device: torch.device,
    costs: CostModel | None = None,
) -> CapturedModel:
    """Captures a model's forward by Dynamo, under fake tensors.

    Args:
        model: Unmodified; may lie on the meta device.
        args: Positional arguments of one micro-batch.
        kwargs: Named ones.
        device: Where the stages will run.
        costs: What nodes take; None: by the figures that stand for every device of its type.

    Raises:
        PartitionError: The forward has a graph break, writes to a buffer, or reads a tensor that is neither input nor
            part of the model.
    """
    kept: list[tuple[GraphModule, Sequence[Any]]] = []

    def keep(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        kept.append((gm, inputs))
        return _results_only(gm)

    source = next((tensor.device for tensor in model.parameters()), device)
    args, kwargs = compat.map_tensors(lambda tensor: tensor.to(source), (args, dict(kwargs)))
    try:
        torch.compile(model, backend=keep, fullgraph=True, dynamic=False)(*args, **kwargs)
    except compat.not_capturable() as error:
        why = f"pipeline: the model's forward cannot be captured as one graph.{remedy(str(error))} Torch says: {error}"
        raise PartitionError(why) from error
    gm, values = kept[0]
    state, inputs = _origins(gm, values, model=model, leaves=compat.flatten_tree((args, kwargs))[0])
    slices = _slices(gm, state)
    values, state = _own_slices(gm, values, state)
    _place(gm, source, device)
    node_costs = _FakeRun(gm, device, costs or CostModel.default(device_type=device.type)).costs_of(values)
    _refuse_changes(gm, state)
    (output,) = gm.graph.find_nodes(op="output")
    return CapturedModel(gm, state, inputs, list(output.args[0]), node_costs, slices)


def _results_only(gm: GraphModule) -> Any:
    """What runs once while the model is captured: it computes nothing that is kept."""

    def run(*values: Any) -> Any:
        with torch.no_grad():
            return gm(*values)

    return run


def _origins(
    gm: GraphModule, values: Sequence[Any], *, model: nn.Module, leaves: Sequence[Any]
) -> tuple[dict[str, tuple[str, Tensor]], dict[str, int]]:
    """Where each placeholder comes from: the model, or the arguments."""
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
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
    """The sliced parameters that a graph reads."""
    found = {}
    for marker, held, ranks, group in marked_slices(gm):
        (source,) = marker.all_input_nodes
        (placeholder,) = source.all_input_nodes or (source,)
        found[state[placeholder.name][0]] = ParameterSlice(held.dim, held.parts, ranks, group)
    return found


def _own_slices(
    gm: GraphModule, values: Sequence[Any], state: Mapping[str, tuple[str, Tensor]]
) -> tuple[list[Any], dict[str, tuple[str, Tensor]]]:
    """Of a tensor-parallel model: lets the graph compute with this rank's slices, which take the parameters' places."""
    if not any(isinstance(value, DTensor) for value in values):
        return list(values), dict(state)
    SliceTensors().run(gm, PassContext(Phase.CAPTURE))
    own: dict[str, Tensor] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
        if not isinstance(value, DTensor):
            continue
        own[node.name] = nn.Parameter(value.to_local().detach(), requires_grad=value.requires_grad)
        for user in filter(is_to_local, list(node.users)):
            replace_and_erase(user, node)
    gm.recompile()
    placeholders = gm.graph.find_nodes(op="placeholder")
    new = [own.get(node.name, value) for node, value in zip(placeholders, values, strict=True)]
    return new, {key: (name, own.get(key, tensor)) for key, (name, tensor) in state.items()}


def _place(gm: GraphModule, source: torch.device, device: torch.device) -> None:
    """Tensors that the graph makes are made where the stages run."""
    if source == device:
        return

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value == source else value

    for node in gm.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
    gm.recompile()


class _FakeRun(Interpreter):
    """Runs a graph under fake tensors, and keeps what each node gives and costs."""

    def __init__(self, gm: GraphModule, device: torch.device, costs: CostModel) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._device = device
        self._model = costs
        self._counter = FlopCounterMode(display=False)
        self._costs: dict[Node, float] = {}

    def costs_of(self, values: Sequence[Any]) -> dict[Node, float]:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), self._counter:
            self.run(*map(self._fake, values))
        return self._costs

    def run_node(self, n: Node) -> Any:
        before = self._counter.get_total_flops()
        value = super().run_node(n)
        n.meta["val"] = value
        if n.op.startswith("call"):
            moved = tensor_bytes(value) + sum(tensor_bytes(read.meta.get("val")) for read in n.all_input_nodes)
            operations = self._counter.get_total_flops() - before
            self._costs[n] = self._model.kernel_seconds(operations, number_of(n, moved), dtype=torch.float32)
        return value

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
        return fake.requires_grad_(value.requires_grad)


def _refuse_changes(gm: GraphModule, state: Mapping[str, tuple[str, Tensor]]) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in state and compat.version_of(node.meta["val"]) > 0:
            raise PartitionError(
                f"pipeline: the forward writes to {state[node.name][0]!r}, once a micro-batch on one rank alone: "
                "put the module that does into eval(), or take one that keeps no running figures"
            )
