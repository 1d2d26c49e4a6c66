"""From an FX graph to its record: shapes, sizes, sources, collectives; never the value of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import CaptureFacts, PassContext, Phase
from dsgraph.passes.analysis.cost import flops, moved_bytes, sent_bytes
from dsgraph.passes.analysis.pieces import GraphMemory
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.compat import captured_gradients
from dsgraph.passes.core.notes import origin
from dsgraph.passes.ir.coalesced import inputs_of, results_of
from dsgraph.passes.ir.collectives import collective_group, collective_kind, is_collective
from dsgraph.passes.ir.graph import aliased_arguments, fake_value, is_wait
from dsgraph.passes.ir.transfers import moved_tensor, starts_transfer, tier_of
from dsgraph.passes.ir.user_source import user_source

from .history import history
from .node_text import call_text, module_path, size_of, target_text, tensors_in
from .records import BodyRecord, CollectiveRecord, NodeRecord, PieceRecord, TransferRecord, ValueRecord


class ParameterNames:
    """The names that a dump shows. Passes know parameters by their names in the called module."""

    def __init__(self, facts: CaptureFacts | None = None) -> None:
        self._facts = facts or CaptureFacts()
        self._of_blocks = {info.name for info in self._facts.block_params.values()}
        self._in_model = {item.parameter: item.model_name for item in self._facts.roles.values() if item.model_name}

    def in_model(self, name: str) -> str:
        """Return the name in the model; the name itself if there is no other."""
        return self._in_model.get(name, name)

    def of_input(self, node: Node, ctx: PassContext) -> str:
        """Return the parameter that an input is, or is the shard of, or is the full value of in a block."""
        if node.name in ctx.params:
            return self.in_model(ctx.params[node.name].name)
        if node.name in ctx.roles and ctx.roles[node.name].parameter in self._of_blocks:
            return self.in_model(ctx.roles[node.name].parameter)
        return ""

    def of_gradients(self, output: Node, ctx: PassContext) -> dict[str, str]:
        """Return output number -> parameter whose gradient it is."""
        found = {number: self.in_model(name) for number, name in ctx.gradients.items()}
        if ctx.phase in (Phase.JOINT, Phase.BACKWARD):
            origins = captured_gradients(output).items()
            blocks = self._facts.block_params
            found |= {number: self.in_model(blocks[origin].name) for number, origin in origins if origin in blocks}
        return {str(number): found[number] for number in sorted(found)}


# The phases whose graphs run; captured and joint graphs are only on the way there.
_RUNNING = (Phase.PAIR, Phase.FORWARD, Phase.BACKWARD)


@dataclass
class Describer:
    """Describes the graphs of one compile. What stays the same from pass to pass is worked out once.

    It makes few objects that live on: each brings the next collection of garbage in the whole program nearer.

    Attributes:
        names: Names of parameters in the model.
    """

    names: ParameterNames = field(default_factory=ParameterNames)
    _known: dict[Node, tuple[Any, ...]] = field(default_factory=dict)
    _places: dict[str, tuple[str, str]] = field(default_factory=dict)
    _values: dict[int, tuple[Tensor, ValueRecord]] = field(default_factory=dict)
    _modules: dict[str, str] = field(default_factory=dict)

    def nodes(self, gm: GraphModule, ctx: PassContext) -> tuple[NodeRecord, ...]:
        """Return the nodes of a graph, in program order.

        A node that no pass has touched keeps its record, the same object.
        """
        around = _Around(
            ctx=ctx,
            reduced=_reduced_parameters(gm, ctx, self.names),
            names=self.names,
        )
        return tuple(self._node(node, around) for node in gm.graph.nodes)

    def forget_nodes(self) -> None:
        """Forget the nodes: the graph of another phase has other ones."""
        self._known.clear()

    def bodies(self, gm: GraphModule) -> tuple[BodyRecord, ...]:
        """Return the graphs inside a graph."""
        inner = [(name, module) for name, module in gm.named_modules() if name and isinstance(module, GraphModule)]
        return tuple(BodyRecord(name, tuple(map(self._alone, body.graph.nodes))) for name, body in inner)

    def _node(self, node: Node, around: _Around) -> NodeRecord:
        """Return the record of a node, with what depends on the graph around it."""
        # The facts about the surrounding graph in the record of these.
        waits = _waits(node) if is_collective(node) else []
        users = (*waits, around.reduced.get(node)) if is_collective(node) else ()
        call = (node.op, node.target, node.args, node.kwargs, node.meta.get("recompute"), history(node), users)
        known = self._known.get(node)
        is_known = known is not None and known[:-3] == call
        if known is not None and is_known:
            alias, known_root, record = known[-3:]
        else:
            may_share = node.op == "call_function" and around.ctx.phase is not Phase.CAPTURE
            alias = aliased_arguments(node)[0] if may_share else None
        root = ""
        if alias is not None:  # `node` makes no memory of its own: its (first) result lies in that of another
            root = around.roots[node] = around.roots.get(alias, alias.name)
        if is_known and known_root == root:
            found: NodeRecord = record
            return found
        ctx = around.ctx
        changes: dict[str, Any] = {"shares": root}
        if node.op == "placeholder":
            changes["parameter"] = self.names.of_input(node, ctx)
        elif node.op == "output":
            changes["gradients"] = self.names.of_gradients(node, ctx)
        elif is_collective(node):
            changes["collective"] = _collective(node, around)
        elif starts_transfer(node):
            changes["transfer"] = _transfer(node, around)
        elif node.op == "call_function" and ctx.phase in _RUNNING:
            operations, moved = number_of(node, flops(node)), number_of(node, moved_bytes(node))
            seconds = around.ctx.costs.seconds(node)
            changes.update(flops=operations, moved=moved, seconds=seconds)
        record = self._alone(node, **changes)
        self._known[node] = (*call, alias, root, record)
        return record

    def _alone(self, node: Node, **around: Any) -> NodeRecord:
        source, code = self._place(node.stack_trace or "")
        value = node.meta.get("val", node.meta.get("example_value"))
        tag = node.meta.get("recompute")
        return NodeRecord(
            name=node.name,
            op=node.op,
            target=target_text(node),
            args=call_text(node),
            inputs=tuple(source.name for source in node.all_input_nodes),
            values=tuple(map(self._value, tensors_in(value))),
            module=self._module(node),
            source=source,
            code=code,
            recompute=tag.name.lower() if isinstance(tag, CheckpointPolicy) else "",
            history=history(node),
            **around,
        )

    def _value(self, tensor: Tensor) -> ValueRecord:
        if id(tensor) not in self._values:  # its sizes take longer to read than all the rest
            size = tensor_bytes(tensor)
            record = ValueRecord(
                shape=tuple(map(size_of, tensor.shape)),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                bytes=size if isinstance(size, int) else str(size),
            )
            self._values[id(tensor)] = (tensor, record)
        return self._values[id(tensor)][1]

    def _place(self, stack_trace: str) -> tuple[str, str]:
        """Return `file:line` of the innermost frame, and its text."""
        if stack_trace not in self._places:
            self._places[stack_trace] = user_source(stack_trace)
        return self._places[stack_trace]

    def _module(self, node: Node) -> str:
        """Return the path of the module that a node computes; of a run in the graph of a step, the unit."""
        if "unit" in node.meta:
            return str(node.meta["unit"])
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            return ""
        path = str(stack[next(reversed(stack))][0])
        if path not in self._modules:
            self._modules[path] = module_path(path)
        return self._modules[path]


@dataclass(frozen=True)
class _Around:
    """Context of a node's record: what must be known besides the node."""

    ctx: PassContext
    reduced: Mapping[Node, tuple[str, ...]]
    names: ParameterNames
    roots: dict[Node, str] = field(default_factory=dict)  # of the nodes before


