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
from dsgraph.passes.ir.blocks import module_of


def fake_values(gm: GraphModule, device: torch.device) -> dict[Node, Any]:
    """Return the current fake values of a captured graph's nodes; under autocast some have other dtypes.

    Args:
        gm: Graph of a `CapturedModel`, whose parameters may be freed already.
        device: The device of the stages.
    """
    run = FakeRun(gm, device, CostModel.default(device_type=device.type))
    return run.values_of([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])


# Ops that write to running statistics, their fourth and fifth arguments, if the sixth is True; schemas do not say so.
_WITH_STATISTICS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})


class _Effects(TorchDispatchMode):
    """A dispatch mode that records which nodes draw random numbers, and which memory is written to.

    Attributes:
        node: The node that is run.
        draws: Nodes that draw, or that may.
        certain: Those that do, with the op.
        writers: The nodes that write to each storage.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.node: Node | None = None
        self.draws: set[Node | None] = set()
        self.certain: dict[Node | None, str] = {}
        self.writers: dict[int, set[Node | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):  # a higher-order operator, whose effects are unknown
            self.draws.add(self.node)
            return func(*args, **(kwargs or {}))
        certain = torch.Tag.nondeterministic_seeded in func.tags
        if certain:
            self.draws.add(self.node)
        given, named = schema_of(func).arguments, kwargs or {}
        for argument, value in zip(
            given, [*args, *(named.get(each.name, each.default_value) for each in given[len(args) :])], strict=True
        ):
            if argument.name == "dropout_p" and value == 0.0:
                certain = False
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note(value)
        if certain:
            self.certain[self.node] = func.name()
        if func.name() in _WITH_STATISTICS and args[5]:
            self._note(args[3:5])
        return func(*args, **named)

    def _note(self, written: Any) -> None:
        for value in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(value, Tensor):
                self.writers.setdefault(storage_id(value), set()).add(self.node)


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
            if isinstance(value, Tensor) and (is_batched(value) or storage_id(value) in self.effects.writers)
        }
        return written | {node for node in self.effects.draws.union(*self.effects.writers.values()) if node is not None}

    def unseeded(self) -> list[str]:
        """Return the ops that draw random numbers, with the modules that call them."""
        pairs = [(op, (node and module_of(node)) or "the model") for node, op in self.effects.certain.items()]
        return list(dict.fromkeys(f"{op} in {module}" for op, module in pairs))

    def writers(self, node: Node) -> set[Node]:
        """Return the nodes that write to the memory of a node's value."""
        value = self._values[node]
        if not isinstance(value, Tensor) or is_batched(value):
            return set()
        return {writer for writer in self.effects.writers.get(storage_id(value), ()) if writer is not None}

    def sharing(self, node: Node) -> list[Node]:
        """Return the nodes whose values share memory with that of a node, itself included."""
        memory = storage_id(self._values[node])
        plain = [(each, value) for each, value in self._values.items() if isinstance(value, Tensor)]
        return [each for each, value in plain if not is_batched(value) and storage_id(value) == memory]

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
