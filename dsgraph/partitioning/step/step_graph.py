"""The FX graph of a step, made from its record: units are nodes, parameters are markers, as in a captured model."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.partitioning.markers import marker_options, reduction_options
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.passes import compat
from dsgraph.passes.ir.graph import insert

from .step_record import Call, StepRecord, Work


@dataclass(frozen=True)
class JointStep:
    """A step before any pass.

        gather_param = gather_param(blocks_0_w1_weight, None, [512, 128])
        run_1 = run_forward(1, [hidden], [gather_param])
        run_1_backward = run_backward(1, [saved, tangent], [gather_param])
        reduce_grad = reduce_grad(grad, [256, 128])

    Attributes:
        gm: The joint graph. Placeholders are shards, held copies, the batch, and the tangent. Outputs are the results
            of the last unit that has any, a token that orders calls, then the reduced gradients.
        entries: The parameters, in the order of the first placeholders.
        gradients: The parameters whose gradients are the last outputs.
        copies: The parameters whose full copies are the placeholders after the shards.
        results: Number of the first outputs: results and the token.
    """

    gm: GraphModule
    entries: tuple[ParameterState, ...]
    gradients: tuple[ParameterState, ...]
    copies: tuple[ParameterState, ...]
    results: int


def joint_graph(record: StepRecord, seconds: Callable[[Work], float]) -> JointStep:
    """Return the joint graph of a step.

    Args:
        record: The step.
        seconds: Predicts the time of a unit's forward. A backward computes twice as much.
    """
    return _Builder(record, seconds).build()


class _Builder:
    def __init__(self, record: StepRecord, seconds: Callable[[Work], float]) -> None:
        self._record, self._graph, self._mode, self._seconds = record, Graph(), compat.FakeTensorMode(), seconds
        self._entries = tuple(dict.fromkeys(entry for call in record.calls for entry in call.entries))
        self._full: list[list[Node]] = []
        self._results: list[list[Node]] = []
        self._saved: list[Node] = []
        self._token: Node | None = None  # orders calls that no value connects

    def build(self) -> JointStep:
        """Return the graph."""
        record = self._record
        shards = {
            entry: self._input(_identifier(entry.name), entry.rows, number)
            for number, entry in enumerate(self._entries)
        }
        self._copies = {
            entry: self._input(f"{_identifier(entry.name)}_held", self._full_of(entry), len(shards) + number)
            for number, entry in enumerate(entry for entry in self._entries if entry in record.held)
        }
        outside = self._input("batch", torch.empty(1), len(shards) + len(self._copies))
        tangent = self._tangent() if record.backward else None
        self._end = self._graph.output(())
        for number, call in enumerate(record.calls):
            self._forward(number, call, shards, outside)
        grads = self._backward(tangent) if tangent is not None else []
        assert self._token is not None
        results = [*next((made for made in reversed(self._results) if made), []), self._token]
        self._end.args = ((*results, *(node for _, node in grads)),)
        descs = [compat.plain_output(number) for number in range(len(results))]
        places = {entry: number for number, entry in enumerate(self._entries)}
        self._end.meta["desc"] = descs + [compat.gradient_output(places[entry]) for entry, _ in grads]
        gm, copies = compat.make_graph_module(nn.Module(), self._graph), tuple(self._copies)
        return JointStep(gm, self._entries, tuple(entry for entry, _ in grads), copies, len(results))

    def _fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return compat.new_fake(self._mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), device)

    def _input(self, name: str, like: Tensor, number: int) -> Node:
        node = self._graph.placeholder(name)
        node.target = node.name  # names of parameters may collide
        node.meta["val"] = self._fake(like.shape, like.dtype, like.device)
        node.meta["desc"] = compat.plain_input(number)
        return node

    def _tangent(self) -> Node:
        last = self._record.calls[self._record.backward[0]]
        node = self._graph.placeholder("tangents_1")
        node.meta["val"] = self._gradient(last, torch.empty(1))
        return node

    def _call(self, target: Any, args: tuple[Any, ...], value: Any, name: str | None = None) -> Node:
        with self._graph.inserting_before(self._end):
            node = self._graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = value
        return node

    def _item(self, node: Node, number: int) -> Node:
        return self._call(operator.getitem, (node, number), node.meta["val"][number])

    def _forward(self, number: int, call: Call, shards: dict[ParameterState, Node], outside: Node) -> None:
        full = [self._marker(entry, shards[entry]) for entry in call.entries]
        made = [self._results[item.call][item.number] for item in call.inputs if item.call >= 0]
        values = [*dict.fromkeys(made), self._token or outside]
        device = call.entries[0].param.device
        fakes = [self._fake(item.shape, item.dtype, item.device) for item in call.outputs]
        fakes += [self._fake((size,), torch.uint8, device) for size in (call.saved_bytes, 1)]
        node = self._call(RUN_FORWARD, (number, values, full), tuple(fakes), f"run_{number}")
        node.meta["seconds"], node.meta["unit"] = self._seconds(call.unit.work), call.name
        self._full.append(full)
        self._results.append([self._item(node, index) for index in range(len(call.outputs))])
        self._saved.append(self._item(node, len(call.outputs)))
        self._token = self._item(node, len(call.outputs) + 1)

    def _marker(self, entry: ParameterState, shard: Node) -> Node:
        options = marker_options(entry.spec, entry.param.dtype)
        what = (shard, self._copies.get(entry), list(entry.spec.shape))
        return insert(self._end, torch.ops.dsgraph.gather_param.default, what, options, self._full_of(entry))

    def _backward(self, tangent: Node) -> list[tuple[ParameterState, Node]]:
        """Add the backward, and return the reduced gradients.

        Each unit's backward takes the gradient that the previous one passes on.

        A parameter that several units read is reduced for each of them, as outside a plan: sums are the same bit for
        bit.
        """
        grads, before = [], tangent
        for number in self._record.backward:
            call = self._record.calls[number]
            fakes = [self._gradient(call, before.meta["val"]), *map(self._full_of, call.trained)]
            reads = self._full[number] if call.outputs else []  # autograd keeps what uncompiled code has read
            args = (number, [self._saved[number], before], reads)
            node = self._call(RUN_BACKWARD, args, tuple(fakes), f"run_{number}_backward")
            node.meta["seconds"], node.meta["unit"] = 2 * self._seconds(call.unit.work), call.name
            before = self._item(node, 0)
            grads += [(entry, self._item(node, index)) for index, entry in enumerate(call.trained, 1)]
        return [(entry, self._reduced(entry, grad)) for entry, grad in grads]

    def _reduced(self, entry: ParameterState, grad: Node) -> Node:
        rows, options = entry.rows, reduction_options(entry.spec, entry.param.dtype)
        value = self._fake(rows.shape, options["dtype"], rows.device)
        return insert(grad.next, torch.ops.dsgraph.reduce_grad.default, (grad, list(rows.shape)), options, value)

    def _gradient(self, call: Call, otherwise: Tensor) -> Tensor:
        """Return the gradient that a unit's backward passes on: that of its first input, or of its first result."""
        found = [item for item in (*call.inputs, *call.outputs) if item.dtype.is_floating_point]
        like: Any = found[0] if found else otherwise
        return self._fake(like.shape, like.dtype, like.device)

    def _full_of(self, entry: ParameterState) -> Tensor:
        dtype, _ = entry.spec.dtypes(entry.param.dtype)
        return self._fake(entry.spec.shape, dtype, entry.param.device)


def _identifier(name: str) -> str:
    return "p_" + re.sub(r"\W", "_", name).replace("tangents", "tangent")  # see `is_tangent`