def _collective(node: Node, around: _Around) -> CollectiveRecord:
    group = collective_group(node)
    axis = next((axis for axis in around.ctx.axes if axis.group == group), None)
    sent = sent_bytes(node, axis.size) if axis is not None else None
    waits = _waits(node)
    gathered = tuple(map(around.names.in_model, _gathered_parameters(node, around.ctx)))
    return CollectiveRecord(
        kind=collective_kind(node),
        group=group,
        axis=axis.name if axis is not None else "",
        ranks=axis.size if axis is not None else 0,
        sent=None if sent is None else number_of(node, sent),
        seconds=around.ctx.costs.seconds(node),
        delay=around.ctx.costs.delay_seconds(node),
        wait=waits[0].name if waits else "",
        parameters=gathered or around.reduced.get(node, ()),
    )


def _transfer(node: Node, around: _Around) -> TransferRecord:
    ctx = around.ctx
    moved = moved_tensor(node)
    size, tier = number_of(moved, tensor_bytes(fake_value(moved))), tier_of(node)
    read = [ctx.params[item.name].name for item in node.all_input_nodes if item.name in ctx.params]
    return TransferRecord(
        kind=str(node.target).split(".")[1],
        tier=tier,
        bytes=size,
        seconds=ctx.costs.tier_seconds(tier, size),
        parameters=tuple(map(around.names.in_model, read)),
    )


def _waits(node: Node) -> list[Node]:
    """Return the waits for a collective, in program order: of several tensors, one for each."""
    return sorted(user for result in results_of(node) for user in result.users if is_wait(user))


def _gathered_parameters(node: Node, ctx: PassContext) -> tuple[str, ...]:
    """Return the parameters whose shards a collective sends; none when it sends what the graph has computed."""
    sources = [origin(source).name for result in results_of(node) for source in inputs_of(result)]
    return tuple(ctx.params[name].name for name in sources if name in ctx.params)


def _reduced_parameters(gm: GraphModule, ctx: PassContext, names: ParameterNames) -> dict[Node, tuple[str, ...]]:
    """Return each collective on the way to a gradient, with the parameters of those gradients."""
    found: dict[Node, tuple[str, ...]] = {}
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0] if output.args and isinstance(output.args[0], (list, tuple)) else ()
    for number, name in ctx.gradients.items():
        frontier, seen = [values[number]], set()
        while frontier:
            node = frontier.pop()
            if not isinstance(node, Node) or node in seen or node.op != "call_function":
                continue
            seen.add(node)
            if is_collective(node):
                found[node] = (*found.get(node, ()), names.in_model(name))
            if _is_after_reduction(node):
                frontier += node.all_input_nodes
    return found


def _is_after_reduction(node: Node) -> bool:
    """Return whether a gradient may pass through the node between its (last) reduction and the output."""
    return is_wait(node) or len(node.all_input_nodes) == 1


def memory_of(gm: GraphModule, ctx: PassContext, *, fused: bool) -> GraphMemory | None:
    """Return the memory of a graph; None for captured and joint graphs, which never run as they are.

    `fused`: by Inductor.
    """
    return ctx.analyses.memory(gm, fused=fused) if ctx.phase in _RUNNING else None


def pieces(memory: GraphMemory) -> tuple[PieceRecord, ...]:
    """Return the memory that a graph allocates, with its lifetime."""
    return tuple(
        PieceRecord(piece.node, piece.bytes, piece.kind.value, piece.first, piece.last, piece.owned)
        for piece in memory.pieces
        if piece.bytes
    )
