"""A run of a captured graph under fake tensors, which gives the values and costs of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.compat import FakeTensorMode, OpOverload, TorchDispatchMode, is_batched, schema_of, storage_id


def fake_values(gm: GraphModule, device: torch.device) -> dict[Node, Any]:
    """Return the current fake values of a captured graph's nodes; under autocast some have other dtypes.

    Args:
        gm: Graph of a `CapturedModel`, whose parameters may be freed already.
        device: The device of the stages.
    """
    run = FakeRun(gm, device, CostModel.default(device_type=device.type))
    return run.values_of([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])


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


class FakeRun(Interpreter):
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
        """Run a node; see torch."""
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
