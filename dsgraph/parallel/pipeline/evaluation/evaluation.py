"""Evaluation of a pipelined model: its forward in `eval()`, on the ranks that have its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsgraph.batches import joined_values
from dsgraph.compat.tensors import map_tensors
from dsgraph.parallel.pipeline.captured_model import CapturedModel, capture_model
from dsgraph.parallel.pipeline.fake_values import fake_values
from dsgraph.parallel.pipeline.model_copy import default_device, without_values
from dsgraph.parallel.pipeline.stage_modules import LossOf, StageModule
from dsgraph.parallel.pipeline.stage_values import fetch_missing
from dsgraph.parallel.pipeline.step_arguments import StepArguments
from dsgraph.passes.compat import set_grad_enabled
from dsgraph.passes.parallel.stages.split_stages import stages_by_parameters
from dsgraph.passes.parallel.stages.stage_graphs import StageGraph, describe_stages, return_only
from dsgraph.ranks.agreement import Agreement
from dsgraph.utils.errors import OptionError, PartitionError


@dataclass(frozen=True)
class Held:
    """The parameters and buffers of this rank, and the stages of all ranks that read each.

    Attributes:
        tensors: Parameters and buffers of this rank's stages, by name.
        stages: For each parameter and buffer of the model, by name, the stages that read it.
        rank_of: The rank of each stage.
        written: Names of the buffers that the forward in training writes, of which one stage has the values.
        group: The ranks of the pipeline.
        device: Their device.
    """

    tensors: Mapping[str, Tensor]
    stages: Mapping[str, Sequence[int]]
    rank_of: Sequence[int]
    written: frozenset[str]
    group: dist.ProcessGroup
    device: torch.device

    @staticmethod
    def of(
        graphs: Sequence[StageGraph],
        held: Sequence[Sequence[int]],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Held:
        """Return the parameters and buffers of this rank.

        Args:
            graphs: The stages of training; those of this rank have values.
            held: The stages of each rank.
            group: The ranks of the pipeline.
            device: Their device.
        """
        stages: dict[str, list[int]] = {}
        for number, graph in enumerate(graphs):
            for name in graph.parameters:
                stages.setdefault(name, []).append(number)
        modules = [graphs[number].module for number in held[group.rank()]]
        own = {
            name: tensor for module in modules for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        rank_of = {stage: rank for rank, numbers in enumerate(held) for stage in numbers}
        written = frozenset(name for graph in graphs for name in graph.written)
        return Held(own, stages, [rank_of[stage] for stage in range(len(graphs))], written, group, device)


class Evaluation:
    """The stages of a model's forward in `eval()`. They are captured when they first run.

    The forward may differ from that of training: it has no dropout, and BatchNorm uses running statistics. It is cut so
    that each parameter is read on the rank that has it.
    """

    def __init__(
        self,
        model: nn.Module | PartitionError,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        is_moved: bool,
        returns_outputs: bool,
        result: Callable[[CapturedModel], Node | None],
        held: Held,
        loss: LossOf,
        agreement: Agreement,
        options: Mapping[str, Any] | None,
    ) -> None:
        """Set up from parts.

        Args:
            model: The model without values, see `without_values`; or why there is none.
            example: Arguments of one micro-batch.
            is_moved: True if the model was on another device than its stages.
            returns_outputs: True if the last stage returns the model's output besides the loss.
            result: Returns the node from which the loss is computed; None if there is none.
            held: This rank's parameters.
            loss: Computes a micro-batch's share of the mean loss from the value of that node.
            agreement: The ranks of the pipeline.
            options: Options of the backend; None: stages run uncompiled.

        Raises:
            PartitionError: The model cannot be copied.
        """
        if isinstance(model, PartitionError):
            raise model
        self._model: nn.Module | None = without_values(model, held.device).eval()  # its forward may leave something
        self._example = map_tensors(lambda tensor: tensor.detach().to("meta"), example)
        self._result, self._held, self._loss, self._agreement, self._options = result, held, loss, agreement, options
        self._is_moved, self._returns_outputs = is_moved, returns_outputs
        self._loss_node: Node | None = None
        self._graphs: list[StageGraph] = []
        self._modules: dict[int, StageModule] = {}
        self._captured: CapturedModel | None = None
        self._inputs: dict[str, int] = {}

    def run(self, arguments: StepArguments, leaves: Sequence[Any], target: Tensor | None) -> tuple[Tensor | None, Any]:
        """Return this rank's part of the mean loss, which is 0 unless it has the last stage, and the model's output.

        The ranks of the pipeline call it together. The micro-batches go through the stages one after the other.

        Args:
            arguments: What arguments of a step are like.
            leaves: The leaves of the arguments for the complete batch.
            target: The target of `loss_fn`.

        Returns:
            The loss, None if nothing computes it; the output, None without `returns_outputs` and on other ranks.

        Raises:
            OptionError: There is neither a loss nor `returns_outputs`.
            PartitionError: The forward in `eval()` cannot be captured, or reads parameters in another order.
        """
        if not self._graphs:
            with torch.inference_mode(False), torch.enable_grad():
                self._capture()
        assert self._captured is not None
        count, device = self._loss.microbatches, self._held.device
        inputs = arguments.inputs(leaves, self._inputs, device, seeds=self._captured.seeds).parts()
        targets = [None] * count if target is None else target.to(device).chunk(count)
        values = fake_values(self._captured.graph_module, device)  # of the current autocast
        loss_node = None if self._loss.is_function and target is None else self._loss_node
        total = torch.zeros((), device=device)
        kept: list[Mapping[Node, Tensor]] = []
        with torch.no_grad():
            for batch, rows in zip(inputs, targets, strict=True):
                results = self._run(batch, values)
                if results is not None and loss_node is not None:
                    total += self._loss(results[loss_node], rows).float()
                if results is not None and self._returns_outputs:
                    kept.append(results)
            output = self._output(self._captured, kept, leaves) if kept else None
        return None if loss_node is None else total, output

    def _output(self, captured: CapturedModel, kept: Sequence[Mapping[Node, Tensor]], leaves: Sequence[Any]) -> Any:
        """Return the model's output for the complete batch from the results of its micro-batches."""
        tree = captured.output
        results = {
            number: joined_values([each[captured.results[number]] for each in kept])
            for number in set(tree.results.values())
        }
        return tree.filled(
            results, {number: leaves[number].to(self._held.device) for number in tree.arguments.values()}
        )

    def _run(self, batch: Mapping[str, Tensor], values: Mapping[Node, Any]) -> Mapping[Node, Tensor] | None:
        """Run this rank's stages for one micro-batch. Return the results of the last stage, on its rank."""
        held, me = self._held, self._held.group.rank()
        sent: Sequence[Tensor] = ()
        for number, module in self._modules.items():
            before = held.rank_of[number - 1] if number else me
            received = sent if before == me else self._receive(self._graphs[number].received, values, source=before)
            sent = module(*received, **batch)
            if number + 1 == len(self._graphs):
                return dict(zip(self._graphs[number].sent, sent, strict=True))
            after = held.rank_of[number + 1]
            for value in sent if after != me else ():
                dist.send(value, group=held.group, group_dst=after)
        return None

    def _receive(self, nodes: Sequence[Node], values: Mapping[Node, Any], *, source: int) -> list[Tensor]:
        received = []
        for node in nodes:
            like = values[node]
            received.append(torch.empty(like.shape, dtype=like.dtype, device=self._held.device))
            dist.recv(received[-1], group=self._held.group, group_src=source)
        return received

    def _capture(self) -> None:
        assert self._model is not None
        args, kwargs = self._example
        held = self._held
        with default_device(held.device if self._is_moved else None):
            captured = capture_model(self._model, args, kwargs=kwargs, device=held.device, changing=held.written)
        _drop_grad_modes(captured.graph_module)
        results = self._results(captured)
        return_only(captured.graph_module, results)
        missing = [name for name, _ in captured.state.values() if name not in held.stages]
        if missing:
            raise PartitionError(
                f"pipeline: the forward in eval() reads {missing[0]!r}, which that of training does not, and no stage "
                "holds it"
            )
        for name in captured.writes.together:
            if len(held.stages.get(name, ())) > 1:
                raise PartitionError(
                    f"pipeline: the forward in eval() writes to buffer {name!r}, of which {len(held.stages[name])} "
                    "stages hold copies, because that of training only reads it: write to it in training as well"
                )
        state = {key: (name, held.tensors.get(name, tensor)) for key, (name, tensor) in captured.state.items()}
        plan = stages_by_parameters(
            captured.graph_module.graph,
            {key: name for key, (name, _) in captured.state.items()},
            stages=held.stages,
            count=len(held.rank_of),
            repeated=captured.repeated,
            together=captured.writes.together,
        )
        graphs = replace(captured, state=state).stages(plan, results)
        self._agreement.confirm("evaluate different pipelines", describe_stages(graphs))
        fetch_missing(graphs, held.tensors, held.stages, rank_of=held.rank_of, group=held.group, device=held.device)
        own = [number for number, rank in enumerate(held.rank_of) if rank == held.group.rank()]
        self._modules = {
            number: StageModule(
                graphs[number].module, graphs[number].roots, single=False, written=graphs[number].written
            )
            for number in own
        }
        for module in self._modules.values() if self._options is not None else ():
            module.compile_graph(self._options or {})
        self._graphs, self._captured, self._inputs, self._model = graphs, captured, dict(captured.inputs), None

    def _results(self, captured: CapturedModel) -> list[Node]:
        """Return the results of the last stage: what the loss is computed from, and the tensors of the output."""
        self._loss_node = self._result(captured)
        if self._loss_node is None and not self._returns_outputs:
            raise OptionError(
                "pipeline.evaluate: the model in eval() returns no floating-point scalar: give pipeline loss_fn=, have "
                "the model return its loss, or pass evaluate return_outputs=True"
            )
        losses = [] if self._loss_node is None else [self._loss_node]
        return list(dict.fromkeys([*losses, *(captured.returned() if self._returns_outputs else ())]))


def _drop_grad_modes(gm: GraphModule) -> None:
    """Remove calls that switch gradients on or off: evaluation computes none, and such a region cannot be cut."""
    for node in gm.graph.find_nodes(op="call_function", target=set_grad_enabled):
        gm.graph.erase_node(node)
    gm.recompile()
