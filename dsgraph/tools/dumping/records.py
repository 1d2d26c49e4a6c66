"""Records of a compile and of its graphs: plain data, written as JSON and read back without torch.

`docs/reference/dump.schema.json` describes the files. A change that an old reader would misread raises `VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

VERSION = 1
GRAPH_FORMAT = "dsgraph-graph"
COMPILE_FORMAT = "dsgraph-compile"
NODES_BEGIN = '"nodes": ['  # in the file of a graph; the rest of it are its nodes, one a line

Size = Union[int, str]  # noqa: UP007  # read at run time
"""A number, or the text of a symbolic expression."""


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """A tensor that a node makes.

    Attributes:
        shape: Its sizes.
        dtype: As torch names it, without `torch.`.
        device: "cpu", "cuda:0", ...
        bytes: Of its elements.
    """

    shape: tuple[Size, ...]
    dtype: str
    device: str
    bytes: Size


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """A collective: what the node that starts it sends, and why.

    Attributes:
        kind: Name of the op, without namespace and overload.
        group: Name of the process group.
        axis: The mesh axis of that group; empty for a group outside the mesh.
        ranks: How many ranks it spans; 0 when unknown.
        sent: Bytes that each rank must send; None when the kind is not known.
        seconds: Predicted time; None when unknown.
        delay: Seconds by which it delays what is computed beside it.
        wait: Name of the node that waits for it; of several tensors at once, for the first of them.
        parameters: The parameters that it gathers, or whose gradients it reduces.
    """

    kind: str
    group: str
    axis: str = ""
    ranks: int = 0
    sent: int | None = None
    seconds: float | None = None
    delay: float = 0.0
    wait: str = ""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A transfer that a node starts, between memory and a tier below it.

    Attributes:
        kind: Name of the op: "offload", "reload", "fetch_parameter" or "store_gradient".
        tier: "host" or "disk".
        bytes: Its size.
        seconds: Predicted time.
        parameters: The parameter that it reads, or whose gradient it writes; none of an activation.
    """

    kind: str
    tier: str
    bytes: int
    seconds: float
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event of a node: a pass has "made", "changed", "tagged" (for recomputation) or "moved" it."""

    phase: str
    pass_name: str
    action: str


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of a graph.

    Attributes:
        name: Its name in the graph.
        op: FX's opcode.
        target: What it calls.
        args: Its arguments as Python text, in which `%name` stands for another node.
        inputs: Names of the nodes that it reads, each once.
        values: The tensors that it makes; one for most nodes.
        shares: Name of the node whose memory its result is (a part of).
        module: Path of the module whose forward (or backward) it is part of; for a run in the graph of a step, the
            unit.
        source: The user's `file:line`.
        code: The text of that line.
        parameter: For an input: the parameter that it is, or is the shard of.
        gradients: For the output: output number -> the parameter whose gradient it is.
        recompute: "must_recompute", "prefer_recompute", "must_save", ...: what the backward is told; empty for nothing.
        history: What passes did to it.
        flops: Floating-point operations.
        moved: Bytes read and written.
        seconds: Predicted time of a computation.
        collective: What it communicates.
        transfer: What it moves between memory and a tier below.
    """

    name: str
    op: str
    target: str
    args: str = ""
    inputs: tuple[str, ...] = ()
    values: tuple[ValueRecord, ...] = ()
    shares: str = ""
    module: str = ""
    source: str = ""
    code: str = ""
    parameter: str = ""
    gradients: Mapping[str, str] = field(default_factory=dict)
    recompute: str = ""
    history: tuple[EventRecord, ...] = ()
    flops: int = 0
    moved: int = 0
    seconds: float = 0.0
    collective: CollectiveRecord | None = None
    transfer: TransferRecord | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its results, symbolic ones left out."""
        return sum(value.bytes for value in self.values if isinstance(value.bytes, int))


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """A piece of memory.

    Attributes:
        node: The node that allocates it, or the input that brings it; `name:i` for the i-th result of several.
        bytes: Its size.
        kind: "input", "communication", "output" or "other".
        first: Number of the node that makes it.
        last: Number of the node that uses it last; the number of nodes for what outlives the graph.
        owned: Whether the caller holds it.
    """

    node: str
    bytes: int
    kind: str
    first: int
    last: int
    owned: bool = False


@dataclass(frozen=True, slots=True)
class BodyRecord:
    """A graph inside a graph: the body of a checkpoint region or of another higher-order op.

    Attributes:
        name: Of the module that holds it.
        nodes: In program order.
    """

    name: str
    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A graph as one pass left it.

    Attributes:
        format: GRAPH_FORMAT.
        version: VERSION of the dsgraph that wrote it.
        graph: Its name: phase, number and pass.
        rank: Of the process that wrote it.
        compile: Number of the compile on that rank.
        phase: "capture", "joint", "pair", "forward" or "backward".
        number: How many passes of the phase had run.
        pass_name: The last of them; empty before the first.
        nodes: In program order.
        live: For each node, the bytes alive while it runs, inputs included; empty for captured and joint
            graphs, which never run as they are.
        memory: What is alive from where to where; together it gives `live`.
        bodies: The graphs inside it.
    """

    format: str
    version: int
    graph: str
    rank: int
    compile: int
    phase: str
    number: int
    pass_name: str
    nodes: tuple[NodeRecord, ...] = ()
    live: tuple[int, ...] = ()
    memory: tuple[PieceRecord, ...] = ()
    bodies: tuple[BodyRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One pass over one graph, as `compile.json` lists it.

    Attributes:
        graph: Name of the graph after it.
        same_as: Name of the graph that is the same, when the pass changed nothing; that one's file is this one's.
        left_out: Why there is no file; empty when there is one.
        changed: Places that the pass says it changed.
        touched: Nodes that it made, changed, moved or removed.
        notes: What it remarks.
        done: What it did, where numbers do not say enough.
        seconds: That it took.
        verify_seconds: That checking its result took.
        dump_seconds: That describing and writing the graph took.
        nodes: After it.
        collectives: After it.
        sent: Bytes that a rank sends when the graph runs once.
        peak: Bytes alive at most, inputs included.
    """

    graph: str
    phase: str
    number: int
    pass_name: str = ""
    same_as: str = ""
    left_out: str = ""
    changed: int = 0
    touched: int = 0
    notes: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    seconds: float = 0.0
    verify_seconds: float = 0.0
    dump_seconds: float = 0.0
    nodes: int = 0
    collectives: int = 0
    sent: int = 0
    peak: int | None = None


@dataclass(frozen=True, slots=True)
class AxisRecord:
    """An axis of the device mesh."""

    name: str
    size: int
    group: str
    backend: str


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter that `partition` manages.

    Attributes:
        name: In the model; `*` stands for the number of the block if several share the graph.
        shape: Full shape.
        shard_shape: Shape of this rank's rows.
        dtype: Of the shard.
        placement: "shard" or "whole".
        requires_grad: False for a frozen one.
        is_planned: True if the graph of the step gathers it before the graph runs, and reduces its gradient.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: str
    placement: str
    requires_grad: bool
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One compile of one captured graph on one rank.

    Attributes:
        format: COMPILE_FORMAT.
        version: VERSION of the dsgraph that wrote it.
        rank: Of this process.
        world: Number of ranks.
        compile: Number of the compile on this rank, from 1.
        time: When it began, ISO 8601.
        dsgraph: Version.
        torch: Version.
        codegen: Code generator.
        function: The user's function, `file:line (name)`, with the line of a graph break before the graph.
        module: The module that is called, by its name in the model; empty for the model.
        block: The repeated block that it is, or is inside of; empty outside blocks.
        blocks: The blocks that may share the graph.
        in_step: True if gradients were enabled, so that a training step runs it.
        is_step: True for the graph of a step, whose nodes are runs of other graphs.
        axes: The mesh.
        parameters: In the order of the graph's inputs.
        steps: The passes in the order in which they ran.
    """

    format: str
    version: int
    rank: int
    world: int
    compile: int
    time: str
    dsgraph: str
    torch: str
    codegen: str
    function: str = ""
    module: str = ""
    block: str = ""
    blocks: tuple[str, ...] = ()
    in_step: bool = True
    is_step: bool = False
    axes: tuple[AxisRecord, ...] = ()
    parameters: tuple[ParameterRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
